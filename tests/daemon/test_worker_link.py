"""Events reach whom they concern, and a flood of them does not keep everybody else waiting."""

import asyncio

from daemon.worker_link import Turns


class HandSetClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """Pieces of work of a second each; `seen` tells how many were done when others had a turn."""

    def __init__(self, turn_s: float) -> None:
        self._clock = HandSetClock()
        self._turns = Turns(turn_s, self._clock)
        self._num_done = 0
        self.seen: list[int] = []

    async def do(self, num_pieces: int) -> None:
        for _ in range(num_pieces):
            self._clock.now_s += 1.0
            self._num_done += 1
            asyncio.get_running_loop().call_soon(lambda: self.seen.append(self._num_done))
            await self._turns.pass_on()

    def rest(self, seconds: float) -> None:
        self._clock.now_s += seconds


async def test_others_have_their_turn_when_the_time_is_over_and_not_before() -> None:
    work = Work(turn_s=3.0)
    await work.do(6)
    assert work.seen == [3] * 3 + [6] * 3


async def test_what_comes_after_a_rest_is_passed_on_at_once() -> None:
    work = Work(turn_s=3.0)
    work.rest(60.0)
    await work.do(1)
    assert work.seen == [1]


async def test_a_turn_begins_when_the_others_have_had_theirs() -> None:
    work = Work(turn_s=3.0)
    asyncio.get_running_loop().call_soon(work.rest, 60.0)  # others take long
    await work.do(3)
    await work.do(2)
    assert work.seen == [3] * 3
