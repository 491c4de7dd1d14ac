"""What can go wrong with a model on disk."""


class ModelError(Exception):
    """A model directory that cannot be served: one sentence that names what and where."""
