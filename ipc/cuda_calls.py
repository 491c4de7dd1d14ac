"""What is declared of CUDA's runtime library: structures, arguments, flags, errors' numbers.

Those of cuda_runtime_api.h and driver_types.h (13; the same in 12 but for the batched copy), which
a test compares by compiling against them. Calls nothing.
"""

import ctypes
from ctypes import POINTER, c_char, c_float, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from typing import Any

HANDLE_BYTES = 64

SUCCESS = 0
NON_BLOCKING = 1  # cudaStreamNonBlocking
NO_TIMING = 2  # cudaEventDisableTiming
PORTABLE = 1  # cudaHostAllocPortable, cudaHostRegisterPortable
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: the one flag there is, and it must be set
DIRECTION_BY_ADDRESS = 4  # cudaMemcpyDefault
IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
BATCHES_SINCE = 13000
"""The version from which the batched copy has the arguments below: 12 has one more."""


class Code(IntEnum):
    """The errors that mean something to us; named as in the header, which says cudaError before."""

    INITIALIZATION_ERROR = 3
    STUB_LIBRARY = 34
    INSUFFICIENT_DRIVER = 35
    DEVICES_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    NOT_READY = 600
    SYSTEM_NOT_READY = 802
    SYSTEM_DRIVER_MISMATCH = 803
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    MPS_CONNECTION_FAILED = 805
    MPS_RPC_FAILURE = 806
    MPS_SERVER_NOT_READY = 807
    MPS_MAX_CLIENTS_REACHED = 808
    MPS_MAX_CONNECTIONS_REACHED = 809
    UNKNOWN = 999


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
_NUMBER = POINTER(c_int)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaRuntimeGetVersion": (_NUMBER,),
    "cudaDriverGetVersion": (_NUMBER,),
    "cudaGetDeviceCount": (_NUMBER,),
    "cudaSetDevice": (c_int,),
    "cudaGetDevice": (_NUMBER,),
    "cudaDeviceCanAccessPeer": (_NUMBER, c_int, c_int),
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
    "cudaGetLastError": (),
}
"""The arguments of every call; all of them return a cudaError_t."""
