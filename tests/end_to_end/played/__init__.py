"""A directory for PYTHONPATH: what it holds gives a service's workers played GPUs."""
