"""Decode steps as captured graphs: one launch instead of a dozen for each layer.

A graph is of a fixed number of rows on fixed memory, so there is one for each of a few sizes, and a
step runs in the next larger one with padding rows. They cover a worker's share of the model: from
token ids, or the hidden states of the stage before, to hidden states, and on the last stage to
logits, the stage's sums included. What passes between stages, and what is drawn, is not part of
them. Steps with prompts in them run eagerly.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_workers.batch import Batch
from gpu_workers.cuda_attention import PagedAttention
from gpu_workers.cuda_device import Graph
from gpu_workers.cuda_kernels import CudaKernels, DeviceStep
from gpu_workers.cuda_step import HostStep, host_step, padded, padding_only
from gpu_workers.models.layers import Model
from gpu_workers.scratch import Scratch
from ipc.kv_layout import blocks_for

logger = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a graph computed for a batch's rows, until the next run. `logits` are None on ranks that
    do not have them."""

    hidden: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Captured:
    """One size's graph, and what plans its attention."""

    size: int
    attention: PagedAttention
    graph: Graph


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to the largest batch."""
    sizes = [*SMALL_SIZES, *range(SIZE_STEP, max_batch + 1, SIZE_STEP), max_batch]
    return sorted({size for size in sizes if size <= max_batch})


class DecodeGraphs:
    """Runs decode steps that fit, once `capture` has been called.

    The ranks of a stage capture the same sizes in the same order, and what fits follows from the
    batch alone, so that their sums agree.

    Args:
        max_batch: the most rows of a step.
        max_context_tokens: the longest sequence there can be.

    `num_bytes` is what the device's memory has lost by it.
    """

    def __init__(
        self, kernels: CudaKernels, model: Model, max_batch: int, max_context_tokens: int
    ) -> None:
        self._device, self._model, self._kernels = kernels.device, model, kernels
        self._max_batch = max_batch
        self._captured: list[_Captured] = []
        self._free_bytes, _ = self._device.memory()
        self.num_bytes = 0
        # What all sizes share. Not the eager steps' scratch: that may grow and move, and a graph
        # remembers addresses.
        self._scratch = Scratch(kernels.dtype, self._device.torch_device)
        row_pages = blocks_for(max_context_tokens, kernels.block_size)
        self._memory = kernels.fixed_memory(max_batch, max_batch * row_pages)
        self._before = None if model.shard.is_first_stage else self._hidden_states()
        self._hidden = self._hidden_states()
        self._logits: torch.Tensor | None = None

    def capture(self, progress: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first: the others then fit into its memory.

        Args:
            progress: called with the fraction of the sizes that are captured.
        """
        sizes = graph_sizes(self._max_batch)
        for size in reversed(sizes):
            self._captured.insert(0, self._capture(size))
            progress(len(self._captured) / len(sizes))
        self.num_bytes = self._free_bytes - self._device.memory()[0]
        logger.info(
            "%d decode graphs of up to %d rows take %.1f MiB",
            len(sizes),
            self._max_batch,
            self.num_bytes / 2**20,
        )

    def close(self) -> None:
        """Forget the graphs, and with them what they hold of others."""
        self._captured.clear()

    def fits(self, batch: Batch) -> bool:
        """Whether a step is one of decode rows that all go through the head."""
        num_rows = len(batch.rows)
        is_decode = batch.num_decode == num_rows and batch.head_rows is None
        return is_decode and bool(self._captured) and num_rows <= self._max_batch

    def run(
        self,
        batch: Batch,
        hidden: torch.Tensor | None,
        fill: Callable[[HostStep, torch.Tensor], None],
    ) -> Replayed:
        """Run a batch that fits.

        Args:
            hidden: of the stage before, (R, hidden_size); None on the first stage.
            fill: puts token ids that only the device has into the step's (size,).
        """
        num_rows = len(batch.rows)
        captured = next(c for c in self._captured if c.size >= num_rows)
        step = host_step(batch, self._kernels.block_size)
        step = padded(step, captured.size, self._kernels.spare_block)
        placed = self._place(step, captured.attention)
        if self._before is None:
            fill(step, placed.token_ids)
        else:
            assert hidden is not None, "hidden states come from the stage before"
            self._before[:num_rows].copy_(hidden)
        captured.graph.replay()
        return self._results(num_rows)

    def _capture(self, size: int) -> _Captured:
        attention = self._kernels.fixed_attention(self._memory, size)
        host = padding_only(size, self._kernels.spare_block)
        step = self._place(host, attention)
        batch = _batch_of(step, host)
        before = None if self._before is None else self._before[:size]

        def run() -> None:
            with self._kernels.on(step):
                hidden = self._model.forward(batch, before)
                is_last = self._model.shard.is_last_stage
                self._keep(hidden, self._model.logits(hidden) if is_last else None)

        with torch.inference_mode():
            # Once for real: kernels are loaded, buffers made and NCCL's ways for sums of this size
            # connected outside the capture.
            run()
            self._device.synchronize()
            return _Captured(size, attention, self._device.capture(run))

    def _place(self, step: HostStep, attention: PagedAttention) -> DeviceStep:
        return self._kernels.place_fixed(step, self._memory, attention, self._scratch)

    def _keep(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Copy results to where those of all sizes go: results of each would be gigabytes."""
        self._hidden[: len(hidden)].copy_(hidden)
        if logits is not None:
            if self._logits is None:
                self._logits = torch.empty_like(logits)  # of the largest size, before its capture
            self._logits[: len(logits)].copy_(logits)

    def _results(self, num_rows: int) -> Replayed:
        logits = None if self._logits is None else self._logits[:num_rows]
        return Replayed(self._hidden[:num_rows], logits)

    def _hidden_states(self) -> torch.Tensor:
        shape = (self._max_batch, self._model.config.hidden_size)
        return torch.zeros(shape, dtype=self._kernels.dtype, device=self._device.torch_device)


def _batch_of(step: DeviceStep, host: HostStep) -> Batch:
    """What a model reads of a batch."""
    return Batch(
        rows=(),
        token_ids=step.token_ids,
        positions=step.positions,
        slots=host.offsets,
        block_table=host.blocks[:, None],
        computed=host.positions,
        num_decode=host.num_decode,
        head_rows=None,
    )
