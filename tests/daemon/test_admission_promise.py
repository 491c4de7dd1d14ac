"""Who is let in for a target meets it: the daemon's queue beside a leader's, in simulated time."""

import random
from collections.abc import Iterator

import pytest

from daemon.admission import Admission, Line
from daemon.errors import SloMissed
from daemon.prompt_queue import PromptQueue
from ipc.prefill_policy import FirstComeFirstServed, SkipJoin, Ticket, Turn, WaitingPrompt
from tests.daemon.test_prefill_times import measured

L_M = 512
TOKEN_S = 1e-4
TTFT_S = 1.0
CHATS, DOCUMENT = (50, 500), 4000


def arrivals(load: float, until_s: float) -> Iterator[tuple[float, int]]:
    """(when, tokens): nine chats for a document; so much work a second, in seconds."""
    dice, now_s = random.Random(2), 0.0
    mean_s = (0.9 * sum(CHATS) / 2 + 0.1 * DOCUMENT) * TOKEN_S
    while (now_s := now_s + dice.expovariate(load / mean_s)) < until_s:
        yield now_s, DOCUMENT if dice.random() < 0.1 else dice.randint(*CHATS)


class Lane:
    """A leader without blocks to wait for, and the door before it."""

    def __init__(self, leader: FirstComeFirstServed[int], copy: FirstComeFirstServed[int]) -> None:
        self._leader = leader
        self._copy = PromptQueue(copy, block_size=16)
        self._admission = Admission(max_queued=10_000, ttft_s=TTFT_S)
        self._times = measured(
            *((100, i * TOKEN_S * 100, (i + 1) * TOKEN_S * 100) for i in range(8))
        )
        self._running: list[Turn[int]] = []
        self._ends_s = 0.0
        self.arrived_s: list[float] = []  # of those who were taken
        self.ttfts_s: list[float] = []

    def comes(self, now_s: float, num_tokens: int) -> None:
        self.run_until(now_s)
        try:
            line = Line(num_waiting=0, queue=self._copy, times=self._times)
            self._admission.check([num_tokens], line, now_s)
        except SloMissed:
            return
        name = len(self.arrived_s)
        self.arrived_s.append(now_s)
        self._copy.add(name, name, num_tokens, now_s=now_s)
        self._leader.join(Ticket(name, name, WaitingPrompt(num_tokens, 0)))
        self._launch(now_s)

    def run_until(self, now_s: float) -> None:
        while self._running and self._ends_s <= now_s:
            done, self._running = self._running, []
            for ticket, num_new in done:
                if ticket.prompt.num_tokens:
                    self._leader.rejoin(ticket)
                    self._copy.advance(ticket.subject, num_new)
                else:
                    self._copy.finish(ticket.subject)
                    self.ttfts_s.append(self._ends_s - self.arrived_s[ticket.subject])
            self._launch(self._ends_s)

    def _launch(self, now_s: float) -> None:
        if self._running:
            return
        self._running = self._leader.next_step(free_blocks=1, free_places=10_000)
        self._ends_s = now_s + sum(turn.num_new for turn in self._running) * TOKEN_S
        for turn in self._running:
            self._copy.advance(turn.ticket.subject, 0)


@pytest.mark.parametrize("policy", [FirstComeFirstServed, SkipJoin])
@pytest.mark.parametrize("load", [0.9, 1.5])
def test_who_is_taken_for_a_target_meets_it_whoever_comes_later(
    policy: type[FirstComeFirstServed[int]], load: float
) -> None:
    """Under skip-join a third and more of the documents that were taken once missed it, overtaken
    by chats that came after them."""
    lane = Lane(policy(L_M), policy(L_M))
    for now_s, num_tokens in arrivals(load, until_s=120.0):
        lane.comes(now_s, num_tokens)
    lane.run_until(1000.0)
    assert len(lane.ttfts_s) == len(lane.arrived_s) > 1000
    num_met = sum(ttft_s <= TTFT_S + TOKEN_S for ttft_s in lane.ttfts_s)
    assert num_met > 0.985 * len(lane.ttfts_s)
