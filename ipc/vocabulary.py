"""The nouns that cross a room's wall: roles, shapes, placements, sampling parameters, KV handles.

Everything here is frozen, small and free of behaviour that needs a clock, a socket or a tensor.
Field terms are the paper's (DistServe, arXiv 2401.09670).
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from fractions import Fraction

import msgspec

Cut = Callable[[int], Sequence[tuple[Fraction, Fraction]]]
"""For so many stages where each begins and ends among a model's layers, in any unit."""


class Role(StrEnum):
    """What an instance does: only prefill, only decode, or both on the same device."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class PrefillPolicy(StrEnum):
    """In which order an instance prefills: by arrival, or short prompts first, long ones in
    chunks."""

    FCFS = "fcfs"
    SKIP_JOIN = "skip-join"


class DeviceKind(StrEnum):
    """What a worker computes on; `auto` is a GPU where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """Element type of weights, activations and the KV cache."""

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"

    @property
    def num_bytes(self) -> int:
        return 4 if self is DType.FP32 else 2


class FinishReason(StrEnum):
    """Why a choice ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class Parallelism(msgspec.Struct, frozen=True):
    """Intra-operator (tp) and inter-operator (pp) degrees of one instance."""

    tp: int = 1
    pp: int = 1

    @property
    def num_workers(self) -> int:
        return self.tp * self.pp


def equal_cut(num_stages: int) -> list[tuple[Fraction, Fraction]]:
    """Stages of the same number of layers, in shares of them all: what is taken where the model is
    not known. `ipc.sharding.layer_cut` is the real one."""
    return [
        (Fraction(stage, num_stages), Fraction(stage + 1, num_stages))
        for stage in range(num_stages)
    ]


class Segment(msgspec.Struct, frozen=True):
    """The workers of one stage of one instance: `tp` devices of one node."""

    node: str
    devices: tuple[int, ...]


class InstanceSpec(msgspec.Struct, frozen=True):
    """One full copy of the model: its role, its shape, and one segment per stage.

    Args:
        unit: instances of one unit hand prompts to each other; a placement is copies of it.
        prefill_tokens: L_m of this shape; None where it does not prefill, or as configured.
        chunk_tokens: of a mixed one, the token budget of a step; None: prompts run whole.
    """

    name: str
    role: Role
    parallelism: Parallelism
    segments: tuple[Segment, ...]
    unit: int = 0
    prefill_tokens: int | None = None
    chunk_tokens: int | None = None

    @property
    def home(self) -> str:
        """The node that owns its requests, its epochs and its leader."""
        return self.segments[0].node

    def node_of(self, worker: "WorkerName") -> str:
        return self.segments[worker.stage].node

    def first_gap(self, decode: "InstanceSpec", cut: Cut = equal_cut) -> tuple[int, int] | None:
        """The first stages, here and there, that hold the same layers and share no node: what
        keeps `decode` from pulling out of this instance. None where every such pair shares one.

        Tensor-parallel ranks of a stage are on one node, so that heads need no look.
        """
        ours, theirs = cut(len(self.segments)), cut(len(decode.segments))
        for here, (start, stop) in enumerate(ours):
            for there, (other_start, other_stop) in enumerate(theirs):
                overlap = start < other_stop and other_start < stop
                if overlap and self.segments[here].node != decode.segments[there].node:
                    return here, there
        return None


class Placement(msgspec.Struct, frozen=True):
    """Which instances exist and on which devices; what `distserve plan` chose and a daemon runs.

    `model` is None where the configuration alone says it.
    """

    version: int
    instances: tuple[InstanceSpec, ...]
    model: str | None = None


class WorkerName(msgspec.Struct, frozen=True):
    """One process: instance, pipeline stage and tensor-parallel rank."""

    instance: str
    stage: int = 0
    tp_rank: int = 0

    @property
    def is_leader(self) -> bool:
        """The leader alone decides what its instance runs next."""
        return self.stage == 0 and self.tp_rank == 0

    def __str__(self) -> str:
        return f"{self.instance}/{self.stage}.{self.tp_rank}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when a choice ends, checked and filled in at the HTTP edge.

    `end_token_ids` holds every id that ends a choice: the model's end-of-sequence ids (unless the
    client said `ignore_eos`) and the client's own. Before `min_tokens` output tokens they cannot
    be drawn. `logprobs` is the number of alternatives reported per token; 0 means the drawn token
    alone, None means no log probabilities.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    end_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def looks_at_output(self) -> bool:
        """Whether how a token is drawn depends on which tokens were drawn before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of a token and of the likeliest alternatives, from the raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class KVHandle(msgspec.Struct, frozen=True):
    """Where a prefilled prompt's keys and values wait until a decode instance pulls them.

    `epoch` is the owner's incarnation: a handle of an earlier one names memory that is gone.
    Block ids are instance-wide: the same on every rank of the owner.
    """

    owner: str
    epoch: int
    request_id: int
    block_ids: tuple[int, ...]
    num_tokens: int
