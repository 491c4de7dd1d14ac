"""Step times from a per-layer kernel profile: operations of a layer added up, times the layers.

A step is embedding, the layers (norm, projections, attention, norm, MLP), a last norm, and for
each sequence the output head and the sampler. What the engine does between kernels is not in it.
"""

from collections.abc import Callable, Mapping, Sequence

from planner.devices import DeviceSheet
from planner.errors import ProfileError
from planner.latency.grids import Curve, Row
from planner.latency.interface import EQUAL, Chunk, Estimate, Source, StepLine
from planner.latency.layer_attention import ChunkAttention, MixedFactor, decode_attention
from planner.latency.layer_file import (
    AttentionPoint,
    LayerFiles,
    LayerProfile,
    Owner,
    read_layer_profile,
)
from planner.latency.products import ELEMENT_BYTES
from planner.latency.pull import Pull
from planner.model_catalog import model_shape
from planner.model_shape import ModelShape

ONCE = frozenset({"embedding", "final_layernorm"})
TWICE = frozenset({"layernorm"})
"""Before attention and before the MLP; every other operation is there once in each layer."""


class LayerTable:
    """A latency model over a layer profile of one (GPU, model, tp), without pipelines.

    Args:
        link: whose all-reduces are added twice per layer where tp is above 1; the profile has
            kernels of one rank alone.
    """

    source = Source.MEASURED
    num_stages = 1
    slowest = EQUAL

    def __init__(
        self,
        profile: LayerProfile,
        shape: ModelShape,
        *,
        tp: int = 1,
        link: DeviceSheet | None = None,
        pull: Pull | None = None,
    ) -> None:
        if tp > 1 and link is None:
            raise ProfileError(f"a layer profile at tp {tp} needs a device sheet for its links")
        self.num_devices = tp
        self._layers = shape.num_layers
        self._pull = pull
        self._rows = _summed(profile.dense, self._repeats)
        self._sampled = _summed(profile.per_sequence, lambda _: 1)
        self._reduce_bytes = ELEMENT_BYTES * shape.hidden_size
        self._link = link if tp > 1 else None
        chunks, decodes, both = _parted(profile.attention)
        self._chunks = ChunkAttention(chunks)
        self._decodes = decode_attention(decodes, self._layers)
        self._factor = MixedFactor(both, self._chunks, decode_attention(decodes, 1))
        self._dense_s: dict[tuple[int, int], float] = {}

    @classmethod
    def read(
        cls, files: LayerFiles, owner: Owner, *, link: DeviceSheet | None = None
    ) -> "LayerTable":
        """From the three CSV files; the model's number of layers is the catalog's."""
        shape = model_shape(owner.model)
        return cls(read_layer_profile(files, owner), shape, tp=owner.tp, link=link)

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        tokens = 0
        for chunk in chunks:
            tokens += chunk.num_new
        attention_s = self._layers * self._chunks(chunks)
        return Estimate(self._dense(tokens, len(chunks)) + attention_s, self._label(tokens))

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        line = self._decodes.line(batch, context_tokens)
        base_s = line.base_s + self._dense(batch, batch)
        return StepLine(base_s, line.per_token_s, line.until_tokens, line.source)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        if not batch:
            return self.prefill(chunks)
        alone = self._decodes.line(batch, context_tokens)
        alone_s = alone.seconds(context_tokens)
        if not chunks:
            return Estimate(alone_s + self._dense(batch, batch), alone.source)
        tokens = sum(chunk.num_new for chunk in chunks) + batch
        beside_s = alone_s * self._factor(chunks, batch, context_tokens)
        attention_s = self._layers * self._chunks(chunks) + beside_s
        seconds = self._dense(tokens, len(chunks) + batch) + attention_s
        covered = self._factor.covers(chunks, batch, context_tokens)
        return Estimate(seconds, self._label(tokens) if covered else Source.FITTED)

    def transfer(self, num_tokens: int) -> Estimate:
        if self._pull is None:
            raise ProfileError("a layer profile knows no link to pull over: name one")
        return Estimate(self._pull.seconds(num_tokens), Source.FITTED)

    def _repeats(self, operation: str) -> int:
        if operation in ONCE:
            return 1
        return self._layers * (2 if operation in TWICE else 1)

    def _dense(self, num_rows: int, num_sampled: int) -> float:
        """All but attention, kept by (rows, sequences)."""
        key = (num_rows, num_sampled)
        seconds = self._dense_s.get(key)
        if seconds is None:
            seconds = self._rows(num_rows) + self._sampled(num_sampled) + self._reduces(num_rows)
            self._dense_s[key] = seconds
        return seconds

    def _reduces(self, num_rows: int) -> float:
        if self._link is None:
            return 0.0
        num_bytes = num_rows * self._reduce_bytes
        return 2 * self._layers * self._link.all_reduce(num_bytes, self.num_devices)

    def _label(self, tokens: int) -> Source:
        return Source.MEASURED if self._rows.covers(tokens) else Source.FITTED


def _summed(operations: Mapping[str, Row], repeats: Callable[[str], int]) -> Curve:
    """All operations together, each as often as it is there: one curve to look up."""
    curves = [(repeats(name), _extended(row)) for name, row in operations.items()]
    xs = sorted({x for row in operations.values() for x, _ in row})
    row = [(x, sum(number * curve(x) for number, curve in curves)) for x in xs]
    return _extended(row)


def _extended(row: Row) -> Curve:
    """Level below the first point, and beyond the last one on as it ended."""
    (x0, y0), (x1, y1) = row[-2:]
    return Curve(row, slope_below=0.0, slope_above=max(0.0, (y1 - y0) / (x1 - x0)))


def _parted(points: Mapping[AttentionPoint, float]) -> tuple[dict[AttentionPoint, float], ...]:
    """Chunks alone, decodes alone, and both."""
    chunks = {p: s for p, s in points.items() if p.num_new and not p.batch}
    decodes = {p: s for p, s in points.items() if p.batch and not p.num_new}
    both = {p: s for p, s in points.items() if p.batch and p.num_new}
    if not chunks or len(decodes) < 3:
        raise ProfileError("the attention profile needs chunks alone and three decodes at least")
    return chunks, decodes, both
