"""What fits and what is refused at the door: contexts, pools, queue bounds, targets.

Pure arithmetic: what is known of queues and instances, and the clock, come in as facts.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from daemon.errors import InvalidRequest, PromptTooLong, QueueFull, SloMissed
from daemon.generation import GenerationSpec
from daemon.prefill_times import PrefillTimes
from ipc.kv_layout import RankLayout, blocks_for

UNKNOWN_WAIT_S = 1.0
"""What a refused client is told to wait while nothing has been measured."""
LONGEST_WAIT_S = 120.0
"""What is ever told: clients that should wait longer do not come again."""
MOST_OVERTAKING = 0.95
"""Of an instance's time: more of it is a burst and no load that goes on."""


class Capacity:
    """The longest sequence that the model and every instance's pool can hold.

    Pools are remembered by instance name while an instance is down: it comes back with the same.
    """

    def __init__(self, max_context_tokens: int) -> None:
        self._max_context = max_context_tokens
        self._pools: dict[str, RankLayout] = {}

    def learn(self, instance: str, layout: RankLayout) -> None:
        self._pools[instance] = layout

    def forget(self, instance: str) -> None:
        """It was removed for good."""
        self._pools.pop(instance, None)

    @property
    def max_tokens(self) -> int:
        """Prompt and output together; a sequence may have to be prefilled again with its output,
        so it must fit the pools of both roles."""
        pools = [layout.num_blocks * layout.block_size for layout in self._pools.values()]
        return min([self._max_context, *pools])

    def max_output(self, num_prompt: int) -> int:
        """How many output tokens fit beside such a prompt.

        Raises:
            PromptTooLong: not even one.
        """
        room = self.max_tokens - num_prompt
        if room < 1:
            raise PromptTooLong(num_prompt=num_prompt, num_output=1, limit=self.max_tokens)
        return room

    def check(self, spec: GenerationSpec) -> None:
        """Raises PromptTooLong or InvalidRequest when the request could never be served."""
        num_prompt, num_output = len(spec.prompt), spec.sampling.max_tokens
        if num_prompt + num_output > self.max_tokens:
            raise PromptTooLong(num_prompt=num_prompt, num_output=num_output, limit=self.max_tokens)
        for layout in self._pools.values():
            need = blocks_for(num_prompt, layout.block_size) + spec.num_choices
            if need > layout.num_blocks:
                raise InvalidRequest(
                    f"n={spec.num_choices} choices of a prompt of {num_prompt} tokens need {need} "
                    f"KV blocks together, the pool has {layout.num_blocks}",
                    param="n",
                )


class Queue(Protocol):
    """The prompts at an instance, in the order in which they are prefilled there."""

    def left(self) -> list[int]:
        """Of each prompt, the tokens that are still to be computed."""
        ...

    def before(self, num_tokens: int) -> list[int]:
        """The same, of those that go before a prompt that comes now."""
        ...

    def overtaking(self, num_tokens: int, now_s: float) -> list[tuple[float, int]]:
        """What goes before such a prompt though it comes later: how many a second, and how many
        tokens one has."""
        ...

    def last_of(self, prompts: list[int]) -> int:
        """Which of several that come now is finished last, by its index."""
        ...


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What waits before a new request.

    Args:
        num_waiting: requests that do not decode yet, in the whole house; among them those whose
            blocks are held until a decode instance has room.
        queue: of the prefill instance that would get it, the running step included.
        times: what prompts take there; None while that is not known.
        num_instances: how many take prompts.
    """

    num_waiting: int
    queue: Queue | None = None
    times: PrefillTimes | None = None
    num_instances: int = 1

    def wait_s(self, prompts: Sequence[int]) -> float | None:
        """Until all that goes before the last of these prompts has been prefilled, but for them."""
        if self.times is None or self.queue is None:
            return None
        last = self.queue.last_of(list(prompts))
        return self.times.queued_s(self.queue.before(prompts[last]))

    def own_s(self, prompts: Sequence[int]) -> float:
        """What these prompts take themselves, until the last of them has its first token."""
        assert self.times is not None
        assert self.queue is not None
        others = list(prompts)
        last = others.pop(self.queue.last_of(others))
        return self.times.queued_s(others) + self.times.alone_s(last)

    def overtaken_s(self, prompts: Sequence[int], until_s: float, now_s: float) -> float:
        """By how much later the first token of the last of them comes than in `until_s`, for the
        sake of those that will overtake it: work that is interrupted by other work takes longer by
        one over the share of the time that is left to it (the delay cycle of priority queues;
        Kleinrock, Queueing Systems II, chapter 3)."""
        assert self.times is not None
        assert self.queue is not None
        overtaking = self.queue.overtaking(max(prompts), now_s)
        load = min(sum(rate * self.times.queued_s([n]) for rate, n in overtaking), MOST_OVERTAKING)
        return until_s * load / (1 - load)

    @property
    def pace_s(self) -> float | None:
        """Between one request that leaves the queue and the next: by the mean of those there, and
        with all instances at work."""
        if self.times is None or self.queue is None:
            return None
        left = self.queue.left()
        return self.times.queued_s(left) / len(left) / max(1, self.num_instances) if left else None


class Turns:
    """When those who were refused are to come again: one after the other, at the pace at which
    there will be room. All at once, all but the first would be refused once more."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def next_in_s(self, now_s: float, *, soonest_s: float, apart_s: float) -> float:
        """In how many seconds: not before `soonest_s`, and `apart_s` after the last turn given."""
        turn_s = max(now_s + soonest_s, self._last_s + apart_s)
        self._last_s = min(turn_s, now_s + LONGEST_WAIT_S)
        return self._last_s - now_s


class Admission:
    """Who may wait: never more than `max_queued` requests; and, where there is a target for the
    time to first token, nobody who would miss it by having to wait.

    A request that nothing waits before is always taken: refusing it would not make it faster, and
    an estimate that has become wrong could otherwise never be corrected. The prompts of one call
    are counted one behind the other, in the order in which they would be prefilled.
    What will come later and go before it is foretold by what came of late.
    """

    def __init__(self, *, max_queued: int, ttft_s: float | None = None) -> None:
        self._max_queued = max_queued
        self._ttft_s = ttft_s
        self._turns = Turns()

    def check(self, prompts: Sequence[int], line: Line, now_s: float) -> None:
        """`prompts`: the tokens of each prompt of a call.

        Raises:
            QueueFull: the house is full, or the target would be missed (SloMissed); with the
                predicted time until it would not be, after those who were refused before.
            InvalidRequest: there are more prompts than may ever wait.
        """
        if len(prompts) > self._max_queued:
            raise InvalidRequest(
                f"{len(prompts)} prompts in one request, at most {self._max_queued} may wait",
                param="prompt",
            )
        num_over = line.num_waiting + len(prompts) - self._max_queued
        if num_over > 0:
            raise QueueFull(
                f"{line.num_waiting} requests are waiting, {len(prompts)} more would pass the "
                f"limit of {self._max_queued}",
                retry_after_s=self._room_in_s(num_over, len(prompts), line, now_s),
            )
        if self._ttft_s is not None:
            self._check_target(prompts, line, self._ttft_s, now_s)

    def _room_in_s(self, num_over: int, num_prompts: int, line: Line, now_s: float) -> float:
        if (pace_s := line.pace_s) is None:
            return UNKNOWN_WAIT_S
        return self._turns.next_in_s(
            now_s, soonest_s=num_over * pace_s, apart_s=num_prompts * pace_s
        )

    def _check_target(
        self, prompts: Sequence[int], line: Line, ttft_s: float, now_s: float
    ) -> None:
        if not (wait_s := line.wait_s(prompts)):
            return
        own_s = line.own_s(prompts)
        wait_s += line.overtaken_s(prompts, wait_s + own_s, now_s)
        late_s = wait_s + own_s - ttft_s
        if late_s > 0:
            raise SloMissed(
                f"the first token would come after {wait_s + own_s:.3g} s, {wait_s:.3g} s of them "
                f"in the queue; the target is {ttft_s:.3g} s",
                retry_after_s=self._turns.next_in_s(
                    now_s, soonest_s=min(wait_s, late_s), apart_s=own_s / max(1, line.num_instances)
                ),
            )
