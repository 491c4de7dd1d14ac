"""Decoders against inputs that nobody would think of: only the declared error ever comes out."""
