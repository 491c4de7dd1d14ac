"""One worker process: takes its configuration, builds its engine, joins the daemon, runs.

Everything it needs comes over the inherited channel; everything it does is asked for over the
ZeroMQ link, or by its instance's leader where it is not the leader itself. The step loop owns
both; one thread only watches for the daemon's death.
"""

import argparse
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import torch

from gpu_workers import lifeline
from gpu_workers.collectives import CollectivesFailed
from gpu_workers.device_watch import DeviceWatch
from gpu_workers.errors import ModelError
from gpu_workers.follower import Follower, Peers
from gpu_workers.group import GroupExchange, GroupExecutor, GroupLink, drawer, ranks
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.leader import Leader
from gpu_workers.plan_bus import FollowerBus, GroupBroken, LeaderBus, Waiting
from gpu_workers.prefault import prefault
from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from gpu_workers.worker_engine import WorkerEngine
from ipc import channel
from ipc.channel import PoolDescriptor
from ipc.codec import WireError
from ipc.cuda_runtime import CudaError, CudaUnavailable
from ipc.curve import CurveKeys
from ipc.kv_shm import PoolUnavailable
from ipc.messages import Broken, Hello, PeerUp, Ready, WorkerConfig
from ipc.prefill_policy import BatchLimits
from ipc.sockets import WorkerSocket
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)

EXIT_BROKEN = 78
EXIT_GROUP = 70
EXIT_DEVICE = 74
EXIT_LINK = 76
GATHER_TIMEOUT_S = 60.0


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
        self._undo = ExitStack()
        self._undo.callback(self._link.close)

    def run(self) -> int:
        """Exit code: 0 after `Exit`, 78 when it can never start, 70 when its instance broke up, 74
        when its device failed, 76 when what comes from the daemon has a gap or is garbage."""
        _set_up_cpu(self._config)
        self._link.send(Hello(self._config.name, os.getpid()))
        with self._undo:
            try:
                self._serve()
            except (ModelError, PoolUnavailable, CudaUnavailable) as error:
                self._link.send(Broken(str(error)))
                return EXIT_BROKEN
            except (GroupBroken, CollectivesFailed) as error:
                logger.error("%s ends with its instance: %s", self._config.name, error)
                return EXIT_GROUP
            except (CudaError, torch.AcceleratorError, torch.OutOfMemoryError) as error:
                reason = str(error).splitlines()[0]  # torch adds advice for its own developers
                logger.error("%s ends: its device failed: %s", self._config.name, reason)
                return EXIT_DEVICE
            except WireError as error:
                logger.error("%s ends: its link to the daemon broke: %s", self._config.name, error)
                return EXIT_LINK
        return 0

    def _serve(self) -> None:
        """Until the daemon wants us to leave."""
        name, parallelism = self._config.name, self._config.parallelism
        if parallelism.num_workers == 1:
            engine = self._build()
            with self._ready(engine):
                self._leader(engine).run()
        elif name.is_leader:
            bus = LeaderBus(self._config.group_endpoint, self._followers, self._group_keys)
            self._lead(self._undo.enter_context(closing(bus)))
        else:
            feed = FollowerBus(self._config.group_endpoint, name, self._config.group_public)
            self._follow(self._undo.enter_context(closing(feed)))

    def _lead(self, bus: LeaderBus) -> None:
        parallelism = self._config.parallelism
        engine = self._build()
        bus.gather(GATHER_TIMEOUT_S)
        group = GroupExecutor(engine.executor, bus, parallelism)
        with self._ready(engine):
            Leader(
                GroupLink(self._link, bus),
                self._scheduler(engine),
                group,
                GroupExchange(engine.exchange, bus, parallelism.num_workers),
                self._mapping_into(engine.exchange),
                max_in_flight=parallelism.pp * engine.executor.max_in_flight,
                is_done=group.is_done,
                hidden_bytes=lambda: engine.sent_bytes,
                pull_path=lambda: engine.exchange.pull_path,
            ).run()
        bus.dismiss()

    def _follow(self, feed: FollowerBus) -> None:
        name, parallelism = self._config.name, self._config.parallelism
        draws = name == drawer(name.instance, parallelism)
        engine = self._build()
        device, ends = None, list[socket.socket]()
        if draws and engine.is_on_gpu:
            device = self._undo.enter_context(closing(DeviceWatch(engine.executor.mark)))
            ends.append(device.waitable)
        with self._ready(engine):
            Follower(
                self._link,
                feed,
                engine.executor,
                engine.exchange,
                Peers(engine.exchange, self._take_descriptor),
                wait=Waiting([self._link.waitable, *feed.waitables, *ends]),
                draws=draws,
                device=device,
            ).run()

    def _build(self) -> WorkerEngine:
        engine = WorkerEngine(self._config, self._link.send)
        self._undo.callback(engine.close)
        return engine

    @contextmanager
    def _ready(self, engine: WorkerEngine) -> Iterator[None]:
        """Tell the daemon that we can serve, and be able to."""
        config, exchange = self._config, engine.exchange
        about = PoolDescriptor(config.name, config.epoch)
        channel.send_descriptor(self._channel, about, exchange.descriptor)
        load_s = time.monotonic() - self._started_s
        kernels, is_on_gpu = engine.executor.kernels_name, engine.is_on_gpu
        self._link.send(Ready(engine.layout, kernels, load_s, is_device_memory=is_on_gpu))
        if not is_on_gpu:
            prefault(exchange.pool)
        with torch.inference_mode():
            yield

    @property
    def _group_keys(self) -> CurveKeys | None:
        """The leader's, where plans cross nodes."""
        public, secret = self._config.group_public, self._config.group_secret
        return CurveKeys(public, secret) if secret else None

    @property
    def _followers(self) -> list[WorkerName]:
        return ranks(self._config.name.instance, self._config.parallelism)[1:]

    def _leader(self, engine: WorkerEngine) -> Leader:
        """Of an instance of one worker."""
        return Leader(
            self._link,
            self._scheduler(engine),
            engine.executor,
            engine.exchange,
            self._mapping_into(engine.exchange),
            max_in_flight=engine.executor.max_in_flight,
            pull_path=lambda: engine.exchange.pull_path,
        )

    def _scheduler(self, engine: WorkerEngine) -> Scheduler:
        config, layout = self._config, engine.layout
        return Scheduler(
            Owner(config.name.instance, config.epoch),
            config.role,
            config.mixed,
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            limits=BatchLimits(config.prefill_tokens, config.max_batch, config.prefill_policy),
            parallelism=config.parallelism,
            max_in_flight=engine.executor.max_in_flight,
        )

    def _mapping_into(self, exchange: OwnExchange) -> Callable[[PeerUp], None]:
        def map_peer(peer: PeerUp) -> None:
            descriptor = self._take_descriptor(peer)
            exchange.map_peer(peer.worker, peer.epoch, peer.layout, descriptor)

        return map_peer

    def _take_descriptor(self, peer: PeerUp) -> int:
        """The pool's descriptor came over the channel before its `PeerUp`."""
        about, descriptor = channel.receive_descriptor(self._channel)
        assert (about.worker, about.epoch) == (peer.worker, peer.epoch)
        return descriptor


def _set_up_cpu(config: WorkerConfig) -> None:
    """One compute thread per core of ours; no pauses by the collector in the step loop."""
    torch.set_num_threads(config.num_threads)
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    gc.disable()
