"""A worker's way to weights that a `weight_holder` has: found by its socket, started if need be.

The first worker that wants them starts the holder and waits until they are loaded; others wait for
the same lock, which is the holder's until then, whatever becomes of the worker that started it. If
a holder ends, workers keep what they have mapped, and the next one to start makes a new holder.
"""

import fcntl
import logging
import os
import select
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import orjson
import torch

from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.held_weights import Contents, HeldWeights
from gpu_workers.weight_holder import READY, Order, segments_on

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # of a holder that has loaded: it only hands out descriptors


class HolderFailed(Exception):
    """A holder did not come up, or does not answer; weights must be loaded otherwise."""


def held_weights(order: Order, run_dir: Path, daemon: int) -> HeldWeights:
    """The weights that a holder has, which is started if none is there.

    Args:
        daemon: the process with which the holder is to end.

    Raises:
        HolderFailed: there is none, and none can be had.
        PoolUnavailable: there is one, and its memory cannot be opened here.
    """
    path = order.socket_in(run_dir, daemon)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError):
            return _fetched(order, path)
        _start(order, path, daemon, lock.fileno())
        try:
            return _fetched(order, path)
        except OSError as error:
            raise HolderFailed(f"the holder of the weights left at once: {error}") from error


def _fetched(order: Order, path: Path) -> HeldWeights:
    """What the holder at that socket has. Raises OSError: nobody is there, or nobody answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as holder:
        holder.settimeout(ANSWER_S)
        holder.connect(str(path))
        descriptor = _received(holder)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.close(descriptor)
        contents = msgspec.convert(orjson.loads(text), Contents)
        segments = segments_on(torch.device(order.device))
        memory = [segments.open(_received(holder), size) for size in contents.segments]
    return HeldWeights(contents, memory, TORCH_DTYPES[order.spec.dtype])


def _received(holder: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(holder, 16, 1)
    if not descriptors:
        raise ConnectionError("the holder has left")
    return descriptors[0]


def _start(order: Order, path: Path, daemon: int, lock: int) -> None:
    """Start a holder and wait until it has loaded. Its session is its own: it outlives us."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-P", "-m", "gpu_workers", "weight-holder"]
    told = {"socket": path, "daemon": daemon, "ready": theirs, "lock": lock}
    process = subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in told.items())],
        stdin=subprocess.PIPE,
        pass_fds=(theirs, lock),
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # its end shows below
        process.stdin.write(order.packed)
    answer = os.read(ours, select.PIPE_BUF)
    os.close(ours)
    if answer != READY:
        ended = process.wait()
        raise HolderFailed(answer.decode() or f"the holder of the weights ended with {ended}")
    logger.info("process %d holds the weights on %s", process.pid, order.device)
    process.returncode = 0  # the daemon's now: nobody here waits for it
