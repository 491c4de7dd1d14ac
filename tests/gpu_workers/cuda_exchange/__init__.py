"""Pulls between GPUs, with a CUDA runtime that is played on the memory of the host."""
