"""Matrix products and communication of one pipeline stage by the number of rows, for a roofline.

All but attention: it alone looks at contexts. Answers are kept, for a simulation asks for the
same few hundred row counts over and over.
"""

from ipc.vocabulary import Parallelism
from planner.devices import DeviceSheet
from planner.model_shape import Experts, ModelShape

GEMMS_OF_ATTENTION = 2  # qkv and output
GEMMS_OF_MLP = 2  # gate and up are one, then down
ELEMENT_BYTES = 2  # of activations, and of the output head: 16 bits whatever the matrices have


class Products:
    """Seconds per stage for `num_rows` tokens, `num_sampled` of them through the output head."""

    def __init__(
        self, shape: ModelShape, device: DeviceSheet, parallelism: Parallelism, step_s: float = 0.0
    ) -> None:
        self._shape = shape
        self._device = device
        self._tp, self._pp = parallelism.tp, parallelism.pp
        self._step_s = step_s
        self._rows_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}

    def seconds(self, num_rows: int, num_sampled: int) -> float:
        rows_s = self._rows_s.get(num_rows)
        if rows_s is None:
            rows_s = self._rows_s[num_rows] = self._layers_s(num_rows)
        head_s = self._head_s.get(num_sampled)
        if head_s is None:
            head_s = self._head_s[num_sampled] = self._output_s(num_sampled)
        return rows_s + head_s

    def _layers_s(self, rows: int) -> float:
        """The stage's layers, two sums over the ranks in each, and the send to the next stage."""
        shape = self._shape
        dense_layers = shape.num_layers - shape.num_moe_layers
        total_s = shape.num_layers * (self._attention_s(rows) + self._communication_s(rows))
        total_s += dense_layers * self._gemm_s(rows, shape.dense_mlp_params, GEMMS_OF_MLP)
        if shape.experts is not None:
            total_s += shape.num_moe_layers * self._experts_s(rows, shape.experts)
        return total_s / self._pp + self._send_s(rows) + self._step_s

    def _attention_s(self, rows: int) -> float:
        return self._gemm_s(rows, self._shape.attention_matrix_params, GEMMS_OF_ATTENTION)

    def _gemm_s(self, rows: float, params: float, num_kernels: int) -> float:
        """`rows` through matrices of `params` elements in all, divided among the ranks."""
        params /= self._tp
        flops_s = 2 * rows * params / self._device.gemm_rate(rows, self._shape.compute_bits)
        bytes_s = params * self._shape.weight_bits / 8 / self._device.bytes_per_s
        return max(flops_s, bytes_s, num_kernels * self._device.gemm_floor_s)

    def _experts_s(self, rows: int, experts: Experts) -> float:
        """Of E experts, each token asks k: `E (1 - (1 - k/E)^t)` distinct ones must be read.

        Each sees few rows, so it computes at the rate of few rows. Routing is taken as even.
        """
        count, share = experts.num_experts, experts.per_token / experts.num_experts
        distinct = count * (1 - (1 - share) ** rows)
        rows_each = rows * experts.per_token / distinct
        routed_s = self._gemm_s(rows_each, distinct * self._shape.expert_params, GEMMS_OF_MLP)
        if not experts.num_shared:
            return routed_s
        shared = experts.num_shared * self._shape.expert_params
        return routed_s + self._gemm_s(rows, shared, GEMMS_OF_MLP)

    def _communication_s(self, rows: int) -> float:
        """Two all-reduces of the activations in each layer."""
        return 2 * self._device.all_reduce(rows * self._shape.hidden_size * ELEMENT_BYTES, self._tp)

    def _send_s(self, rows: int) -> float:
        """Activations to the next stage; each rank sends its own part."""
        if self._pp == 1:
            return 0.0
        num_bytes = rows * self._shape.hidden_size * ELEMENT_BYTES / self._tp
        return self._device.intra_handshake_s + num_bytes / self._device.intra_bytes_per_s

    def _output_s(self, rows: int) -> float:
        """The output head sits on the last stage alone; equal stages each carry a share."""
        params = self._shape.vocab_size * self._shape.hidden_size / self._tp
        flops_s = 2 * rows * params / self._device.gemm_rate(rows)
        bytes_s = ELEMENT_BYTES * params / self._device.bytes_per_s
        return max(flops_s, bytes_s, self._device.gemm_floor_s) / self._pp
