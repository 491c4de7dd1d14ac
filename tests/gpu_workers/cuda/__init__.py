"""Tests of what computes on GPUs, on CPU tensors behind fakes with the real faces."""
