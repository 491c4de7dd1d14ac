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
from gpu_workers.batching import BatchLimits
from gpu_workers.collectives import Alone, Collectives, CollectivesFailed
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu, explaining, open_gpu, reckon_pool, usable, wants_gpu
from gpu_workers.cuda_exchange import exchange_on, gpu_of
from gpu_workers.cuda_memory import MemoryPlan, StepLimits
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, build_executor, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.follower import Follower, Peers
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.group import GroupExchange, GroupExecutor, GroupLink, drawer, ranks
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.leader import Leader
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.nccl_collectives import NcclCollectives, StagedCollectives, join_gpus
from gpu_workers.plan_bus import FollowerBus, GroupBroken, LeaderBus, Waiting
from gpu_workers.prefault import prefault
from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from gpu_workers.shm_collectives import sums_library
from ipc import channel, sharding
from ipc.codec import WireError
from ipc.cuda_runtime import CudaUnavailable
from ipc.curve import CurveKeys
from ipc.kv_layout import RankLayout
from ipc.kv_shm import PoolUnavailable
from ipc.messages import Broken, Hello, Loading, PeerUp, PoolDescriptor, Ready, WorkerConfig
from ipc.sharding import Shard
from ipc.sockets import WorkerSocket
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)

EXIT_BROKEN = 78
EXIT_GROUP = 70
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
        self._others: GlooCollectives | NcclCollectives | StagedCollectives | None = None
        self._undo = ExitStack()
        self._undo.callback(self._link.close)

    def run(self) -> int:
        """Exit code: 0 after `Exit`, 78 when it can never start, 70 when its instance broke up,
        76 when what comes from the daemon has a gap or is garbage."""
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
            except WireError as error:
                logger.error("%s ends: its link to the daemon broke: %s", self._config.name, error)
                return EXIT_LINK
        return 0

    def _serve(self) -> None:
        """Until the daemon wants us to leave."""
        name, parallelism = self._config.name, self._config.parallelism
        if parallelism.num_workers == 1:
            exchange, executor = self._build()
            with self._ready(exchange, executor):
                self._leader(exchange, executor).run()
        elif name.is_leader:
            bus = LeaderBus(self._config.group_endpoint, self._followers, self._group_keys)
            self._lead(self._undo.enter_context(closing(bus)))
        else:
            feed = FollowerBus(self._config.group_endpoint, name, self._config.group_public)
            self._follow(self._undo.enter_context(closing(feed)))

    def _lead(self, bus: LeaderBus) -> None:
        parallelism = self._config.parallelism
        exchange, executor = self._build()
        bus.gather(GATHER_TIMEOUT_S)
        group = GroupExecutor(executor, bus, parallelism)
        with self._ready(exchange, executor):
            Leader(
                GroupLink(self._link, bus),
                self._scheduler(),
                group,
                GroupExchange(exchange, bus, parallelism.num_workers),
                self._mapping_into(exchange),
                max_in_flight=parallelism.pp,
                is_done=group.is_done,
                hidden_bytes=lambda: self._others.sent_bytes if self._others else 0,
            ).run()
        bus.dismiss()

    def _follow(self, feed: FollowerBus) -> None:
        name, parallelism = self._config.name, self._config.parallelism
        exchange, executor = self._build()
        with self._ready(exchange, executor):
            Follower(
                self._link,
                feed,
                executor,
                exchange,
                Peers(exchange, self._take_descriptor),
                wait=Waiting([self._link.waitable, *feed.waitables]),
                draws=name == drawer(name.instance, parallelism),
            ).run()

    def _build(self) -> tuple[OwnExchange, Executor]:
        model = read_config(self._config.model_dir)
        shard = self._shard(model)
        if not wants_gpu(self._config.device_kind):
            exchange = CpuExchange(self._pool(model, shard), str(self._config.name))
            return exchange, self._join(model, shard, exchange, None)
        gpu = self._open_gpu()
        plan = self._reckon(model, shard, gpu)
        with explaining(plan):
            device = gpu.device.torch_device
            on_gpu = exchange_on(device, self._pool(model, shard, plan), str(self._config.name))
            self._undo.callback(on_gpu.close)
            return on_gpu, self._join(model, shard, on_gpu, gpu)

    def _open_gpu(self) -> Gpu:
        config = self._config
        # A prompt longer than L_m travels alone, so it may be as long as the context.
        limits = StepLimits(max(config.prefill_tokens, config.max_context_tokens), config.max_batch)
        return open_gpu(config.device, config.dtype, limits, self._report_capture)

    def _reckon(self, model: ModelConfig, shard: Shard, gpu: Gpu) -> MemoryPlan:
        config = self._config
        return reckon_pool(
            gpu,
            model,
            shard,
            config.dtype,
            kv_bytes=config.kv_bytes,
            utilization=config.gpu_memory_utilization,
        )

    def _pool(self, model: ModelConfig, shard: Shard, plan: MemoryPlan | None = None) -> RankLayout:
        """The pool's layout; what the daemon and others may name of it is kept as `_layout`."""
        config = self._config
        layout = pool_layout(
            model,
            dtype=config.dtype,
            block_size=config.block_size,
            kv_bytes=config.kv_bytes if plan is None else plan.kv_bytes,
            shard=shard,
            head_dim=None if plan is None else stored_head_dim(model.head_dim),
        )
        self._layout = layout if plan is None else usable(layout)
        return layout

    def _join(
        self, model: ModelConfig, shard: Shard, exchange: OwnExchange, gpu: Gpu | None
    ) -> Executor:
        """Weights, kernels and the other ranks, around that pool."""
        config = self._config
        spec = EngineSpec(
            model_dir=config.model_dir,
            dtype=config.dtype,
            load_format=config.load_format,
            max_context_tokens=config.max_context_tokens,
            num_token_ids=config.num_token_ids,
            shard=shard,
        )
        return build_executor(
            model,
            spec,
            exchange,
            collectives=self._meet(model, shard, gpu),
            progress=self._report_progress,
            gpu=gpu,
        )

    def _shard(self, model: ModelConfig) -> Shard:
        name, parallelism = self._config.name, self._config.parallelism
        if reason := sharding.refusal(model.sizes, parallelism):
            raise ModelError(reason)
        return sharding.shard(model.sizes, parallelism, name.stage, name.tp_rank)

    def _meet(self, model: ModelConfig, shard: Shard, gpu: Gpu | None) -> Collectives:
        """Before weights are loaded: all ranks start together, but need not load equally fast."""
        config = self._config
        if config.parallelism.num_workers == 1:
            return Alone()
        dtype = TORCH_DTYPES[config.dtype]
        hidden_size = model.sizes.hidden_size
        others = (
            GlooCollectives(
                config.rendezvous,
                shard,
                hidden_size=hidden_size,
                dtype=dtype,
                library=sums_library(),
            )
            if gpu is None
            else join_gpus(
                config.rendezvous,
                shard,
                hidden_size=hidden_size,
                dtype=dtype,
                device=gpu.device.torch_device,
                gpu_uuid=gpu_of(gpu.device.torch_device).uuid,
            )
        )
        self._others = self._undo.enter_context(closing(others))
        return others

    def _report_progress(self, fraction: float) -> None:
        self._link.send(Loading("loading weights", fraction))

    def _report_capture(self, fraction: float) -> None:
        self._link.send(Loading("capturing decode graphs", fraction))

    @contextmanager
    def _ready(self, exchange: OwnExchange, executor: Executor) -> Iterator[None]:
        """Tell the daemon that we can serve, and be able to."""
        config = self._config
        about = PoolDescriptor(config.name, config.epoch)
        channel.send_descriptor(self._channel, about, exchange.descriptor)
        load_s = time.monotonic() - self._started_s
        self._link.send(Ready(self._layout, executor.kernels_name, load_s))
        if exchange.pool.device.type == "cpu":
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

    def _leader(self, exchange: OwnExchange, executor: Executor) -> Leader:
        """Of an instance of one worker."""
        in_flight = executor.max_in_flight
        scheduler, map_peer = self._scheduler(in_flight), self._mapping_into(exchange)
        return Leader(self._link, scheduler, executor, exchange, map_peer, max_in_flight=in_flight)

    def _scheduler(self, max_in_flight: int = 1) -> Scheduler:
        config, layout = self._config, self._layout
        return Scheduler(
            Owner(config.name.instance, config.epoch),
            config.role,
            config.mixed,
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            limits=BatchLimits(config.prefill_tokens, config.max_batch, config.prefill_policy),
            parallelism=config.parallelism,
            max_in_flight=max_in_flight,
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
