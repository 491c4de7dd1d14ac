"""Replays a workload against an OpenAI-compatible service, and tells how it did."""
