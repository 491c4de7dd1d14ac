"""One worker process, from its start to its reaping.

Started by the daemon's main thread (the kernel's parent-death signal is tied to the thread that
spawned), in a process group of its own, with one inherited socket: its configuration, its memory
descriptors and the sign of our life.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Self

from ipc import channel, journal
from ipc.channel import PoolDescriptor
from ipc.messages import WorkerConfig


class WorkerProcess:
    """A running (or ended) process of one worker."""

    def __init__(
        self, config: WorkerConfig, process: asyncio.subprocess.Process, ours: socket.socket
    ) -> None:
        self.config = config
        self._process = process
        self._channel = ours
        self.pool_descriptor: int | None = None

    @classmethod
    async def start(cls, config: WorkerConfig) -> Self:
        ours, theirs = channel.make_pair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gpu_workers", "worker"),
                *("--channel", str(theirs.fileno()), "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=compute_environment(config.num_threads)
                | gpu_environment(config)
                | journal.for_children(),
                process_group=0,
            )
            undo.pop_all()
        with contextlib.suppress(channel.ChannelClosed):  # then its exit says why
            channel.send_config(ours, config)
        return cls(config, process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ended(self) -> str:
        """Wait for the process to be reaped; how it ended, in words."""
        code = await self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def take_pool(self) -> None:
        """The worker has sent its pool's descriptor and said so: keep it for the importers.

        Raises:
            ChannelClosed: the worker is gone.
        """
        about, self.pool_descriptor = channel.receive_descriptor(self._channel)
        assert about.epoch == self.config.epoch

    def give_pool(self, about: PoolDescriptor, descriptor: int | None) -> None:
        """Send another worker's pool; the `PeerUp` command follows on the link."""
        assert descriptor is not None, "it is on another node"
        with contextlib.suppress(channel.ChannelClosed):  # its exit is on the way to us
            channel.send_descriptor(self._channel, about, descriptor)

    def kill(self) -> None:
        """SIGKILL to the whole group; reap with `ended`. Idempotent."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give back what we hold of it. Idempotent."""
        self._channel.close()
        if self.pool_descriptor is not None:
            os.close(self.pool_descriptor)
            self.pool_descriptor = None


def gpu_environment(config: WorkerConfig) -> dict[str, str]:
    """Before CUDA is loaded: it counts what is named here, in this order."""
    if not config.visible_gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(config.visible_gpus)}


def compute_environment(num_threads: int) -> dict[str, str]:
    """Threads are set before torch is loaded; huge pages for what malloc gives (weights)."""
    threads = str(num_threads)
    return os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # A primitive is kept per shape, and prompts have any length: the default of 1024 grew a
        # worker by gigabytes. Two names: torch's own cache and oneDNN's.
        "LRU_CACHE_CAPACITY": "64",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    }
