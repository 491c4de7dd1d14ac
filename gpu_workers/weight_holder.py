"""A process that holds one shard's weights on one device for all workers there that want them.

Workers of both roles on one GPU map the same memory, and no worker's end takes it from the others.
The first that needs it starts the holder, in a session of its own; it ends with the daemon. If it
ends before, workers keep what they have mapped, and the next one to start makes a new holder.
It is found by a socket in the run directory, whose name says what it holds.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import orjson
import torch

from gpu_workers.collectives import Alone
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_exchange import gpu_of
from gpu_workers.cuda_weights import DeviceWeights
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, open_weights
from gpu_workers.held_weights import (
    Contents,
    GpuSegments,
    HeldWeights,
    HostSegments,
    Recorder,
    Segments,
)
from gpu_workers.kernels import Kernels
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.models.layers import Loader
from gpu_workers.models.registry import build_model
from gpu_workers.weights import WeightSource
from ipc.cuda_runtime import load_runtime
from ipc.kv_cuda import DeviceMemory

logger = logging.getLogger(__name__)

READY = b"r"
_CONTENTS = b"contents"
_SEGMENT = b"segment"


class Order(msgspec.Struct, frozen=True):
    """What to hold, and where: `device` is `cpu` or `cuda:N`."""

    spec: EngineSpec
    device: str

    @property
    def name(self) -> str:
        """Of the socket: the same for all who want the same."""
        return f"weights-{hashlib.sha256(_packed(self)).hexdigest()[:16]}"


class HolderFailed(Exception):
    """A holder did not come up, or does not answer; weights must be loaded otherwise."""


def held_weights(order: Order, run_dir: Path, daemon: int) -> HeldWeights:
    """The weights that a holder has, which is started if none is there.

    Args:
        daemon: the process with which the holder is to end.

    Raises:
        HolderFailed: there is none, and none can be had.
    """
    path = run_dir / order.name
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the loading anyway
        with suppress(OSError):
            return _fetched(order, path)
        _start(order, path, daemon)
        try:
            return _fetched(order, path)
        except OSError as error:
            raise HolderFailed(f"the holder of the weights left at once: {error}") from error


def main(argv: Sequence[str]) -> int:
    """`python -P -m gpu_workers weight-holder`, started by a worker; the order comes on stdin."""
    parser = argparse.ArgumentParser(prog="gpu_workers weight-holder")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--daemon", type=int, required=True)
    parser.add_argument("--ready", type=int, required=True)
    arguments = parser.parse_args(argv)
    order = msgspec.convert(orjson.loads(sys.stdin.buffer.read()), Order)
    owner = os.pidfd_open(arguments.daemon)
    recorder = record(order)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        arguments.socket.unlink(missing_ok=True)
        listener.bind(str(arguments.socket))
        listener.listen()
        os.write(arguments.ready, READY)
        os.close(arguments.ready)
        _serve(listener, owner, recorder)
        arguments.socket.unlink(missing_ok=True)
    return 0


def record(order: Order) -> Recorder:
    """Load all that a model of that order takes."""
    config = read_config(order.spec.model_dir)
    weights: WeightSource = open_weights(config, order.spec, lambda fraction: None)
    device = torch.device(order.device)
    if device.type != "cpu":
        stored = stored_head_dim(config.head_dim)
        weights = DeviceWeights(weights, device, head_dim=config.head_dim, stored=stored)
    recorder = Recorder(weights, _segments(device))
    _take_all(config, order.spec, recorder)
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return recorder


class _NoKernels:
    """Packs nothing: only what is taken matters."""

    def pack(self, weight: torch.Tensor, *_: object, **__: object) -> object:
        return weight


def _take_all(config: ModelConfig, spec: EngineSpec, weights: WeightSource) -> None:
    """As a worker's model does, in its order."""
    kernels: Any = _NoKernels()
    nothing: Kernels = kernels
    with torch.inference_mode():
        build_model(Loader(config, nothing, weights, spec.shard_of(config), Alone()), nothing)


def _segments(device: torch.device) -> Segments:
    if device.type == "cpu":
        return HostSegments()
    return GpuSegments(DeviceMemory(load_runtime()), gpu_of(device), device)


def _serve(listener: socket.socket, owner: int, recorder: Recorder) -> None:
    """Hand out descriptors until the daemon ends."""
    contents = os.memfd_create("distserved-contents", os.MFD_CLOEXEC)
    os.pwrite(contents, orjson.dumps(msgspec.to_builtins(recorder.contents)), 0)
    watched = select.poll()  # descriptors of any number, which `select` does not take
    watched.register(listener, select.POLLIN)
    watched.register(owner, select.POLLIN)
    while True:
        if owner in (descriptor for descriptor, _ in watched.poll()):
            return
        guest, _ = listener.accept()
        with guest, suppress(OSError):  # it has left
            guest.settimeout(1.0)
            socket.send_fds(guest, [_CONTENTS], [contents])
            for descriptor in recorder.descriptors:
                socket.send_fds(guest, [_SEGMENT], [descriptor])


def _fetched(order: Order, path: Path) -> HeldWeights:
    """What the holder at that socket has. Raises OSError: nobody is there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.connect(str(path))
        descriptor = _received(holder)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.close(descriptor)
        contents = msgspec.convert(orjson.loads(text), Contents)
        segments = _segments(torch.device(order.device))
        memory = [segments.open(_received(holder), size) for size in contents.segments]
    return HeldWeights(contents, memory, TORCH_DTYPES[order.spec.dtype])


def _received(holder: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(holder, 16, 1)
    if not descriptors:
        raise ConnectionError("the holder has left")
    return descriptors[0]


def _start(order: Order, path: Path, daemon: int) -> None:
    """Start a holder and wait until it has loaded. Its session is its own: it outlives us."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-P", "-m", "gpu_workers", "weight-holder"]
    process = subprocess.Popen(
        [*command, "--socket", str(path), "--daemon", str(daemon), "--ready", str(theirs)],
        stdin=subprocess.PIPE,
        pass_fds=(theirs,),
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its end shows below
        process.stdin.write(_packed(order))
        process.stdin.close()
    is_ready = os.read(ours, 1) == READY
    os.close(ours)
    if not is_ready:
        raise HolderFailed(f"the holder of the weights ended with {process.wait()}")
    logger.info("process %d holds the weights on %s", process.pid, order.device)
    process.returncode = 0  # the daemon's now: nobody here waits for it


def _packed(order: Order) -> bytes:
    return orjson.dumps(msgspec.to_builtins(order))
