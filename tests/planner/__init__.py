"""Tests of the planner: latency models, workloads, simulator, goodput, bench."""
