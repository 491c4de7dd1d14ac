"""What arrives: lengths and arrival times, named, read from a trace, fitted and resampled."""
