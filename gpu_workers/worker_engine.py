"""What a worker computes with, as its configuration asks for it: pool, weights, the other ranks.

On CPU and on a GPU alike; everything that differs is chosen here. Knows nothing of the daemon but
that somebody wants to hear how far it is.
"""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from gpu_workers.collectives import Alone, Collectives
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import (
    Claim,
    Gpu,
    explaining,
    open_gpu,
    reckon_pool,
    usable,
    wants_gpu,
)
from gpu_workers.cuda_exchange import exchange_on, gpu_of
from gpu_workers.cuda_memory import MemoryPlan, StepLimits
from gpu_workers.engine import TORCH_DTYPES, EngineSpec, build_executor, pool_layout
from gpu_workers.executor import Executor
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.kv_exchange import OwnExchange
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.nccl_collectives import NcclCollectives, StagedCollectives, join_gpus
from gpu_workers.shm_collectives import sums_library
from gpu_workers.weight_guest import HolderFailed, held_weights
from gpu_workers.weight_holder import order_for
from gpu_workers.weights import WeightSource
from ipc.cuda_runtime import CudaError, CudaUnavailable, load_runtime
from ipc.kv_layout import RankLayout
from ipc.kv_shm import PoolUnavailable
from ipc.messages import Loading, WorkerConfig
from ipc.sharding import Shard
from ipc.vocabulary import DeviceKind

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/dev/nvidiactl")


def usable_gpu(
    *where: Any,
    load_runtime: Callable[[], object] = load_runtime,
    open_gpu: Callable[..., Gpu] = open_gpu,
) -> Gpu:
    """A GPU of this machine, as `open_gpu` opens it.

    Raises:
        CudaUnavailable: CUDA cannot be used here, or not that GPU; says why, as torch would not.
        ModelError: as `open_gpu` does.
    """
    load_runtime()
    try:
        return open_gpu(*where)
    except torch.AcceleratorError as error:
        raise CudaUnavailable(f"the GPU cannot be used: {str(error).splitlines()[0]}") from error


def left_unused(
    driver: Path = NVIDIA_DRIVER, load_runtime: Callable[[], object] = load_runtime
) -> str | None:
    """Why `auto` takes no GPU on a machine that has some; None where it has none.

    Args:
        driver: is there if the driver is.
    """
    if not driver.exists():
        return None
    try:
        load_runtime()
    except CudaUnavailable as error:
        return str(error)
    return f"torch {torch.__version__} finds none"


class WorkerEngine:
    """Builds and owns them.

    Args:
        tell: called with what it is at.
        open_gpu, exchange_on: the ways to a GPU and to a pool there.

    Raises:
        ModelError: the model is not one that can be served like that, or does not fit.
        PoolUnavailable: no memory for the pool, or none that can be shared.
        CudaUnavailable: no CUDA where a GPU is asked for.
        CollectivesFailed: the other ranks did not come.
    """

    executor: Executor
    exchange: OwnExchange
    layout: RankLayout  # what the daemon and others may name of the pool

    def __init__(
        self,
        config: WorkerConfig,
        tell: Callable[[Loading], None],
        *,
        open_gpu: Callable[..., Gpu] = usable_gpu,
        exchange_on: Callable[..., OwnExchange] = exchange_on,
    ) -> None:
        self._config, self._tell = config, tell
        self._others: GlooCollectives | NcclCollectives | StagedCollectives | None = None
        self._undo = ExitStack()
        self._model = read_config(config.model_dir)
        self._shard = _shard(config, self._model)
        with self._undo:
            if wants_gpu(config.device_kind):
                self._build_on_gpu(open_gpu, exchange_on)
            else:
                if config.device_kind is DeviceKind.AUTO and (reason := left_unused()):
                    logger.warning(
                        "there is a GPU's driver, and this worker is on a CPU: %s", reason
                    )
                self.layout = self._pool_layout()
                self.exchange = self._kept(CpuExchange(self.layout, str(config.name)))
                self.executor = self._join(None)
            self._undo = self._undo.pop_all()

    @property
    def is_on_gpu(self) -> bool:
        """Whether the pool, and all else, is in a GPU's memory."""
        return wants_gpu(self._config.device_kind)

    @property
    def sent_bytes(self) -> int:
        """Of hidden states, to the next stage."""
        return self._others.sent_bytes if self._others else 0

    def close(self) -> None:
        """Leave the other ranks, part from peers, and give back what is not the process' own."""
        self._undo.close()

    def _kept(self, exchange: OwnExchange) -> OwnExchange:
        """Closed with us: or else a peer that stands still would hold up the process' end."""
        self._undo.callback(_part, exchange)
        return exchange

    def _build_on_gpu(
        self, open_gpu: Callable[..., Gpu], exchange_on: Callable[..., OwnExchange]
    ) -> None:
        gpu, met, weights = self._open(open_gpu), None, None
        if self._config.share_gpus:
            # First: for one rank held weights may be there, for another they take minutes.
            met, weights = self._meet(gpu), self._held_weights(gpu)
        claim = self._claim(met, weights)
        plan = reckon_pool(gpu, self._model, self._shard, self._config.dtype, claim)
        with explaining(plan):
            whole, name = self._pool_layout(plan), str(self._config.name)
            self.layout = usable(whole)
            self.exchange = self._kept(exchange_on(gpu.device.torch_device, whole, name))
            self.executor = self._join(gpu, met, weights)

    def _open(self, open_gpu: Callable[..., Gpu]) -> Gpu:
        config = self._config
        # A prompt longer than L_m travels alone, so it may be as long as the context.
        limits = StepLimits(max(config.prefill_tokens, config.max_context_tokens), config.max_batch)
        index = config.device
        if config.share_gpus:
            index %= max(1, torch.cuda.device_count())
        return open_gpu(index, config.dtype, limits, self._report_capture)

    def _claim(self, met: Collectives | None, weights: WeightSource | None) -> Claim:
        """Ranks that have not met yet have a GPU each, and will capture their steps."""
        return Claim(
            kv_bytes=self._config.kv_bytes,
            utilization=self._config.gpu_memory_utilization,
            has_weights=weights is not None,
            has_graphs=met is None or met.on_device is not None,
        )

    def _pool_layout(self, plan: MemoryPlan | None = None) -> RankLayout:
        config = self._config
        return pool_layout(
            self._model,
            dtype=config.dtype,
            block_size=config.block_size,
            kv_bytes=config.kv_bytes if plan is None else plan.kv_bytes,
            shard=self._shard,
            head_dim=None if plan is None else stored_head_dim(self._model.head_dim),
        )

    @property
    def _spec(self) -> EngineSpec:
        config = self._config
        return EngineSpec(
            model_dir=config.model_dir,
            dtype=config.dtype,
            load_format=config.load_format,
            max_context_tokens=config.max_context_tokens,
            num_token_ids=config.num_token_ids,
            shard=self._shard,
        )

    def _held_weights(self, gpu: Gpu) -> WeightSource | None:
        """Those that all workers on our GPU share; None where they cannot be had."""
        run_dir = Path(self._config.endpoint.removeprefix("ipc://")).parent
        order = order_for(self._spec, gpu.device.torch_device)
        try:
            return held_weights(order, run_dir, daemon=os.getppid())
        except (HolderFailed, PoolUnavailable) as error:
            logger.warning("weights are loaded for this worker alone: %s", error)
            return None

    def _join(
        self,
        gpu: Gpu | None,
        met: Collectives | None = None,
        weights: WeightSource | None = None,
    ) -> Executor:
        """Weights, kernels and the other ranks, around our pool."""
        return build_executor(
            self._model,
            self._spec,
            self.exchange,
            collectives=met or self._meet(gpu),
            progress=self._report_weights,
            gpu=gpu,
            weights=weights,
        )

    def _meet(self, gpu: Gpu | None) -> Collectives:
        """Before weights are loaded: all ranks start together, but need not load equally fast."""
        if self._config.parallelism.num_workers == 1:
            return Alone()
        others = self._join_cpus() if gpu is None else self._join_gpus(gpu)
        self._others = self._undo.enter_context(closing(others))
        return others

    def _join_cpus(self) -> GlooCollectives:
        return GlooCollectives(
            self._config.rendezvous,
            self._shard,
            hidden_size=self._model.hidden_size,
            dtype=TORCH_DTYPES[self._config.dtype],
            library=sums_library(),
        )

    def _join_gpus(self, gpu: Gpu) -> NcclCollectives | StagedCollectives:
        device = gpu.device.torch_device
        return join_gpus(
            self._config.rendezvous,
            self._shard,
            hidden_size=self._model.hidden_size,
            dtype=TORCH_DTYPES[self._config.dtype],
            device=device,
            gpu_uuid=gpu_of(device).uuid,
        )

    def _report_weights(self, fraction: float) -> None:
        self._tell(Loading("loading weights", fraction))

    def _report_capture(self, fraction: float) -> None:
        self._tell(Loading("capturing decode graphs", fraction))


def _part(exchange: OwnExchange) -> None:
    try:
        exchange.close()
    except CudaError as error:  # of a failed device, which is why we leave
        logger.warning("not all was given back: %s", error)


def _shard(config: WorkerConfig, model: ModelConfig) -> Shard:
    return model.shard(config.parallelism, config.name.stage, config.name.tp_rank)
