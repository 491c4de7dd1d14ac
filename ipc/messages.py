"""Every message between the daemon and its workers, as tagged types.

Commands go down, events come up, over one ordered ZeroMQ link per worker. Handle them by `match`
and close with `assert_never`, so that a forgotten one is a type error. How they become bytes is
`codec`'s business. All times are seconds of CLOCK_MONOTONIC, which processes of one node share.
"""

from enum import StrEnum

import msgspec

from ipc.kv_layout import RankLayout
from ipc.vocabulary import (
    DeviceKind,
    DType,
    FinishReason,
    KVHandle,
    Parallelism,
    PrefillPolicy,
    Role,
    SamplingParams,
    TokenLogprobs,
    WorkerName,
)

PROTOCOL_VERSION = 3


class LoadFormat(StrEnum):
    """Where weights come from: the model's safetensors files, or random numbers (benchmarks)."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class MixedPolicy(msgspec.Struct, frozen=True):
    """How a mixed instance shares its steps: whole prompts first, or chunks beside the decodes.

    `chunk_tokens` is the token budget of a step when prompts are chunked; None runs waiting
    prompts whole, before any decode step.
    """

    chunk_tokens: int | None = None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know to start; the first message over its inherited channel."""

    name: WorkerName
    epoch: int
    role: Role
    parallelism: Parallelism
    endpoint: str
    model_dir: str
    dtype: DType
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    device: int = 0
    device_kind: DeviceKind = DeviceKind.AUTO
    gpu_memory_utilization: float | None = None
    share_gpus: bool = False
    # By UUID, all that the process is to see, where `device` is a place among them; empty: as the
    # daemon sees them.
    visible_gpus: tuple[str, ...] = ()
    cpu_cores: tuple[int, ...] = ()
    num_threads: int = 1
    kv_bytes: int
    block_size: int
    max_context_tokens: int
    prefill_tokens: int
    max_batch: int
    prefill_policy: PrefillPolicy = PrefillPolicy.FCFS
    mixed: MixedPolicy = MixedPolicy()
    num_token_ids: int | None = None
    # Of instances with several workers: where the leader's plans come from, and where their
    # collectives meet (an URL of torch.distributed). Both are fresh with every epoch; so are the
    # CURVE keys of plans that cross nodes, of which the secret is the leader's.
    group_endpoint: str = ""
    group_public: str = ""
    group_secret: str = ""
    rendezvous: str = ""


class SequenceStart(msgspec.Struct, frozen=True):
    """A choice that enters decode: its id there, its index among the choices, its tokens so far."""

    seq_id: int
    choice: int
    output: tuple[int, ...]


# ---- commands: daemon -> leader -------------------------------------------------------------


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute `prompt + output` and draw one next token for each of `choices`.

    `output` is not empty when a choice that was already under way is prefilled again; `arrival`
    is the client's place in the daemon's count, kept over such repeats, and queues are in its
    order. A mixed instance goes on to decode the choices itself, under the same `seq_ids`; a
    prefill instance answers `Prefilled` with a handle and keeps the blocks until `Release`.
    `sampling.max_tokens` 0 scores the prompt alone: no token is reported.
    """

    request_id: int
    arrival: int
    seq_ids: tuple[int, ...]
    choices: tuple[int, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: SamplingParams
    prompt_logprobs: int | None = None


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Pull the handle's blocks when there is room, then decode the given choices together."""

    request_id: int
    arrival: int
    handle: KVHandle
    sequences: tuple[SequenceStart, ...]
    prompt: tuple[int, ...]
    sampling: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these choices wherever they are; idempotent. Answered by `Gone` for each one known."""

    request_id: int
    seq_ids: tuple[int, ...]


class Release(msgspec.Struct, frozen=True, tag=True):
    """The last reader of a prefilled prompt's blocks has ended: free them."""

    request_id: int


class PeerUp(msgspec.Struct, frozen=True, tag=True):
    """A worker whose pool may be read; its descriptor has been sent over the channel before."""

    worker: WorkerName
    epoch: int
    layout: RankLayout


class PeerDown(msgspec.Struct, frozen=True, tag=True):
    """An instance's epoch has ended: unmap its pools and drop what waits to be pulled from it."""

    instance: str
    epoch: int


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Change what the leader's policy does; nothing is reloaded."""

    role: Role
    mixed: MixedPolicy = MixedPolicy()


class Audit(msgspec.Struct, frozen=True, tag=True):
    """Check the block books now and answer with `Stats`; a follower answers with `Alive`.

    Sent with every beat of the daemon, which counts them: an answer bears the number of the newest
    that was heard, and proves that nothing sent before was lost. `log_level` is the daemon's now.
    """

    beat: int = 0
    log_level: int | None = None


class Exit(msgspec.Struct, frozen=True, tag=True):
    """Leave the step loop and end the process."""


Command = Prefill | Decode | Abort | Release | PeerUp | PeerDown | SetRole | Audit | Exit


# ---- events: worker -> daemon ---------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First words of a new process."""

    worker: WorkerName
    pid: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """What a starting worker is at, for status lines; `fraction` runs from 0 to 1."""

    stage: str
    fraction: float


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start, and would not at a second try either; for people."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker can serve: its pool (the descriptor went over the channel) and how it computes.

    Where the pool is in a device's memory, the descriptor is of a file that says how to open it,
    and whoever has it open must have closed it before a worker starts on that device again.
    """

    layout: RankLayout
    kernels: str
    load_s: float
    is_device_memory: bool = False


class Begun(msgspec.Struct, frozen=True, tag=True):
    """These prompts have their turn: a step with them, or with their first chunks, is launched."""

    request_ids: tuple[int, ...]


class Chunked(msgspec.Struct, frozen=True, tag=True):
    """So many tokens of a prompt were computed in a step, and more of it are still to be."""

    request_id: int
    num_tokens: int
    started_s: float
    ended_s: float


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """One next token per choice. `handle` is None when nothing is left to hand over.

    That is when every choice finished on this token, or when the instance decodes them itself.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finished: tuple[FinishReason | None, ...]
    handle: KVHandle | None
    started_s: float
    ended_s: float
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """Every rank has copied the handle's blocks: the daemon may release them."""

    request_id: int
    num_bytes: int
    started_s: float
    ended_s: float


class TokenRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one choice gained in a step. Thousands a second; frozen, they are in no cycle."""

    seq_id: int
    token_ids: tuple[int, ...]
    finished: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one hot message: all that a decode step produced. `started_s` is the step's launch."""

    started_s: float
    rows: tuple[TokenRow, ...]


class Gone(msgspec.Struct, frozen=True, tag=True):
    """These choices are no longer here, and nothing of ours reads or writes for them any more."""

    request_id: int
    seq_ids: tuple[int, ...]


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A choice gave its blocks back under pressure; it wants to be prefilled again."""

    seq_id: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A command that this leader cannot carry out; nothing of it is held here."""

    request_id: int
    seq_ids: tuple[int, ...]
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """This rank has no pool of that incarnation open any more, and reads none."""

    instance: str
    epoch: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A follower's answer to `Audit`: it has no books."""

    beat: int


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The leader's books: progress, load and blocks. free + held + in use = total, always.

    Times are seconds: `last_step_s` when the last step was collected (CLOCK_MONOTONIC, 0 before
    the first), `control_s` all that was spent beside steps. `pull_faults` counts pulls whose blocks
    were found to differ from their source, where that is looked at; `hidden_bytes` are those of the
    hidden states that the leader has sent to the next stage.

    `audit_failures` are all faults that audits have found, `audit_standing` those that the last
    one found. `beat` is the newest `Audit` that was heard. While a long step is under way,
    `busy_until_s` is when it should have ended at the latest; a leader says so before it begins
    one, since it hears nothing during it. `pull_since_s` is when the oldest pull under way began;
    `pull_path` is the slowest way by which this rank reads peers' pools.
    """

    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    num_pulls: int = 0
    pulled_bytes: int = 0
    pull_faults: int = 0
    hidden_bytes: int = 0
    num_preempted: int = 0
    num_waiting: int = 0
    num_running: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_held: int = 0
    blocks_in_use: int = 0
    last_step_s: float = 0.0
    control_s: float = 0.0
    audit_failures: int = 0
    audit_standing: int = 0
    beat: int = 0
    busy_until_s: float | None = None
    pull_since_s: float | None = None
    pull_path: str = ""


StartEvent = Hello | Loading | Broken | Ready | Released
"""What workers say of themselves: how their start goes, and that they let go of others' pools."""
WorkEvent = Begun | Chunked | Prefilled | Pulled | Gone | Preempted | Refused | Stats
"""What leaders say of requests, and of their books."""
Event = StartEvent | WorkEvent | Alive
