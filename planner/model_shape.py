"""A model as the planner sees it: the sizes that decide weights, KV cache and step times.

No weights and no torch. Where the engine refuses a model it cannot compute, the planner may still
plan for it: mixtures of experts, latent attention (MLA) and quantised weights have sizes here.
"""

from functools import cached_property

import msgspec

from ipc.sharding import ModelSizes
from ipc.vocabulary import Parallelism
from planner.errors import InfeasibleShape


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of the MLP, in all layers but the first `num_dense_layers`."""

    num_experts: int
    per_token: int
    mlp_size: int
    num_shared: int = 0
    num_dense_layers: int = 0


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: keys and values share one compressed vector per token.

    `kv_rank + rope_dim` numbers are cached per token and layer, whatever the number of heads, and
    every tensor-parallel rank holds all of them.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The sizes of a decoder-only transformer.

    Args:
        has_gate: the MLP has three matrices (gate, up, down) instead of two.
        has_bias: linear layers and norms carry a bias, as in OPT.
        learned_positions: positions are a table of `max_positions` rows (OPT), not rotary.
        has_qk_norm: queries and keys are normalised per head (Qwen3).
        weight_bits, kv_bits, compute_bits: three separate knobs of quantisation; 8 compute bits
            use the device's fp8 rate, if it has one.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    max_positions: int
    has_gate: bool = True
    tied_embeddings: bool = False
    has_bias: bool = False
    learned_positions: bool = False
    has_qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    weight_bits: float = 16
    kv_bits: float = 16
    compute_bits: int = 16

    @property
    def sizes(self) -> ModelSizes:
        """What a division among workers must know."""
        return ModelSizes(
            name=self.name,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden_size=self.hidden_size,
            intermediate_size=self.mlp_size,
            vocab_size=self.vocab_size,
        )

    @property
    def attention_matrix_params(self) -> int:
        """Elements of one layer's attention projections."""
        h, n = self.hidden_size, self.num_heads
        if self.latent is not None:
            a = self.latent
            query = h * a.q_rank + a.q_rank * n * (a.nope_dim + a.rope_dim)
            keys = h * (a.kv_rank + a.rope_dim) + a.kv_rank * n * (a.nope_dim + a.value_dim)
            return query + keys + n * a.value_dim * h
        return h * self.head_dim * (2 * n + 2 * self.num_kv_heads)

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.has_gate else 2

    @property
    def dense_mlp_params(self) -> int:
        """Elements of one dense layer's MLP."""
        return self.mlp_matrices * self.hidden_size * self.mlp_size

    @property
    def expert_params(self) -> int:
        """Elements of one expert; zero without experts."""
        return self.mlp_matrices * self.hidden_size * self.experts.mlp_size if self.experts else 0

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.experts.num_dense_layers if self.experts else 0

    @property
    def vector_params(self) -> int:
        """Norms and biases of one layer that every rank holds whole."""
        if self.latent is not None:
            return 2 * self.hidden_size + self.latent.q_rank + self.latent.kv_rank
        norms = 2 * self.hidden_size * (2 if self.has_bias else 1)
        return norms + (2 * self.head_dim if self.has_qk_norm else 0) + self._whole_bias_params

    @property
    def split_bias_params(self) -> int:
        """Biases of one layer that are divided among the ranks: of qkv and of the MLP's input."""
        if not self.has_bias:
            return 0
        return self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + self.mlp_size

    @property
    def _whole_bias_params(self) -> int:
        return 2 * self.hidden_size if self.has_bias else 0

    @cached_property
    def matrix_params(self) -> int:
        """Elements of all layers' matrices, every expert counted."""
        dense_layers = self.num_layers - self.num_moe_layers
        total = (
            self.num_layers * self.attention_matrix_params + dense_layers * self.dense_mlp_params
        )
        if self.experts is not None:
            count = self.experts.num_experts + self.experts.num_shared
            router = self.hidden_size * self.experts.num_experts
            total += self.num_moe_layers * (count * self.expert_params + router)
        return total

    @property
    def embedding_params(self) -> int:
        """Token table, output head where it is not the same, and learned positions."""
        tables = self.vocab_size * (1 if self.tied_embeddings else 2)
        # OPT's table has two rows before the first position.
        positions = self.max_positions + 2 if self.learned_positions else 0
        return (tables + positions) * self.hidden_size

    @cached_property
    def num_params(self) -> int:
        """All parameters, experts included."""
        per_layer = self.vector_params + self.split_bias_params
        final_norm = self.hidden_size * (2 if self.has_bias else 1)
        return self.matrix_params + self.num_layers * per_layer + self.embedding_params + final_norm

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers, each head counted once."""
        return self.num_layers * self.kv_elements_per_layer(tp=1) * self.kv_bits / 8

    def kv_elements_per_layer(self, tp: int) -> int:
        """Cached numbers per token and layer on one of `tp` ranks.

        Beyond as many ranks as KV heads every rank still holds one; a latent is not split at all.
        """
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.head_dim * max(1, -(-self.num_kv_heads // tp))

    def quantised(
        self, *, weight_bits: float, kv_bits: float = 16, compute_bits: int = 16
    ) -> "ModelShape":
        """The same network with other element sizes."""
        return msgspec.structs.replace(
            self, weight_bits=weight_bits, kv_bits=kv_bits, compute_bits=compute_bits
        )

    def check(self, parallelism: Parallelism) -> None:
        """Raise InfeasibleShape if the model cannot be cut that way, and say why."""
        reason = self.refusal(parallelism)
        if reason is not None:
            raise InfeasibleShape(
                f"{self.name} does not run at tp {parallelism.tp}, pp {parallelism.pp}: {reason}"
            )

    def refusal(self, parallelism: Parallelism) -> str | None:
        """Why the model cannot be cut that way, or None."""
        tp, pp, kv = parallelism.tp, parallelism.pp, self.num_kv_heads
        if tp < 1 or pp < 1:
            return "degrees start at 1"
        if self.latent is None and self.num_heads % kv:
            return f"{self.num_heads} attention heads cannot share {kv} KV heads evenly"
        if self.num_heads % tp:
            return f"{self.num_heads} attention heads do not divide by {tp}"
        for width in self._split_widths:
            if width % tp:
                return f"the MLP's width of {width} does not divide by {tp}"
        if self.latent is None and kv % tp and tp % kv:
            return f"{tp} neither divides {kv} KV heads nor is a multiple of them"
        if pp > self.num_layers:
            return f"there are only {self.num_layers} layers for {pp} stages"
        return None

    @property
    def _split_widths(self) -> tuple[int, ...]:
        if self.experts is None:
            return (self.mlp_size,)
        dense = (self.mlp_size,) if self.experts.num_dense_layers else ()
        return (*dense, self.experts.mlp_size)
