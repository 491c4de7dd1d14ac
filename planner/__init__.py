"""The placement planner: latency models, workloads, simulator, goodput, bench (numpy, no torch)."""
