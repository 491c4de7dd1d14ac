"""The seam between a step and the device that runs it: on the spot, or done later.

The executor says what a step computes; a runner computes it. `forward`, `draw` and `score` return
as soon as the work is on its way; what comes back from it is asked for when the step is collected.
On CPU all of it has happened by then.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from gpu_workers.batch import Batch
from gpu_workers.kernels import Kernels
from gpu_workers.models.layers import Model
from gpu_workers.sampler import Draw, Drawn, draw_tokens, prompt_logprobs
from ipc.vocabulary import TokenLogprobs

T = TypeVar("T")
Pending = Callable[[], T]
"""Gives a result, waiting for the device if need be. To be called once."""


class StepRunner(Protocol):
    """Runs the tensors of one rank's steps, in the order of its calls."""

    @property
    def max_in_flight(self) -> int:
        """Steps of one sequence that may be under way at a time. Above 1, a step's input may be
        a token that the step before it draws."""
        ...

    def forward(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        """As `Model.forward`, of a batch as the host built it."""
        ...

    def draw(
        self, hidden: torch.Tensor, draws: Sequence[Draw], lines: Sequence[int | None]
    ) -> Pending[list[Drawn]]:
        """One token for each of `draws`, from the rows of `hidden` that they name.

        `lines` says for each draw at which line of the table its sequence goes on, if it does.
        Ranks that have no logits give an empty list.
        """
        ...

    def score(
        self, hidden: torch.Tensor, targets: Sequence[int], num_top: int
    ) -> Pending[list[TokenLogprobs]]:
        """How likely each target was by its row of `hidden`; empty where there are no logits."""
        ...

    def mark(self) -> Callable[[], None]:
        """Makes a mark behind all that was asked so far; waits, in any thread, until it is done."""
        ...


class EagerRunner:
    """Computes each call before it returns."""

    max_in_flight = 1

    def __init__(self, model: Model, kernels: Kernels, num_token_ids: int) -> None:
        self._model = model
        self._kernels = kernels
        self._num_token_ids = num_token_ids

    def forward(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        assert not any(row.ends_unseen for row in batch.rows), "a token that no plan has told yet"
        self._kernels.prepare(batch)
        return self._model.forward(batch, hidden)

    def draw(
        self, hidden: torch.Tensor, draws: Sequence[Draw], lines: Sequence[int | None]
    ) -> Pending[list[Drawn]]:
        logits = self._model.logits(hidden)
        drawn = [] if logits is None else draw_tokens(logits, draws, self._num_token_ids)
        return lambda: drawn

    def score(
        self, hidden: torch.Tensor, targets: Sequence[int], num_top: int
    ) -> Pending[list[TokenLogprobs]]:
        logits = self._model.logits(hidden)
        if logits is None:
            return list
        scored = prompt_logprobs(logits, targets, num_top, self._num_token_ids)
        return lambda: scored

    def mark(self) -> Callable[[], None]:
        return lambda: None
