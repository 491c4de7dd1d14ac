"""The few calls of CUDA's runtime library that moving keys and values takes, each one checked.

By ctypes on the library that torch has loaded, so that pools are plain allocations: torch's own
sharing counts references in files that must be given back in order, and shares no memory of
growing segments. The signatures are those of cuda_runtime_api.h (13; the same in 12 but for the
batched copy). Every failure is a `CudaError` that names the call. No torch in here.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from typing import Any

HANDLE_BYTES = 64

SUCCESS = 0
NOT_READY = 600
_DEFAULT_STREAM = 0
_NON_BLOCKING = 1
_NO_TIMING = 2
_PORTABLE = 1
_LAZY_PEER_ACCESS = 1
_DIRECTION_BY_ADDRESS = 4
_IN_STREAM_ORDER = 1
_BATCHES_SINCE = 13000


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class Location(ctypes.Structure):
    """cudaMemLocation; zeros are no hint."""

    _fields_ = (("type", c_int), ("id", c_int))


class CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes"""

    _fields_ = (
        ("srcAccessOrder", c_int),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", c_uint),
    )


_POINTER = POINTER(c_void_p)
_SIZES = POINTER(c_size_t)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaRuntimeGetVersion": (POINTER(c_int),),
    "cudaSetDevice": (c_int,),
    "cudaGetDevice": (POINTER(c_int),),
    "cudaDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cudaMalloc": (_POINTER, c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMemset": (c_void_p, c_int, c_size_t),
    "cudaHostAlloc": (_POINTER, c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaHostRegister": (c_void_p, c_size_t, c_uint),
    "cudaHostUnregister": (c_void_p,),
    "cudaIpcGetMemHandle": (POINTER(IpcHandle), c_void_p),
    "cudaIpcOpenMemHandle": (_POINTER, IpcHandle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMemcpy2DAsync": (
        *(c_void_p, c_size_t, c_void_p, c_size_t),
        *(c_size_t, c_size_t, c_int, c_void_p),
    ),
    "cudaMemcpyBatchAsync": (
        *(_POINTER, _POINTER, _SIZES, c_size_t),
        *(POINTER(CopyAttributes), _SIZES, c_size_t, c_void_p),
    ),
    "cudaStreamCreateWithFlags": (_POINTER, c_uint),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaEventCreateWithFlags": (_POINTER, c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
    "cudaEventSynchronize": (c_void_p,),
    "cudaEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cudaEventDestroy": (c_void_p,),
}
"""The arguments of every call; all of them return a cudaError_t."""


class CudaError(Exception):
    """A call failed: which one, and the error's name and text."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call = call
        self.code = code


class CudaUnavailable(Exception):
    """There is no runtime library to call."""


def load_runtime() -> "CudaRuntime":
    """The library that this process has loaded already (torch's), else the system's.

    Raises:
        CudaUnavailable: there is none, or it lacks a call.
    """
    loaded = _loaded_paths()
    for name in [*loaded, "libcudart.so.13", "libcudart.so.12", "libcudart.so"]:
        try:
            return CudaRuntime(ctypes.CDLL(name))
        except OSError:
            continue
        except AttributeError as error:
            raise CudaUnavailable(f"{name} is too old: {error}") from error
    raise CudaUnavailable("no libcudart.so.13 or .12 can be loaded")


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
        library.cudaGetLastError.argtypes, library.cudaGetLastError.restype = (), c_int
        self.version = self._number("cudaRuntimeGetVersion")

    @property
    def has_batches(self) -> bool:
        """Whether many copies can be one call (with the arguments of CUDA 13)."""
        return self.version >= _BATCHES_SINCE

    # ---- devices and memory ---------------------------------------------------------------

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
        self._call("cudaMemset", address, 0, num_bytes)
        self.synchronize(_DEFAULT_STREAM)
        return address

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_pinned(self, num_bytes: int) -> int:
        """Memory of the host that every device of this process reaches."""
        return self._made("cudaHostAlloc", num_bytes, _PORTABLE)

    def free_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def pin(self, address: int, num_bytes: int) -> None:
        """Make memory that the host has already such that copies run from and to it by themselves;
        whole pages of it."""
        self._call("cudaHostRegister", address, num_bytes, _PORTABLE)

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
            "cudaIpcOpenMemHandle", IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )

    def close(self, address: int) -> None:
        """Undo one `open`."""
        self._call("cudaIpcCloseMemHandle", address)

    # ---- copies, in the order of their stream ---------------------------------------------

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("cudaMemcpyAsync", target, source, num_bytes, _DIRECTION_BY_ADDRESS, stream)

    def copy_rows(
        self, target: tuple[int, int], source: tuple[int, int], shape: tuple[int, int], stream: int
    ) -> None:
        """Rows that are equally far apart on either side.

        Args:
            target: address and distance of rows, in bytes; so is `source`.
            shape: bytes of a row, and number of rows.
        """
        self._call("cudaMemcpy2DAsync", *target, *source, *shape, _DIRECTION_BY_ADDRESS, stream)

    def copy_batch(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """(target, source, bytes) each, in any order among themselves."""
        targets, sources, sizes = zip(*copies, strict=True)
        count = len(copies)
        attributes = CopyAttributes(srcAccessOrder=_IN_STREAM_ORDER)
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
        return self._made("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def synchronize(self, stream: int) -> None:
        """Until all that was asked of the stream is done; however long that takes."""
        self._call("cudaStreamSynchronize", stream)

    def wait_for(self, stream: int, event: int) -> None:
        """What is asked of the stream from here on waits for the event's last record."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def make_event(self, *, is_timed: bool = False) -> int:
        return self._made("cudaEventCreateWithFlags", 0 if is_timed else _NO_TIMING)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def is_over(self, event: int) -> bool:
        """Whether all that its stream was asked before the last record is done."""
        code = self._library.cudaEventQuery(event)
        if code == NOT_READY:
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


def _loaded_paths() -> list[str]:
    """Where the library lies that is mapped into this process, if one is."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.split(maxsplit=5)[-1].strip() for line in maps)
        return sorted({path for path in paths if "/libcudart.so" in path})
