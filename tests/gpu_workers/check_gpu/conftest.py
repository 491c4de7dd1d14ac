"""All tests here compute with one thread."""

from tests.gpu_workers.one_thread import one_thread

__all__ = ["one_thread"]
