"""A crowd before the turnstile."""

import asyncio
from collections import Counter

from starlette.types import Message, Receive, Scope, Send

from daemon.frontend.turnstile import Turnstile


class Rounds:
    """Counts the event loop's rounds, and says in which one each request came through."""

    def __init__(self) -> None:
        self.number = 0
        self.came: list[tuple[int, int]] = []
        self._loop = asyncio.get_running_loop()
        self._next()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.append((scope["number"], self.number))

    def _next(self) -> None:
        self.number += 1
        self._loop.call_soon(self._next)


async def nothing() -> Message:
    raise AssertionError("nobody reads here")


async def nowhere(message: Message) -> None:
    raise AssertionError("nobody writes here")


def coming(turnstile: Turnstile, number: int, method: str = "POST") -> "asyncio.Task[None]":
    scope = {"type": "http", "method": method, "number": number}
    return asyncio.ensure_future(turnstile(scope, nothing, nowhere))


async def test_a_crowd_comes_through_in_order_and_a_few_per_round() -> None:
    rounds = Rounds()
    turnstile = Turnstile(rounds, per_round=4)
    await asyncio.gather(*(coming(turnstile, number) for number in range(103)))
    assert [number for number, _ in rounds.came] == list(range(103))
    assert max(Counter(in_round for _, in_round in rounds.came).values()) <= 2 * 4
    assert len({in_round for _, in_round in rounds.came}) >= 103 // 4


async def test_who_asks_for_health_does_not_wait_behind_the_crowd() -> None:
    rounds = Rounds()
    turnstile = Turnstile(rounds, per_round=4)
    crowd = [coming(turnstile, number) for number in range(100)]
    await coming(turnstile, 1000, "GET")
    assert (1000, rounds.came[0][1]) in rounds.came[:10]
    await asyncio.gather(*crowd)


async def test_those_who_left_while_they_waited_take_nobody_s_place() -> None:
    rounds = Rounds()
    turnstile = Turnstile(rounds, per_round=4)
    crowd = [coming(turnstile, number) for number in range(100)]
    await asyncio.sleep(0)
    for number in range(4, 99):
        crowd[number].cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert [number for number, _ in rounds.came] == [0, 1, 2, 3, 99]
    assert rounds.came[-1][1] - rounds.came[0][1] < 10


async def test_one_after_another_nobody_waits() -> None:
    rounds = Rounds()
    turnstile = Turnstile(rounds, per_round=4)
    for number in range(20):
        began = rounds.number
        await coming(turnstile, number)
        assert rounds.came[-1][1] <= began + 1
