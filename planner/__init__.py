"""The placement planner and its simulator (numpy, no torch). Nothing here yet but its place."""
