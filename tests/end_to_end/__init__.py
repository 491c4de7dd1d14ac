"""Tests that run whole services: real workers, real sockets, real HTTP."""
