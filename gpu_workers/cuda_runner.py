"""Steps on a GPU: sent off and left to run, while the host plans the next one.

Tokens are drawn on the device and stay there at their sequences' lines, where the next step finds
them, on all ranks of the stage; the host gets them when it collects the step. Decode steps run as
graphs where there are any.
"""

from collections.abc import Callable, Sequence

import torch

from gpu_workers.batch import Batch
from gpu_workers.collectives import Alone, DeviceCollectives
from gpu_workers.cuda_device import Device, send
from gpu_workers.cuda_graphs import DecodeGraphs, Replayed
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_sampler import DeviceSampler, with_scores
from gpu_workers.cuda_step import HostStep, int64_array, unseen_tokens
from gpu_workers.models.layers import Model
from gpu_workers.sampler import Draw, Drawn
from gpu_workers.sequence_table import IntArray
from gpu_workers.step_runner import Pending
from ipc.vocabulary import TokenLogprobs

INITIAL_LINES = 64
MAX_IN_FLIGHT = 2
ALONE = Alone()


class CudaRunner:
    """`StepRunner` for one worker on one GPU.

    Args:
        graphs: for decode steps.
        stage: passes drawn tokens to the other ranks without the host, so that two steps of a
            sequence may be under way; None where only plans say what was drawn.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        kernels: CudaKernels,
        *,
        num_token_ids: int,
        graphs: DecodeGraphs | None = None,
        stage: DeviceCollectives | None = ALONE,
    ) -> None:
        self.max_in_flight = 1 if stage is None else MAX_IN_FLIGHT
        self._device, self._model, self._kernels = device, model, kernels
        self._graphs, self._stage = graphs, stage
        self._sampler = DeviceSampler(device, num_token_ids)
        self._last_tokens = self._lines(INITIAL_LINES)
        self._replayed: Replayed | None = None  # of the last step, if it was a graph

    def forward(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        self._replayed = None
        if self._graphs is not None and self._graphs.fits(batch):
            self._replayed = self._graphs.run(batch, hidden, self._fill_step)
            return self._replayed.hidden
        placed = self._kernels.load(batch)
        self._fill(placed.token_ids, *unseen_tokens(batch))
        return self._model.forward(placed, hidden)

    def draw(
        self, hidden: torch.Tensor, draws: Sequence[Draw], lines: Sequence[int | None]
    ) -> Pending[list[Drawn]]:
        # What a graph gave is not asked for again, nor is it that it gave none here: a rank's sums
        # must be those of the others.
        replayed = self._replayed
        logits = self._model.logits(hidden) if replayed is None else replayed.logits
        if logits is None:
            self._keep(torch.empty(len(draws), dtype=torch.int64, device=hidden.device), lines)
            return list
        drawn = self._sampler.draw(logits, draws)
        scores = self._sampler.score_drawn(logits, drawn, draws)
        fetched = with_scores(self._sampler.fetch_tokens(drawn), scores)
        self._keep(drawn, lines)
        return fetched

    def score(
        self, hidden: torch.Tensor, targets: Sequence[int], num_top: int
    ) -> Pending[list[TokenLogprobs]]:
        logits = self._model.logits(hidden)
        if logits is None:
            return list
        (wanted,) = send(self._device, [int64_array(targets)])
        return self._sampler.score(logits, wanted, num_top)

    def mark(self) -> Callable[[], None]:
        event = self._device.event()
        event.record()

        def wait() -> None:
            # A thread that has chosen no device would open a context on the first one.
            with torch.accelerator.device_index(self._device.torch_device.index):
                event.synchronize()

        return wait

    def _fill_step(self, step: HostStep, token_ids: torch.Tensor) -> None:
        self._fill(token_ids, step.unseen, step.lines)

    def _fill(self, token_ids: torch.Tensor, unseen: IntArray, lines: IntArray) -> None:
        """Put in the tokens that steps under way draw: they come earlier in the stream."""
        if len(unseen):
            assert self._stage is not None, "a token that no plan has told yet"
            where, which = send(self._device, [unseen, lines])
            token_ids.index_copy_(0, where, self._last_tokens.index_select(0, which))

    def _keep(self, drawn: torch.Tensor, lines: Sequence[int | None]) -> None:
        """Leave each drawn token at its sequence's line, for the next step, on every rank of the
        stage: what is `drawn` on the others is that of tp rank 0."""
        kept = [(index, line) for index, line in enumerate(lines) if line is not None]
        if not kept or self._stage is None:
            return
        self._stage.broadcast(drawn)
        most = max(line for _, line in kept)
        if most >= len(self._last_tokens):
            longer = self._lines(2 * most)
            longer[: len(self._last_tokens)] = self._last_tokens
            self._last_tokens = longer
        indices, places = (int64_array(numbers) for numbers in zip(*kept, strict=True))
        which, where = send(self._device, [indices, places])
        self._last_tokens.index_copy_(0, where, drawn.index_select(0, which))

    def _lines(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device.torch_device)
