"""An engine as a GPU worker has it, on CPU memory behind the fakes, and its like on CPU kernels."""

from pathlib import Path
from typing import Any

from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.models.config import read_config
from gpu_workers.step_plan import NewSequence, Row, RowResult, StepPlan
from ipc.vocabulary import DType
from tests.gpu_workers.cuda.fake_device import FakeDevice
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.driving import Driver
from tests.gpu_workers.rig import BLOCK_SIZE

MAX_CONTEXT = 96
NUM_BLOCKS = 96
MAX_BATCH = 9


class CudaDriver(Driver):
    """`Driver` over the CUDA backend; `flashinfer` and `device` are the fakes, to be looked at."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: DType = DType.FP16,
        num_token_ids: int | None = None,
        max_batch: int = MAX_BATCH,
        flashinfer: type[FakeFlashInfer] = FakeFlashInfer,
        device: FakeDevice | None = None,
    ) -> None:
        self.device = device or FakeDevice()
        self.flashinfer = flashinfer(self.device)
        self.config = read_config(model_dir)
        head_dim = stored_head_dim(self.config.head_dim)
        token_bytes = 2 * self.config.num_layers * self.config.num_kv_heads * head_dim * 2
        self.layout = pool_layout(
            self.config,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            kv_bytes=NUM_BLOCKS * BLOCK_SIZE * token_bytes,
            head_dim=head_dim,
        )
        spec = EngineSpec(
            model_dir=str(model_dir),
            dtype=dtype,
            max_context_tokens=MAX_CONTEXT,
            num_token_ids=num_token_ids,
        )
        self.captured: list[float] = []
        limits = StepLimits(MAX_CONTEXT, max_batch)
        gpu = Gpu(self.device, self.flashinfer, limits, self.captured.append)
        self.pool = PrivatePool(self.layout)
        self.device.adopt(self.pool.pool)
        self.executor = build_executor(self.config, spec, self.pool, gpu=gpu)
        self._start(BLOCK_SIZE, self.layout.num_blocks - 1)

    def _start(self, block_size: int, num_blocks: int) -> None:
        """Books as `Driver` has them, over all blocks but the spare one."""
        self.block_size = block_size
        self.free = list(range(num_blocks))[::-1]
        self.free = self.free[1::2] + self.free[::2]
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.num_steps = 0
        self._added: list[NewSequence] = []
        self._removed: list[int] = []

    def launch(self, *rows: tuple[int, int, bool]) -> Any:
        """As `step`, without collecting it."""
        blocks = [self._grow(sequence, num_new) for sequence, num_new, _ in rows]
        plan = StepPlan(
            step_id=self.num_steps,
            removed=tuple(self._removed),
            added=tuple(self._added),
            blocks=tuple(new for new in blocks if new.block_ids),
            rows=tuple(Row(*row) for row in rows),
        )
        self._removed, self._added = [], []
        self.num_steps += 1
        return self.executor.launch(plan)

    def collect(self, launched: Any) -> dict[int, RowResult]:
        return {row.sequence: row for row in self.executor.collect(launched).rows}


def on_cpu(model_dir: Path, dtype: DType = DType.FP16, num_token_ids: int | None = None) -> Driver:
    """The engine that the CUDA one is compared with."""
    return Driver(model_dir, dtype=dtype, block_size=BLOCK_SIZE, num_token_ids=num_token_ids)
