"""The few calls of CUDA's runtime library that moving keys and values takes, each one checked.

By ctypes on the library that torch has loaded, so that pools are plain allocations: torch's own
sharing counts references in files that must be given back in order, and shares no memory of
growing segments. Every failure is a `CudaError` that names the call. No torch in here.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_size_t, c_void_p
from typing import Any

from ipc.cuda_calls import (
    BATCHES_SINCE,
    DIRECTION_BY_ADDRESS,
    IN_STREAM_ORDER,
    LAZY_PEER_ACCESS,
    NO_TIMING,
    NON_BLOCKING,
    PORTABLE,
    SIGNATURES,
    SUCCESS,
    Code,
    CopyAttributes,
    IpcHandle,
)
from ipc.cuda_library import candidates, remedy

_DEFAULT_STREAM = 0


class CudaError(Exception):
    """A call failed: which one, and the error's name and text."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call = call
        self.code = code


class CudaUnavailable(Exception):
    """There is no runtime library to call, or it finds no GPU that it can use."""


def load_runtime(names: Iterable[str] | None = None) -> "CudaRuntime":
    """The library that torch calls, else one that this process has loaded, else the system's.

    Args:
        names: what to try instead.

    Raises:
        CudaUnavailable: none can be loaded, or CUDA cannot be used here; says why and what to do.
    """
    lacking = ""
    for name in candidates() if names is None else names:
        try:
            runtime = CudaRuntime(ctypes.CDLL(name))
        except OSError:
            continue
        except AttributeError as error:
            lacking = f"; {name} lacks a call: {error}"
            continue
        runtime.require_gpu()
        return runtime
    raise CudaUnavailable(f"no libcudart.so.13 or .12 can be loaded{lacking}")


class CudaRuntime:
    """Checked calls. Addresses, streams and events are plain numbers.

    Args:
        library: libcudart as ctypes loads it, or what has its face.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, arguments in SIGNATURES.items():
            if name == "cudaMemcpyBatchAsync" and not hasattr(library, name):
                continue  # before 12.8
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        for name in ("cudaGetErrorName", "cudaGetErrorString"):
            function = getattr(library, name)
            function.argtypes, function.restype = (c_int,), c_char_p
        self.version = self._number("cudaRuntimeGetVersion")

    @property
    def has_batches(self) -> bool:
        """Whether many copies can be one call (with the arguments of CUDA 13)."""
        return self.version >= BATCHES_SINCE

    # ---- devices and memory ---------------------------------------------------------------

    def require_gpu(self) -> None:
        """Raises CudaUnavailable: there is no GPU that can be used; says why and what to do."""
        try:
            self._number("cudaGetDeviceCount")
        except CudaError as error:
            driver = self._number("cudaDriverGetVersion")
            advice = remedy(error.code, driver=driver, runtime=self.version)
            raise CudaUnavailable(f"CUDA cannot be used here: {error}; {advice}") from error

    def check(self) -> None:
        """Wait until the current device has nothing to do for its default stream.

        Raises:
            CudaError: the device failed, and with it all that this process has there.
        """
        self.synchronize(_DEFAULT_STREAM)

    @property
    def device(self) -> int:
        return self._number("cudaGetDevice")

    def use(self, device: int) -> None:
        """What follows on this thread is about that device."""
        self._call("cudaSetDevice", device)

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        """Use a device for a while."""
        before = self.device
        self.use(device)
        try:
            yield
        finally:
            self.use(before)

    def can_access(self, device: int, peer: int) -> bool:
        """Whether the one can read the other's memory itself."""
        return bool(self._number("cudaDeviceCanAccessPeer", device, peer))

    def allocate(self, num_bytes: int) -> int:
        """Zeroed memory of the current device. No stream of ours waits for the default one, on
        which it is zeroed: so we do."""
        address = self._made("cudaMalloc", num_bytes)
        self.fill(address, 0, num_bytes)
        return address

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        """Every byte there is that when this returns."""
        self._call("cudaMemset", address, value, num_bytes)
        self.synchronize(_DEFAULT_STREAM)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_pinned(self, num_bytes: int) -> int:
        """Memory of the host that every device of this process reaches."""
        return self._made("cudaHostAlloc", num_bytes, PORTABLE)

    def free_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def pin(self, address: int, num_bytes: int) -> None:
        """Make memory that the host has already such that copies run from and to it by themselves;
        whole pages of it."""
        self._call("cudaHostRegister", address, num_bytes, PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo one `pin`, when no copy is under way there."""
        self._call("cudaHostUnregister", address)

    def export(self, address: int) -> bytes:
        """How another process opens the allocation that begins there."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.pointer(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation on the current device."""
        return self._made(
            "cudaIpcOpenMemHandle", IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS
        )

    def close(self, address: int) -> None:
        """Undo one `open`."""
        self._call("cudaIpcCloseMemHandle", address)

    # ---- copies, in the order of their stream ---------------------------------------------

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("cudaMemcpyAsync", target, source, num_bytes, DIRECTION_BY_ADDRESS, stream)

    def copy_rows(
        self, target: tuple[int, int], source: tuple[int, int], shape: tuple[int, int], stream: int
    ) -> None:
        """Rows that are equally far apart on either side.

        Args:
            target: address and distance of rows, in bytes; so is `source`.
            shape: bytes of a row, and number of rows.
        """
        self._call("cudaMemcpy2DAsync", *target, *source, *shape, DIRECTION_BY_ADDRESS, stream)

    def copy_batch(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """(target, source, bytes) each, in any order among themselves."""
        targets, sources, sizes = zip(*copies, strict=True)
        count = len(copies)
        attributes = CopyAttributes(srcAccessOrder=IN_STREAM_ORDER)
        self._call(
            "cudaMemcpyBatchAsync",
            (c_void_p * count)(*targets),
            (c_void_p * count)(*sources),
            (c_size_t * count)(*sizes),
            count,
            ctypes.pointer(attributes),
            (c_size_t * 1)(0),  # they hold from the first copy on
            1,
            stream,
        )

    # ---- streams and events ---------------------------------------------------------------

    def make_stream(self) -> int:
        """Of the current device; does not wait for the default stream."""
        return self._made("cudaStreamCreateWithFlags", NON_BLOCKING)

    def synchronize(self, stream: int) -> None:
        """Until all that was asked of the stream is done; however long that takes."""
        self._call("cudaStreamSynchronize", stream)

    def wait_for(self, stream: int, event: int) -> None:
        """What is asked of the stream from here on waits for the event's last record."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def make_event(self, *, is_timed: bool = False) -> int:
        return self._made("cudaEventCreateWithFlags", 0 if is_timed else NO_TIMING)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def is_over(self, event: int) -> bool:
        """Whether all that its stream was asked before the last record is done."""
        code = self._library.cudaEventQuery(event)
        if code == Code.NOT_READY:
            self._library.cudaGetLastError()
            return False
        self._check("cudaEventQuery", code)
        return True

    def await_event(self, event: int) -> None:
        self._call("cudaEventSynchronize", event)

    def seconds_between(self, first: int, second: int) -> float:
        """Between two timed events that are over."""
        milliseconds = c_float()
        self._call("cudaEventElapsedTime", ctypes.pointer(milliseconds), first, second)
        return milliseconds.value / 1e3

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def _made(self, call: str, *arguments: Any) -> int:
        """The address that a call leaves in its first argument."""
        made = c_void_p()
        self._call(call, ctypes.pointer(made), *arguments)
        return made.value or 0

    def _number(self, call: str, *arguments: int) -> int:
        told = c_int()
        self._call(call, ctypes.pointer(told), *arguments)
        return told.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, call: str, code: int) -> None:
        if code == SUCCESS:
            return
        # It is told here: torch, which asks the same library, must not find it after its own call.
        self._library.cudaGetLastError()
        name: bytes = self._library.cudaGetErrorName(code)
        text: bytes = self._library.cudaGetErrorString(code)
        raise CudaError(call, code, name.decode(), text.decode())
