"""The placement search (paper section 4): candidates, bounds, simulation, and what is chosen."""
