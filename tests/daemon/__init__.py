"""Tests of the daemon room."""
