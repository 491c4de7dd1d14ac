"""Tests, one folder per room, and whole services in end_to_end."""
