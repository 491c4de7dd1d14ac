"""Replanning: has the workload shifted, what placement would suit it now, and does a switch pay."""
