"""A directory for PYTHONPATH: processes take orders, and workers have played GPUs."""
