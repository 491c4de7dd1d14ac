"""Step times from a model's sizes and a device sheet, where nothing was measured.

Each kernel takes what its arithmetic or its bytes take, whichever is longer, and never less than
the shortest kernel of its kind. Good to rank shapes and to about 15 % in level; a table measured
on the device is better wherever there is one. The formulas are Appendix A's operation counts
(DistServe, arXiv 2401.09670), with grouped heads, experts, latents and quantised weights.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from ipc.vocabulary import Parallelism
from planner.devices import DeviceSheet
from planner.latency.interface import EQUAL, Chunk, Estimate, Source, StepLine
from planner.latency.products import Products
from planner.latency.pull import Pull, pull_over
from planner.model_shape import ModelShape


class RooflineLatency:
    """A latency model that knows the model's sizes and the device's rates, and nothing else."""

    slowest = EQUAL
    source = Source.ROOFLINE

    def __init__(
        self,
        shape: ModelShape,
        device: DeviceSheet,
        parallelism: Parallelism | None = None,
        *,
        pull: Pull | None = None,
        step_s: float = 0.0,
    ) -> None:
        """`step_s` is what the engine itself takes for each step and stage."""
        parallelism = parallelism or Parallelism()
        shape.check(parallelism)
        self.num_stages = parallelism.pp
        self.num_devices = parallelism.num_workers
        self._products = Products(shape, device, parallelism, step_s)
        self._pull = pull or pull_over(device, shape, parallelism)
        self._layers = shape.num_layers / parallelism.pp
        self._set_decode_attention(shape, device, parallelism.tp)
        self._set_prefill_attention(shape, device, parallelism.tp)

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        tokens = 0
        for chunk in chunks:
            tokens += chunk.num_new
        seconds = self._products.seconds(tokens, len(chunks)) + self._attention_s(chunks)
        return Estimate(seconds, Source.ROOFLINE)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        products_s = self._products.seconds(batch, batch)
        if context_tokens < self._floor_tokens:
            base_s = products_s + self._attention_floor_s
            return StepLine(base_s, 0.0, self._floor_tokens, Source.ROOFLINE)
        return StepLine(products_s, self._per_token_s, inf, Source.ROOFLINE)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        """Weights are read once for all rows; the two kinds of attention take turns."""
        tokens = sum(chunk.num_new for chunk in chunks) + batch
        attention_s = self._attention_s(chunks) if chunks else 0.0
        if batch:
            attention_s += max(self._attention_floor_s, self._per_token_s * context_tokens)
        seconds = self._products.seconds(tokens, len(chunks) + batch) + attention_s
        return Estimate(seconds, Source.ROOFLINE)

    def transfer(self, num_tokens: int) -> Estimate:
        return Estimate(self._pull.seconds(num_tokens), Source.ROOFLINE)

    def _set_decode_attention(self, shape: ModelShape, device: DeviceSheet, tp: int) -> None:
        """Reading keys and values; a latent is so small that its arithmetic can take longer."""
        read_bytes = shape.kv_elements_per_layer(tp) * shape.kv_bits / 8
        flops = 2 * shape.num_heads / tp * _score_and_value_dims(shape, in_latent=True)
        rate = device.attention_flops[-1][1]
        per_token_s = max(read_bytes / device.attention_bytes_per_s, flops / rate)
        self._per_token_s = self._layers * per_token_s
        self._attention_floor_s = self._layers * device.attention_floor_s
        self._floor_tokens = device.attention_floor_s / per_token_s

    def _set_prefill_attention(self, shape: ModelShape, device: DeviceSheet, tp: int) -> None:
        """Straight lines of seconds per (token times token), by length."""
        flops = 2 * shape.num_heads / tp * _score_and_value_dims(shape, in_latent=False)
        self._lengths = [length for length, _ in device.attention_flops]
        self._pair_s = [self._layers * flops / rate for _, rate in device.attention_flops]

    def _attention_s(self, chunks: Sequence[Chunk]) -> float:
        seconds = 0.0
        for num_new, num_cached in chunks:
            pairs = num_new * (num_cached + num_new / 2)
            computed_s = pairs * self._seconds_per_pair(num_new + num_cached)
            read_s = self._per_token_s * num_cached
            seconds += computed_s if computed_s > read_s else read_s
        floor_s = self._attention_floor_s
        return seconds if seconds > floor_s else floor_s

    def _seconds_per_pair(self, length: int) -> float:
        lengths, pair_s = self._lengths, self._pair_s
        i = bisect_right(lengths, length)
        if i == 0 or i == len(lengths):
            return pair_s[max(0, i - 1)]
        share = (length - lengths[i - 1]) / (lengths[i] - lengths[i - 1])
        return pair_s[i - 1] + (pair_s[i] - pair_s[i - 1]) * share


def _score_and_value_dims(shape: ModelShape, *, in_latent: bool) -> int:
    """Multiply-adds per head for one pair of tokens: a score over keys, then a sum over values.

    A latent decode works on the compressed vectors themselves, a prefill on the heads' own.
    """
    if shape.latent is None:
        return 2 * shape.head_dim
    latent = shape.latent
    if in_latent:
        return 2 * latent.kv_rank + latent.rope_dim
    return latent.nope_dim + latent.rope_dim + latent.value_dim
