"""Draw a batch of tokens on the device without waiting for it: the rules of `sampler`, in rows.

All that a draw depends on but the logits is known on the host: its uniform number, its parameters,
the tokens that penalties look at. It goes over in two copies; what is drawn comes back in one, when
the step is collected. Nothing here reads a device's number in between.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_workers.cuda_device import Device, send
from gpu_workers.sampler import LEAST_LOGPROB, Draw, Drawn, uniform
from gpu_workers.sequence_table import IntArray
from gpu_workers.token_counts import TokenCounts
from ipc.vocabulary import SamplingParams, TokenLogprobs

Scores = Callable[[], list[TokenLogprobs]]
PART_ROWS = 64  # drawn by other rules than argmax, or scored, at a time: see `SAMPLING_BYTES`
SAMPLING_BYTES = 64
"""For each logit of a part, at most: fp32 scores, scaled and as weights (12), and what torch takes
to sort them: values and indices (12), pairs of index and row twice (16), keys and values of the
radix sort and what it swaps them with (16)."""


class _Edits:
    """Changes of single logits before the temperature: places (row, token) and numbers."""

    def __init__(self) -> None:
        self.rows: list[IntArray] = []
        self.tokens: list[IntArray] = []
        self.numbers: list[npt.NDArray[np.float64]] = []

    def add(self, row: int, tokens: npt.ArrayLike, numbers: npt.ArrayLike, size: int) -> None:
        """Of one row; tokens from `size` up are none. A single number is for all of them."""
        tokens = np.asarray(tokens, dtype=np.int64)
        numbers = np.broadcast_to(np.asarray(numbers, dtype=np.float64), tokens.shape)
        known = tokens < size
        self.tokens.append(tokens[known])
        self.numbers.append(numbers[known])
        self.rows.append(np.full(len(self.tokens[-1]), row))

    @property
    def is_empty(self) -> bool:
        return not any(map(len, self.rows))


class _Warp(NamedTuple):
    """Which rules any of some rows has, and how many of the highest scores of each row they look
    at."""

    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    num_ranked: int


class _Columns(NamedTuple):
    """What the rules say of each row: fp64 (S, 1) on the device.

    `last` is the place of the last score, in falling order, that top_k lets through; `is_free` is
    above 0 where it lets all through.
    """

    point: torch.Tensor
    temperature: torch.Tensor
    greedily: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    last: torch.Tensor
    is_free: torch.Tensor


class DeviceSampler:
    """Draws for one worker.

    Args:
        num_token_ids: ids from here up are padding of the vocabulary and never drawn.
    """

    def __init__(self, device: Device, num_token_ids: int) -> None:
        self._device = device
        self._num_token_ids = num_token_ids
        self._counts = TokenCounts()

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """One token for each draw, from its row of `logits` (R, vocabulary): int64, on the device.

        `logits` is not changed.
        """
        logits = logits[:, : self._num_token_ids]
        plain = [i for i, draw in enumerate(draws) if draw.is_argmax]
        others = [i for i, draw in enumerate(draws) if not draw.is_argmax]
        if not others and [draw.row for draw in draws] == list(range(len(logits))):
            return logits.argmax(dim=-1)
        drawn = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if plain:
            where, rows = self._indices([plain, [draws[i].row for i in plain]])
            drawn.index_copy_(0, where, logits.argmax(dim=-1).index_select(0, rows))
        if others:
            self._counts.begin_round()
        for part in _parts(others):
            where, rows = self._indices([part, [draws[i].row for i in part]])
            scores = logits.index_select(0, rows).float()  # (S, V), ours to change
            drawn.index_copy_(0, where, self._pick(scores, [draws[i] for i in part]))
        return drawn

    def fetch_tokens(self, drawn: torch.Tensor) -> Callable[[], list[int]]:
        """The way to drawn tokens, which waits for them."""
        host = self._device.pinned(len(drawn), drawn.dtype)
        self._device.download(drawn, host)
        arrived = self._device.event()
        arrived.record()

        def fetch() -> list[int]:
            arrived.synchronize()
            token_ids: list[int] = host.tolist()
            return token_ids

        return fetch

    def score(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> Scores:
        """How likely each target (N,) is by its row of logits; as `sampler.prompt_logprobs`."""
        logits = logits[:, : self._num_token_ids]
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        logprobs = logprobs.nan_to_num_(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB)
        own = logprobs.gather(1, targets[:, None])
        top = logprobs.topk(min(num_top, self._num_token_ids), dim=-1)
        # Ids are whole numbers below 2^53: one copy brings all.
        parts = (targets[:, None], own, top.values, top.indices)
        packed = torch.cat([part.double() for part in parts], dim=1).flatten()
        host = self._device.pinned(len(packed), torch.float64)
        self._device.download(packed, host)
        arrived = self._device.event()
        arrived.record()

        def fetch() -> list[TokenLogprobs]:
            arrived.synchronize()
            return [_scored(line) for line in host.view(len(targets), -1).tolist()]

        return fetch

    def score_drawn(
        self, logits: torch.Tensor, drawn: torch.Tensor, draws: Sequence[Draw]
    ) -> dict[int, Scores]:
        """Log probabilities of the draws that ask for them, by their index."""
        wanted: dict[int, list[int]] = {}
        for index, draw in enumerate(draws):
            if draw.sampling.logprobs is not None:
                wanted.setdefault(draw.sampling.logprobs, []).append(index)
        found: dict[int, Scores] = {}
        for num_top, asking in wanted.items():
            for part in _parts(asking):
                where, rows = self._indices([part, [draws[i].row for i in part]])
                targets = drawn.index_select(0, where)
                found |= _shared(self.score(logits.index_select(0, rows), targets, num_top), part)
        return found

    def _indices(self, lists: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return send(self._device, [np.array(numbers, dtype=np.int64) for numbers in lists])

    def _numbers(self, lists: Sequence[Sequence[float]]) -> list[torch.Tensor]:
        return send(self._device, [np.array(numbers, dtype=np.float64) for numbers in lists])

    def _pick(self, scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        self._apply_rules(scores, draws)
        greedy = scores.argmax(dim=-1)
        if all(draw.sampling.is_greedy for draw in draws):
            return greedy
        size = scores.shape[1]
        warp = _warp([draw.sampling for draw in draws], size)
        columns = _Columns(*(c[:, None] for c in self._numbers(_columns(draws, size, warp))))
        scaled = (scores - scores.amax(dim=-1, keepdim=True)) / columns.temperature.float()
        weights = scaled.exp()
        edges = _edges(scaled, columns, warp)
        if edges is not None:
            weights.masked_fill_(scaled < edges, 0.0)
        if warp.has_min_p:
            weights.masked_fill_(weights < columns.min_p.float(), 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        found = torch.searchsorted(cumulative, columns.point * cumulative[:, -1:], right=True)
        sampled = found.clamp_(max=size - 1)
        return torch.where(columns.greedily > 0, greedy[:, None], sampled)[:, 0]

    def _apply_rules(self, scores: torch.Tensor, draws: Sequence[Draw]) -> None:
        """As `sampler._apply_rules`, for all rows: each rule's edits at once, in its order."""
        repeated, subtracted, biased, banned = (_Edits() for _ in range(4))
        size = scores.shape[1]
        for row, draw in enumerate(draws):
            sampling = draw.sampling
            if sampling.repetition_penalty != 1.0:
                repeated.add(row, self._counts.of(draw)[0], sampling.repetition_penalty, size)
            if sampling.presence_penalty or sampling.frequency_penalty:
                ids, times = self._counts.of(draw)
                amounts = sampling.presence_penalty + sampling.frequency_penalty * times
                subtracted.add(row, ids[times > 0], amounts[times > 0], size)
            if sampling.logit_bias:
                tokens, numbers = zip(*sampling.logit_bias, strict=True)
                biased.add(row, tokens, numbers, size)
            if draw.bans_end_tokens:
                banned.add(row, sampling.end_token_ids, -np.inf, size)
        for edits, change in (
            (repeated, _penalised),
            (subtracted, torch.sub),
            (biased, torch.add),
            (banned, torch.add),
        ):
            self._edit(scores, edits, change)

    def _edit(
        self,
        scores: torch.Tensor,
        edits: _Edits,
        change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        if edits.is_empty:
            return
        places = [np.concatenate(edits.rows), np.concatenate(edits.tokens)]
        rows, tokens = send(self._device, places)
        (numbers,) = send(self._device, [np.concatenate(edits.numbers)])
        scores[rows, tokens] = change(scores[rows, tokens], numbers.float())


def with_scores(
    fetch: Callable[[], list[int]], scores: dict[int, Scores]
) -> Callable[[], list[Drawn]]:
    """Tokens with the log probabilities that were asked for."""

    def collect() -> list[Drawn]:
        token_ids = fetch()
        found = {index: score()[0] for index, score in scores.items()}
        return [Drawn(token_id, found.get(index)) for index, token_id in enumerate(token_ids)]

    return collect


def _parts(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """No more rows at a time than memory is kept for."""
    for start in range(0, len(indices), PART_ROWS):
        yield indices[start : start + PART_ROWS]


def _warp(kinds: Sequence[SamplingParams], size: int) -> _Warp:
    limits = [kind.top_k for kind in kinds if kind.top_k is not None and kind.top_k < size]
    has_top_p = any(kind.top_p < 1.0 for kind in kinds)
    return _Warp(
        has_top_k=bool(limits),
        has_top_p=has_top_p,
        has_min_p=any(kind.min_p > 0.0 for kind in kinds),
        # All of them where a nucleus is asked for: how far it reaches is not known here.
        num_ranked=size if has_top_p else max(limits, default=size),
    )


def _columns(draws: Sequence[Draw], size: int, warp: _Warp) -> list[list[float]]:
    """As `_Columns`, on the host: all of them go over in one copy."""
    kinds = [draw.sampling for draw in draws]
    limits = [min(kind.top_k or size, size) for kind in kinds]
    return [
        [uniform(draw.sampling.seed, draw.choice, draw.num_output) for draw in draws],
        [kind.temperature or 1.0 for kind in kinds],
        [float(kind.is_greedy) for kind in kinds],
        [kind.min_p for kind in kinds],
        [kind.top_p for kind in kinds],
        [min(limit, warp.num_ranked) - 1.0 for limit in limits],
        [float(limit == size) for limit in limits],
    ]


def _edges(scaled: torch.Tensor, columns: _Columns, warp: _Warp) -> torch.Tensor | None:
    """The lowest score that may be drawn in each row (S, 1), by top_k and then top_p."""
    if not warp.has_top_k and not warp.has_top_p:
        return None
    number = warp.num_ranked
    ranked = scaled.topk(number, dim=-1).values if number < scaled.shape[1] else _falling(scaled)
    limits = ranked.gather(1, columns.last.long())
    edges = torch.where(columns.is_free > 0, -torch.inf, limits)
    if not warp.has_top_p:
        return edges
    passing = ranked.exp().masked_fill_(ranked < edges, 0.0)
    mass = passing.cumsum(dim=-1, dtype=torch.float64)
    # Of a model that overflowed nothing passes; an index below 0 would end the process.
    last_passing = ((ranked >= edges).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    index = torch.searchsorted(mass, columns.top_p * mass[:, -1:]).minimum(last_passing)
    nucleus = ranked.gather(1, index)
    return torch.where(columns.top_p < 1.0, edges.maximum(nucleus), edges)


def _penalised(found: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return torch.where(found < 0, found * penalty, found / penalty)


def _falling(scores: torch.Tensor) -> torch.Tensor:
    return scores.sort(dim=-1, descending=True).values


def _shared(scores: Scores, indices: Sequence[int]) -> dict[int, Scores]:
    """One list of scores as that of each index alone; fetched once."""
    fetched: list[TokenLogprobs] = []

    def one(place: int) -> list[TokenLogprobs]:
        if not fetched:
            fetched.extend(scores())
        return fetched[place : place + 1]

    return {index: partial(one, place) for place, index in enumerate(indices)}


def _scored(line: list[float]) -> TokenLogprobs:
    """(target, its log probability, those of the top, their ids)."""
    num_top = (len(line) - 2) // 2
    values, ids = line[2 : 2 + num_top], [int(number) for number in line[2 + num_top :]]
    ranked = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(int(line[0]), line[1], tuple(ranked))
