"""What a leader knows of each request: prompts to prefill, groups to pull, sequences that run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ipc.kv_layout import fork_blocks
from ipc.messages import Decode, Prefill
from ipc.prefill_policy import Ticket, WaitingPrompt
from ipc.vocabulary import FinishReason, SamplingParams


@dataclass
class PrefillJob:
    """A prompt (with what was already put out) on its way through prefill."""

    command: Prefill
    block_size: int
    keep: bool = False  # whether this instance goes on to decode it
    blocks: tuple[int, ...] = ()
    num_computed: int = 0
    started_s: float | None = None
    step_id: int | None = None  # of the step under way that has a row of it ...
    num_in_step: int = 0  # ... with so many tokens
    is_aborted: bool = False
    ticket: "Ticket[PrefillJob]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        prompt = WaitingPrompt(self.num_tokens, self.num_blocks, self.num_places)
        self.ticket = Ticket(self, self.command.arrival, prompt)

    @property
    def is_launched(self) -> bool:
        return self.step_id is not None

    @property
    def num_tokens(self) -> int:
        return len(self.command.prompt) + len(self.command.output)

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_blocks(self) -> int:
        """Blocks to reserve: with those of the other choices where they will decode here."""
        return fork_blocks(self.num_tokens, self.num_places, self.block_size)

    @property
    def num_places(self) -> int:
        """Places in the batch: one for each choice where they will decode here."""
        return len(self.command.choices) if self.keep else 1


@dataclass
class PullGroup:
    """The choices of one prefilled prompt that wait for their keys and values to come over."""

    command: Decode
    block_size: int
    blocks: tuple[int, ...] = ()
    aborted: set[int] = field(default_factory=set)

    @property
    def num_blocks(self) -> int:
        num_choices = len(self.command.sequences)
        return fork_blocks(self.command.handle.num_tokens, num_choices, self.block_size)

    @property
    def pulled_blocks(self) -> tuple[int, ...]:
        """The ones the handle's blocks are copied into; the rest are for partial copies."""
        return self.blocks[: len(self.command.handle.block_ids)]

    @property
    def is_aborted(self) -> bool:
        return all(s.seq_id in self.aborted for s in self.command.sequences)


@dataclass
class Running:
    """One choice in decode. Its last token is drawn but not computed yet."""

    seq_id: int
    choice: int
    arrival: int
    sampling: SamplingParams
    blocks: list[int]
    num_computed: int  # advances at launch
    num_output: int  # advances at collect
    num_planned: int  # output tokens drawn or launched
    step_ids: list[int] = field(default_factory=list)  # of the steps under way that have its row

    def can_run(self, max_in_flight: int) -> bool:
        """More may be drawn, and its next step need not wait for what one under way draws."""
        limit = 1 if self.sampling.looks_at_output else max_in_flight
        return len(self.step_ids) < limit and self.num_planned < self.sampling.max_tokens

    @property
    def age(self) -> tuple[int, int]:
        """Orders sequences from the oldest to the youngest."""
        return (self.arrival, self.choice)


def finish_reason(token_id: int, sampling: SamplingParams, num_output: int) -> FinishReason | None:
    """Whether a choice ends with this token, its `num_output`-th."""
    if token_id in sampling.end_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= sampling.max_tokens else None


@dataclass(frozen=True)
class Fork:
    """Block tables of a prompt's choices, and the partial block's copies (source, target)."""

    tables: list[list[int]]
    shared: tuple[int, ...]
    copies: list[tuple[int, int]]


def fork_tables(blocks: Sequence[int], num_tokens: int, num_choices: int, block_size: int) -> Fork:
    """Deal out what `fork_blocks` counted; `shared` blocks need a reference per extra choice."""
    num_full, has_partial = divmod(num_tokens, block_size)
    full = list(blocks[:num_full])
    if not has_partial:
        return Fork([list(full) for _ in range(num_choices)], tuple(full), [])
    partials = blocks[num_full:]
    tables = [[*full, partial] for partial in partials]
    return Fork(tables, tuple(full), [(partials[0], target) for target in partials[1:]])
