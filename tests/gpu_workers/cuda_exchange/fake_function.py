"""Functions of the played CUDA runtime as ctypes has them, and their errors."""

from collections.abc import Callable
from typing import Any

from ipc.cuda_runtime import SUCCESS

INVALID_VALUE, OUT_OF_MEMORY, PEER_UNSUPPORTED = 1, 2, 217
INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 400, 600, 700, 801
NAMES = {
    INVALID_VALUE: b"cudaErrorInvalidValue",
    OUT_OF_MEMORY: b"cudaErrorMemoryAllocation",
    PEER_UNSUPPORTED: b"cudaErrorPeerAccessUnsupported",
    INVALID_HANDLE: b"cudaErrorInvalidResourceHandle",
    ILLEGAL_ADDRESS: b"cudaErrorIllegalAddress",
    NOT_SUPPORTED: b"cudaErrorNotSupported",
}


class Failed(Exception):
    """The call returns that error."""


class FakeFunction:
    """One function of the library, as ctypes has it."""

    def __init__(self, name: str, body: Callable[..., Any], *, returns_code: bool = True) -> None:
        self.name, self._body, self._returns_code = name, body, returns_code
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes), f"{self.name}: {len(arguments)} arguments"
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            kind.from_param(argument)  # raises what ctypes would raise
        if not self._returns_code:
            return self._body(*arguments)
        try:
            self._body(*arguments)
        except Failed as failed:
            return failed.args[0]
        return SUCCESS
