"""How a model is divided among the workers of an instance: who holds which layers, heads, columns.

Pure arithmetic over a model's sizes. The daemon refuses with it what cannot run before anything is
spawned; every worker computes its own share with it, so that all agree without being told.
"""

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from ipc.kv_layout import Span
from ipc.vocabulary import Cut, Parallelism


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a division must know of a decoder."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


class Shard(msgspec.Struct, frozen=True):
    """One worker's share, in global indices.

    `kv_heads` of several ranks are equal where tp is above the number of KV heads. `vocab` may
    reach beyond the model's vocabulary: it is padded to a multiple of tp.
    """

    parallelism: Parallelism
    stage: int
    tp_rank: int
    layers: Span
    heads: Span
    kv_heads: Span
    columns: Span  # of the MLP
    vocab: Span

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.parallelism.pp - 1


def refusal(sizes: ModelSizes, parallelism: Parallelism) -> str | None:
    """Why the model cannot be divided like that, in one sentence; None if it can."""
    tp, pp = parallelism.tp, parallelism.pp
    if tp < 1 or pp < 1:
        return f"tp {tp}, pp {pp}: both must be at least 1"
    if sizes.num_heads % tp:
        return f"tp {tp} does not divide the {sizes.num_heads} attention heads of {sizes.name}"
    if sizes.intermediate_size % tp:
        return f"tp {tp} does not divide the MLP width {sizes.intermediate_size} of {sizes.name}"
    if sizes.num_kv_heads % tp and tp % sizes.num_kv_heads:
        return (
            f"tp {tp} neither divides the {sizes.num_kv_heads} KV heads of {sizes.name} nor is "
            "a multiple of them"
        )
    if pp > sizes.num_layers:
        return f"pp {pp} is more than the {sizes.num_layers} layers of {sizes.name}"
    return None


def shard(sizes: ModelSizes, parallelism: Parallelism, stage: int, tp_rank: int) -> Shard:
    """The share of that worker; the shape must not be one that `refusal` refuses."""
    tp = parallelism.tp
    return Shard(
        parallelism=parallelism,
        stage=stage,
        tp_rank=tp_rank,
        layers=stage_layers(sizes, parallelism.pp)[stage],
        heads=_part(sizes.num_heads, tp, tp_rank),
        kv_heads=kv_heads(sizes, tp, tp_rank),
        columns=_part(sizes.intermediate_size, tp, tp_rank),
        vocab=_part(padded_vocab(sizes, tp), tp, tp_rank),
    )


def kv_heads(sizes: ModelSizes, tp: int, tp_rank: int) -> Span:
    """Of one rank: its part, or the one head that its query heads share with other ranks."""
    if tp <= sizes.num_kv_heads:
        return _part(sizes.num_kv_heads, tp, tp_rank)
    head = tp_rank * sizes.num_kv_heads // tp
    return Span(head, head + 1)


def padded_vocab(sizes: ModelSizes, tp: int) -> int:
    """The vocabulary, rounded up to a multiple of tp."""
    return -(-sizes.vocab_size // tp) * tp


def stage_layers(sizes: ModelSizes, pp: int) -> list[Span]:
    """Consecutive layers for each stage, so that the slowest stage is as quick as can be.

    A layer costs its weights; the head costs the vocabulary's, on the last stage. (Embedding is a
    look-up and costs nothing.)
    """
    layer = _layer_cost(sizes)
    return min(
        _cuts(sizes.num_layers, pp, sizes.hidden_size * sizes.vocab_size / layer),
        key=lambda cut: cut[0],
    )[1]


def layer_cut(sizes: ModelSizes) -> Cut:
    """Where a model's stages begin and end, as `InstanceSpec.first_gap` asks."""

    def cut(num_stages: int) -> list[tuple[Fraction, Fraction]]:
        spans = stage_layers(sizes, num_stages)
        return [(Fraction(span.start), Fraction(span.stop)) for span in spans]

    return cut


def _layer_cost(sizes: ModelSizes) -> float:
    """Weights of one layer: attention and a gated MLP."""
    head_dim = sizes.hidden_size // sizes.num_heads
    attention = sizes.hidden_size * head_dim * 2 * (sizes.num_heads + sizes.num_kv_heads)
    return attention + 3.0 * sizes.hidden_size * sizes.intermediate_size


def _cuts(num_layers: int, pp: int, head: float) -> list[tuple[tuple[float, float], list[Span]]]:
    """Ways to cut, by how many layers the last stage has: the rest is spread evenly before it.

    Each with its slowest stage in layers, head included, and the last stage's size to break ties.
    """
    if pp == 1:
        return [((num_layers + head, 0.0), [Span(0, num_layers)])]
    ways = []
    for last in range(1, num_layers - pp + 2):
        counts = [*_spread(num_layers - last, pp - 1), last]
        slowest = max(max(counts[:-1]), last + head)
        ways.append(((float(slowest), -float(last)), _spans(counts)))
    return ways


def _spread(total: int, parts: int) -> list[int]:
    """As equal as can be, the larger ones first."""
    size, rest = divmod(total, parts)
    return [size + 1] * rest + [size] * (parts - rest)


def _spans(counts: Sequence[int]) -> list[Span]:
    spans, start = [], 0
    for count in counts:
        spans.append(Span(start, start + count))
        start += count
    return spans


def _part(total: int, parts: int, index: int) -> Span:
    size = total // parts
    return Span(index * size, (index + 1) * size)
