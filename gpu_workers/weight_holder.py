"""A process that holds one shard's weights on one device for all workers there that want them.

Workers of both roles on one GPU map the same memory, and no worker's end takes it from the others.
Its session is its own, its life the daemon's: it ends at that one's end, also while it loads. It
ends with its device, too, so that nobody is given what is lost and MPS, which recovers from a fault
only when every process that used the GPU has left, is not held up. Who starts it and what for is
`weight_guest`'s.
"""

import argparse
import hashlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import orjson
import torch

from gpu_workers.collectives import Alone
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_exchange import gpu_of
from gpu_workers.cuda_weights import DeviceWeights
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, open_weights
from gpu_workers.errors import ModelError
from gpu_workers.held_weights import (
    Counted,
    GpuSegments,
    HostSegments,
    Outline,
    Recorder,
    Segments,
)
from gpu_workers.kernels import Kernels
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.models.layers import Loader
from gpu_workers.models.registry import build_model, weight_shapes
from gpu_workers.weights import WeightSource
from ipc.cuda_runtime import CudaError, CudaUnavailable, load_runtime
from ipc.kv_cuda import DeviceMemory
from ipc.kv_shm import PoolUnavailable
from ipc.run_dir import RunDir

logger = logging.getLogger(__name__)

READY = b"ready"
CONTENTS = b"contents"
SEGMENT = b"segment"
EXIT_DEVICE = 74
EXIT_REFUSED = 78
LOADING_S = 3600  # a loading that takes longer hangs, and others wait for it
LOOK_S = 5.0
GUEST_S = 1.0


class Order(msgspec.Struct, frozen=True):
    """What to hold, and where: `device` is `cpu` or `cuda:N`, by its number for this process.

    `gpu` is the device's UUID: numbers are not the same for all who see different GPUs.
    """

    spec: EngineSpec
    device: str
    gpu: str = ""

    def socket_in(self, run_dir: Path, daemon: int) -> Path:
        """Where its holder listens: the same for all workers of a daemon who want the same."""
        text = b"%d %s" % (daemon, self.packed)
        return RunDir(run_dir).weights_socket(hashlib.sha256(text).hexdigest())

    @property
    def packed(self) -> bytes:
        return orjson.dumps(msgspec.to_builtins(self))


def order_for(spec: EngineSpec, device: torch.device) -> Order:
    """All that a model of that kind takes, on a device of ours."""
    return Order(spec, str(device), "" if device.type == "cpu" else gpu_of(device).uuid)


def main(argv: Sequence[str]) -> int:
    """`python -P -m gpu_workers weight-holder`, started by a worker; the order comes on stdin.

    Exit code: 78 when the order cannot be carried out, 74 when the device failed.
    """
    parser = argparse.ArgumentParser(prog="gpu_workers weight-holder")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--daemon", type=int, required=True)
    parser.add_argument("--ready", type=int, required=True)
    parser.add_argument("--lock", type=int, required=True)
    arguments = parser.parse_args(argv)
    _end_with(arguments.daemon, arguments.socket)
    ready = FileIO(arguments.ready, "wb")
    order = msgspec.convert(orjson.loads(sys.stdin.buffer.read()), Order)
    try:
        signal.alarm(LOADING_S)
        segments = segments_on(torch.device(order.device))
        with closing(Holder(order, segments, arguments.socket)) as holder:
            signal.alarm(0)
            _tell(ready, READY)
            # Held since before we were started: who came meanwhile waited instead of loading, too.
            os.close(arguments.lock)
            holder.serve()
    except (ModelError, PoolUnavailable, CudaUnavailable) as error:
        return _refused(ready, error, EXIT_REFUSED)
    except (CudaError, torch.AcceleratorError, torch.OutOfMemoryError) as error:
        return _refused(ready, error, EXIT_DEVICE)


def record(order: Order, segments: Segments) -> Recorder:
    """Load all that a model of that order takes, into one segment."""
    config, spec, device = read_config(order.spec.model_dir), order.spec, torch.device(order.device)
    outline = Outline(weight_shapes(config), TORCH_DTYPES[spec.dtype])
    counted = Counted(_as_stored(outline, config, torch.device("meta"), device))
    _take_all(config, spec, counted)
    weights = open_weights(config, spec, lambda fraction: None, device)
    stored = _as_stored(weights, config, device, device)
    recorder = Recorder(stored, segments, segment_bytes=counted.num_bytes)
    _take_all(config, spec, recorder)
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what tensors passed through on their way
    return recorder


def segments_on(device: torch.device) -> Segments:
    """Memory there that is shared by descriptors."""
    if device.type == "cpu":
        return HostSegments()
    return GpuSegments(DeviceMemory(load_runtime()), gpu_of(device), device)


class Holder:
    """The weights of an order, and the socket where they are handed out.

    Args:
        look_s: how often the device is asked whether it is well, while nobody comes: one that
            failed tells nobody.
    """

    def __init__(
        self, order: Order, segments: Segments, path: Path, *, look_s: float = LOOK_S
    ) -> None:
        self._segments = segments
        self._recorder = record(order, segments)
        self._contents = os.memfd_create("distserved-contents", os.MFD_CLOEXEC)
        os.pwrite(self._contents, orjson.dumps(msgspec.to_builtins(self._recorder.contents)), 0)
        self._path = path
        path.unlink(missing_ok=True)  # of a holder that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(look_s)

    def serve(self) -> NoReturn:
        """Hand out descriptors for as long as the device is well. Raises CudaError: it is not."""
        while True:
            with suppress(TimeoutError):
                self._receive(self._listener.accept()[0])
            self._segments.check()

    def _receive(self, guest: socket.socket) -> None:
        with guest, suppress(OSError):  # it has left
            self._segments.check()
            guest.settimeout(GUEST_S)
            socket.send_fds(guest, [CONTENTS], [self._contents])
            for descriptor in self._recorder.descriptors:
                socket.send_fds(guest, [SEGMENT], [descriptor])

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


class _NoKernels:
    """Packs nothing: only what is taken matters."""

    def pack(self, weight: torch.Tensor, *_: object, **__: object) -> object:
        return weight


def _as_stored(
    weights: WeightSource, config: ModelConfig, where: torch.device, for_device: torch.device
) -> WeightSource:
    """With heads padded to what a GPU stores, if it is one that they are for."""
    if for_device.type == "cpu":
        return weights
    stored = stored_head_dim(config.head_dim)
    return DeviceWeights(weights, where, head_dim=config.head_dim, stored=stored)


def _take_all(config: ModelConfig, spec: EngineSpec, weights: WeightSource) -> None:
    """As a worker's model does, in its order."""
    kernels: Any = _NoKernels()
    nothing: Kernels = kernels
    with torch.inference_mode():
        build_model(Loader(config, nothing, weights, spec.shard_of(config), Alone()), nothing)


def _end_with(daemon: int, path: Path) -> None:
    """Leave the process when that one does, whatever we are at."""
    owner = os.pidfd_open(daemon)

    def wait() -> None:
        watched = select.poll()
        watched.register(owner, select.POLLIN)
        watched.poll()
        path.unlink(missing_ok=True)
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="owner").start()


def _refused(ready: FileIO, error: Exception, code: int) -> int:
    reason = str(error).splitlines()[0]
    logger.error("no weights are held here: %s", reason)
    if not ready.closed:
        _tell(ready, reason.encode())
    return code


def _tell(ready: FileIO, words: bytes) -> None:
    """Once; the worker that started us may have ended, which is no concern of ours."""
    with suppress(BrokenPipeError), ready:
        ready.write(words[: select.PIPE_BUF])
