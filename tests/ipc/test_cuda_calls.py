"""What we declare of CUDA's runtime, against its headers: a compiler says what they mean."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc import cuda_calls
from ipc.cuda_calls import SIGNATURES, Code, CopyAttributes, IpcHandle, Location
from ipc.cuda_runtime import CudaRuntime
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart

HEADERS = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    COMPILER is None or not (HEADERS / "cuda_runtime_api.h").exists(),
    reason="needs CUDA's headers and a compiler",
)

FLAGS = {
    "NON_BLOCKING": ["cudaStreamNonBlocking"],
    "NO_TIMING": ["cudaEventDisableTiming"],
    "PORTABLE": ["cudaHostAllocPortable", "cudaHostRegisterPortable"],
    "LAZY_PEER_ACCESS": ["cudaIpcMemLazyEnablePeerAccess"],
    "DIRECTION_BY_ADDRESS": ["cudaMemcpyDefault"],
    "IN_STREAM_ORDER": ["cudaMemcpySrcAccessOrderStream"],
    "HANDLE_BYTES": ["CUDA_IPC_HANDLE_SIZE"],
    "SUCCESS": ["cudaSuccess"],
}
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "cudaIpcMemHandle_t": IpcHandle,
    "cudaMemLocation": Location,
    "cudaMemcpyAttributes": CopyAttributes,
}
# Writes a type as letters: p(ointer to), v(oid or unknown), f(loat), i(nteger), u(nsigned) and
# s(truct) with their sizes. An enumeration is an i.
SOURCE = """
#include <cstring>
#include <string>
#include <type_traits>
#include <cuda_runtime_api.h>

template <class T, class = void> struct Size { static std::string of() { return "v"; } };
template <class T> struct Size<T, decltype(void(sizeof(T)))> {
  static std::string of() {
    const char *kind = std::is_floating_point<T>::value ? "f"
        : std::is_class<T>::value ? "s"
        : std::is_unsigned<T>::value ? "u" : "i";
    return kind + std::to_string(sizeof(T));
  }
};
template <> struct Size<void> { static std::string of() { return "v"; } };
template <class T> struct Kind : Size<typename std::remove_cv<T>::type> {};
template <class T> struct Kind<T *> { static std::string of() { return "p" + Kind<T>::of(); } };
template <class T> struct Kind<T *const> : Kind<T *> {};
template <class F> struct Call;
template <class R, class... A> struct Call<R (*)(A...)> {
  static std::string of() {
    std::string all = Kind<R>::of();
    std::string each[] = {std::string(), Kind<A>::of()...};
    for (auto &one : each) all += one.empty() ? one : " " + one;
    return all;
  }
};

static std::string told;
static void tell(const char *name, const std::string &what) {
  told += std::string(name) + "=" + what + "\\n";
}
extern "C" const char *describe() {
  @LINES@
  return told.c_str();
}
extern "C" cudaError_t played_open(void **sum, cudaIpcMemHandle_t handle, unsigned int flags) {
  size_t all = flags;
  for (unsigned char byte : handle.reserved) all = all * 31 + byte;
  *sum = (void *)all;
  return cudaSuccess;
}
extern "C" cudaError_t played_batch(void *const *dsts, const void *const *srcs, const size_t *sizes,
    size_t count, struct cudaMemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
    cudaStream_t stream) {
  if (numAttrs != 1 || attrsIdxs[0] != 0 || stream != (cudaStream_t)7) return cudaErrorInvalidValue;
  if (attrs[0].srcAccessOrder != cudaMemcpySrcAccessOrderStream) return cudaErrorInvalidValue;
  for (size_t i = 0; i < count; i++) memcpy(dsts[i], srcs[i], sizes[i]);
  return cudaSuccess;
}
static_assert(std::is_same<decltype(&played_open), decltype(&cudaIpcOpenMemHandle)>::value, "");
static_assert(CUDART_VERSION < 13000
    || std::is_same<decltype(&played_batch), decltype(&cudaMemcpyBatchAsync)>::value, "");
"""


def error_of(name: str) -> str:
    return "cudaError" + name.title().replace("_", "")


def lines() -> Iterator[str]:
    for call in SIGNATURES:
        yield f'tell("{call}", Call<decltype(&{call})>::of());'
    values = [word for words in FLAGS.values() for word in words] + [
        error_of(name) for name in Code.__members__
    ]
    for word in ["CUDART_VERSION", *values]:
        yield f'tell("{word}", std::to_string((long)({word})));'
    for name, struct in STRUCTS.items():
        yield f'tell("{name}", std::to_string(sizeof({name})));'
        for field, *_ in struct._fields_:
            yield f'tell("{name}.{field}", std::to_string(offsetof({name}, {field})));'


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("cuda") / "headers.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-I", HEADERS, "-x", "c++", "-", "-o", library],
        input=SOURCE.replace("@LINES@", "\n  ".join(lines())).encode(),
        check=True,
    )
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def header(compiled: ctypes.CDLL) -> dict[str, str]:
    """What the headers say, by name."""
    compiled.describe.restype = ctypes.c_char_p
    text: bytes = compiled.describe()
    return dict(line.split("=") for line in text.decode().splitlines())


def letters(kind: Any) -> str:
    """A type of ours in the letters of the source above."""
    if kind is ctypes.c_void_p:
        return "pv"
    if issubclass(kind, ctypes._Pointer):
        return "p" + letters(kind._type_)
    size = ctypes.sizeof(kind)
    if issubclass(kind, ctypes.Structure):
        return f"s{size}"
    if kind is ctypes.c_float:
        return f"f{size}"
    return f"{'i' if kind(-1).value < 0 else 'u'}{size}"


@pytest.mark.parametrize("call", SIGNATURES)
def test_the_arguments_of_every_call_are_those_of_the_header(
    header: dict[str, str], call: str
) -> None:
    declared = " ".join(["i4", *map(letters, SIGNATURES[call])])
    is_as_declared = declared == header[call]
    if call == "cudaMemcpyBatchAsync":  # else it is never called
        assert is_as_declared == (int(header["CUDART_VERSION"]) >= cuda_calls.BATCHES_SINCE)
    else:
        assert is_as_declared, header[call]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_have_the_headers_values(header: dict[str, str], flag: str) -> None:
    assert {int(header[word]) for word in FLAGS[flag]} == {getattr(cuda_calls, flag)}


@pytest.mark.parametrize("name", Code.__members__)
def test_errors_have_the_headers_numbers(header: dict[str, str], name: str) -> None:
    assert int(header[error_of(name)]) == Code[name]


@pytest.mark.parametrize("name", STRUCTS)
def test_structures_are_laid_out_as_in_the_header(header: dict[str, str], name: str) -> None:
    struct = STRUCTS[name]
    assert ctypes.sizeof(struct) == int(header[name])
    for field, *_ in struct._fields_:
        assert getattr(struct, field).offset == int(header[f"{name}.{field}"])


def test_a_handle_arrives_whole_by_value_whatever_bytes_it_has(compiled: ctypes.CDLL) -> None:
    handle = bytes([0, 255, 1, 0, *range(60)])
    function, total = compiled.played_open, 1
    function.argtypes = SIGNATURES["cudaIpcOpenMemHandle"]
    for byte in handle:
        total = (total * 31 + byte) % 2**64
    found = ctypes.c_void_p()
    assert function(ctypes.pointer(found), IpcHandle.from_buffer_copy(handle), 1) == 0
    assert found.value == total


def test_a_batch_of_copies_arrives_as_it_was_asked_for(compiled: ctypes.CDLL) -> None:
    library: Any = FakeCudart()
    library.cudaMemcpyBatchAsync = compiled.played_batch
    runtime = CudaRuntime(library)
    source = ctypes.create_string_buffer(b"0123456789", 10)
    target = ctypes.create_string_buffer(10)
    start, into = ctypes.addressof(source), ctypes.addressof(target)
    runtime.copy_batch([(into, start + 5, 3), (into + 4, start, 2)], 7)
    assert target.raw == b"567\x0001\x00\x00\x00\x00"
