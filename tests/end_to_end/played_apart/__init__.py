"""A directory for PYTHONPATH: played GPUs, none of which can read another's memory."""
