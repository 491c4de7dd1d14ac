"""Decode steps as captured graphs: one launch instead of a dozen for each layer.

A graph is of a fixed number of rows on fixed memory, so there is one for each of a few sizes, and a
step runs in the next larger one with padding rows. They cover the model from token ids to logits;
what is drawn from those is not part of them. Steps with prompts in them run eagerly.
"""

import logging
from collections.abc import Callable, Sequence
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
    """Captures at construction; then runs decode steps that fit.

    Args:
        model: a whole model, whose logits are here.
        max_batch: the most rows of a step.
        max_context_tokens: the longest sequence there can be.
        progress: called with the fraction of the sizes that are captured.

    `num_bytes` is what the device's memory has lost by it.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        model: Model,
        max_batch: int,
        max_context_tokens: int,
        *,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self._device = device = kernels.device
        self._model, self._kernels = model, kernels
        self._spare_block = kernels.spare_block
        self._row_pages = blocks_for(max_context_tokens, kernels.block_size)
        # Not the eager steps' scratch: that may grow and move, and a graph remembers addresses.
        self._scratch = Scratch(kernels.dtype, device.torch_device)
        before_bytes, _ = device.memory()
        self._memory = kernels.fixed_memory(max_batch, max_batch * self._row_pages)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._captured = self._capture_all(graph_sizes(max_batch), progress)
        self.num_bytes = before_bytes - device.memory()[0]
        logger.info(
            "%d decode graphs of up to %d rows take %.1f MiB",
            len(self._captured),
            max_batch,
            self.num_bytes / 2**20,
        )

    def fits(self, batch: Batch) -> bool:
        """Whether a step is one of decode rows that all go through the head."""
        num_rows = len(batch.rows)
        is_decode = batch.num_decode == num_rows and batch.head_rows is None
        return is_decode and num_rows <= self._captured[-1].size

    def run(
        self, batch: Batch, fill: Callable[[HostStep, torch.Tensor], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of the batch's rows; valid until the next run.

        Args:
            fill: puts token ids that only the device has into the step's (size,).
        """
        num_rows = len(batch.rows)
        captured = next(c for c in self._captured if c.size >= num_rows)
        step = padded(host_step(batch, self._kernels.block_size), captured.size, self._spare_block)
        placed = self._place(step, captured.attention)
        fill(step, placed.token_ids)
        captured.graph.replay()
        assert self._outputs is not None, "nothing was captured"
        hidden, logits = self._outputs
        return hidden[:num_rows], logits[:num_rows]

    def _capture_all(
        self, sizes: Sequence[int], progress: Callable[[float], None]
    ) -> list[_Captured]:
        """The largest first: the others then fit into its memory."""
        captured: list[_Captured] = []
        for size in reversed(sizes):
            captured.insert(0, self._capture(size))
            progress(len(captured) / len(sizes))
        return captured

    def _capture(self, size: int) -> _Captured:
        attention = self._kernels.fixed_attention(self._memory, size)
        host = padding_only(size, self._spare_block)
        step = self._place(host, attention)
        batch = _batch_of(step, host)

        def run() -> None:
            with self._kernels.on(step):
                hidden = self._model.forward(batch)
                logits = self._model.logits(hidden)
            assert logits is not None, "graphs are for models that are whole here"
            self._keep(hidden, logits)

        with torch.inference_mode():
            run()  # once for real: kernels are loaded and buffers made outside the capture
            self._device.synchronize()
            return _Captured(size, attention, self._device.capture(run))

    def _place(self, step: HostStep, attention: PagedAttention) -> DeviceStep:
        return self._kernels.place_fixed(step, self._memory, attention, self._scratch)

    def _keep(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Copy results to where those of all sizes go: results of each would be gigabytes."""
        if self._outputs is None:
            self._outputs = torch.empty_like(hidden), torch.empty_like(logits)
        for target, source in zip(self._outputs, (hidden, logits), strict=True):
            target[: len(source)].copy_(source)


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
