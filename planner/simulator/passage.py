"""One passage of a request through prefill and decode, and what a run writes down of it."""

import heapq
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ipc.kv_layout import blocks_for
from ipc.prefill_policy import Ticket, Turn, WaitingPrompt
from planner.latency.interface import Chunk
from planner.simulator.timeline import Timeline
from planner.workload.requests import Requests


class Holder(Protocol):
    """Who prefilled a passage, and keeps its blocks until they are pulled."""

    def release(self, passage: "Passage", when_s: float) -> None: ...


class Passage:
    """A request on its way: its prompt (with what was already drawn), and tokens still to draw.

    A preemption ends a passage and begins another one, as the service's trips do.
    """

    __slots__ = (
        "blocks",
        "index",
        "is_first",
        "leave_step",
        "num_tokens",
        "remaining",
        "source",
        "ticket",
    )

    def __init__(self, index: int, num_tokens: int, remaining: int, block_size: int) -> None:
        self.index = index  # also its place in the order of arrival
        self.num_tokens = num_tokens
        self.remaining = remaining
        self.blocks = blocks_for(num_tokens, block_size)
        self.ticket = Ticket(self, index, WaitingPrompt(num_tokens, self.blocks))
        self.is_first = True
        self.leave_step = 0  # of its lane
        self.source: Holder | None = None  # None: where it decodes, it was prefilled too

    def __lt__(self, other: "Passage") -> bool:
        return self.index < other.index


def chunk_of(turn: Turn[Passage]) -> Chunk:
    """What a step that has been given out computes of a prompt."""
    (ticket, num_new), passage = turn, turn.ticket.subject
    return Chunk(num_new, passage.num_tokens - ticket.prompt.num_tokens - num_new)


class Agenda:
    """What happens next: a heap of (time, turn, action). Equal times keep their order."""

    __slots__ = ("_heap", "_turn")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._turn = 0

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def add(self, when_s: float, action: Callable[[float, Any], None], subject: Any) -> None:
        self._turn += 1
        heapq.heappush(self._heap, (when_s, self._turn, action, subject))

    def run_next(self) -> None:
        when_s, _, action, subject = heapq.heappop(self._heap)
        action(when_s, subject)


class Record:
    """The times of every request, as plain lists while the run lasts."""

    __slots__ = (
        "decode_start_s",
        "first_token_s",
        "last_token_s",
        "num_ended",
        "num_preemptions",
        "prefill_end_s",
        "prefill_start_s",
        "pull_end_s",
        "pull_start_s",
    )

    def __init__(self, num_requests: int) -> None:
        def column() -> list[float]:
            return [float("nan")] * num_requests

        self.first_token_s = column()
        self.last_token_s = column()
        self.prefill_start_s = column()
        self.prefill_end_s = column()
        self.pull_start_s = column()
        self.pull_end_s = column()
        self.decode_start_s = column()
        self.num_preemptions = 0
        self.num_ended = 0

    def first_token(self, index: int, now_s: float, token_s: float) -> None:
        """A prefill has ended. Later stages begin here too, where there are none."""
        self.prefill_end_s[index] = self.pull_start_s[index] = self.pull_end_s[index] = now_s
        self.decode_start_s[index] = now_s
        self.first_token_s[index] = now_s + token_s

    def last_token(self, index: int, when_s: float) -> None:
        self.last_token_s[index] = when_s
        self.num_ended += 1

    def timeline(self, requests: Requests) -> Timeline:
        return Timeline(
            requests=requests,
            first_token_s=np.array(self.first_token_s),
            last_token_s=np.array(self.last_token_s),
            prefill_start_s=np.array(self.prefill_start_s),
            prefill_end_s=np.array(self.prefill_end_s),
            pull_start_s=np.array(self.pull_start_s),
            pull_end_s=np.array(self.pull_end_s),
            decode_start_s=np.array(self.decode_start_s),
            num_preemptions=self.num_preemptions,
        )
