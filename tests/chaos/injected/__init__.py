"""A directory for PYTHONPATH: what it holds breaks things inside processes under test."""
