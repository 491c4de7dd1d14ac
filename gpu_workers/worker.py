"""One worker process: takes its configuration, builds its engine, joins the daemon, runs.

Everything it needs comes over the inherited channel; everything it does is asked for over the
ZeroMQ link. The step loop owns both; one thread only watches for the daemon's death.
"""

import argparse
import gc
import logging
import os
import socket
import time

import torch

from gpu_workers import lifeline
from gpu_workers.batching import BatchLimits
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.engine import EngineSpec, build_executor, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.leader import Leader
from gpu_workers.models.config import read_config
from gpu_workers.prefault import prefault
from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc import channel
from ipc.kv_shm import PoolUnavailable
from ipc.messages import Broken, Hello, Loading, PeerUp, PoolDescriptor, Ready, WorkerConfig
from ipc.sockets import WorkerSocket

logger = logging.getLogger(__name__)

EXIT_BROKEN = 78


def main(argv: list[str]) -> int:
    """`python -m gpu_workers worker --channel FD --parent PID`, started by the daemon alone."""
    parser = argparse.ArgumentParser(prog="gpu_workers worker")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args(argv)
    lifeline.die_with_parent(arguments.parent)
    with socket.socket(fileno=arguments.channel) as own_channel:
        config = channel.receive_config(own_channel)
        lifeline.watch(own_channel)
        return Worker(config, own_channel).run()


class Worker:
    """Holds what the process owns: its end of the channel, the link, the pool, the engine."""

    def __init__(self, config: WorkerConfig, own_channel: socket.socket) -> None:
        self._config = config
        self._channel = own_channel
        self._started_s = time.monotonic()
        self._link = WorkerSocket(config.endpoint, config.name, config.epoch)

    def run(self) -> int:
        """Exit code: 0 after `Exit`, 78 when it can never start."""
        _set_up_cpu(self._config)
        self._link.send(Hello(self._config.name, os.getpid()))
        try:
            exchange, executor = self._build()
        except (ModelError, PoolUnavailable) as error:
            self._link.send(Broken(str(error)))
            self._link.close()
            return EXIT_BROKEN
        self._announce(exchange, executor)
        prefault(exchange.pool)
        with torch.inference_mode():
            self._leader(exchange, executor).run()
        self._link.close()
        return 0

    def _build(self) -> tuple[CpuExchange, Executor]:
        config = self._config
        model = read_config(config.model_dir)
        layout = pool_layout(
            model, dtype=config.dtype, block_size=config.block_size, kv_bytes=config.kv_bytes
        )
        exchange = CpuExchange(layout, str(config.name))
        spec = EngineSpec(
            model_dir=config.model_dir,
            dtype=config.dtype,
            load_format=config.load_format,
            max_context_tokens=config.max_context_tokens,
            num_token_ids=config.num_token_ids,
        )
        executor = build_executor(model, spec, exchange, progress=self._report_progress)
        return exchange, executor

    def _report_progress(self, fraction: float) -> None:
        self._link.send(Loading("loading weights", fraction))

    def _announce(self, exchange: CpuExchange, executor: Executor) -> None:
        config = self._config
        about = PoolDescriptor(config.name, config.epoch)
        channel.send_descriptor(self._channel, about, exchange.descriptor)
        load_s = time.monotonic() - self._started_s
        self._link.send(Ready(exchange.layout, executor.kernels_name, load_s))

    def _leader(self, exchange: CpuExchange, executor: Executor) -> Leader:
        config = self._config
        scheduler = Scheduler(
            Owner(config.name.instance, config.epoch),
            config.role,
            config.mixed,
            num_blocks=exchange.layout.num_blocks,
            block_size=exchange.layout.block_size,
            limits=BatchLimits(config.prefill_tokens, config.max_batch),
        )

        def map_peer(peer: PeerUp) -> None:
            about, descriptor = channel.receive_descriptor(self._channel)
            assert (about.worker, about.epoch) == (peer.worker, peer.epoch)
            exchange.map_peer(peer.worker, peer.epoch, peer.layout, descriptor)

        return Leader(self._link, scheduler, executor, exchange, map_peer)


def _set_up_cpu(config: WorkerConfig) -> None:
    """One compute thread per core of ours; no pauses by the collector in the step loop."""
    torch.set_num_threads(config.num_threads)
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    gc.disable()
