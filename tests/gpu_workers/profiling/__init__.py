"""Tests of `distserve profile`."""
