"""Tests of the gpu_workers room."""
