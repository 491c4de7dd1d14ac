"""Whether a call is let in: it can be served at all, and it does not have to wait too long.

Joins the rules of `admission` with the mirror of the instances, and learns from the steps that
they report how long prompts take.
"""

import logging
from collections.abc import Sequence

import msgspec

from daemon.admission import UNKNOWN_WAIT_S, Admission, Capacity, Line
from daemon.errors import NotReady
from daemon.generation import GenerationSpec
from daemon.instances import Instance, InstanceTable
from daemon.prefill_times import PrefillBook
from ipc.messages import Chunked, Prefilled
from ipc.profile_table import ProfileTable

logger = logging.getLogger(__name__)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Within how many seconds everybody who is let in is to get the first token; and a table of
    prefill times, if one was measured."""

    ttft_s: float
    table: ProfileTable | None = None


class Door:
    """See the module's docstring. Without a `target` only the number of those who wait counts."""

    def __init__(
        self, capacity: Capacity, *, max_queued: int, target: Target | None = None
    ) -> None:
        self.capacity = capacity
        self._admission = Admission(
            max_queued=max_queued, ttft_s=None if target is None else target.ttft_s
        )
        self._book = PrefillBook(None if target is None else target.table)

    def learn(self, instance: Instance) -> None:
        """It has come up: what does not fit its pool is refused from now on, and people are told
        where that is less than what the model could take."""
        before = self.capacity.max_tokens
        self.capacity.learn(instance.name, instance.layout)
        if (now := self.capacity.max_tokens) < before:
            logger.warning(
                "the KV pool of %s holds %d tokens: requests of more, prompt and answer together, "
                "are refused, though %d could be served",
                instance.name,
                now,
                before,
            )

    def check(
        self,
        specs: Sequence[GenerationSpec],
        instances: InstanceTable,
        *,
        num_waiting: int,
        now_s: float,
    ) -> None:
        """`num_waiting`: requests that do not decode yet.

        Raises:
            ServeError: nobody can serve it, or it would not fit, or would have to wait too long.
        """
        if not instances.can_take:
            raise NotReady("no prefill and decode instances are ready to serve")
        for spec in specs:
            self.capacity.check(spec)
        longest = max(len(spec.prompt) + spec.sampling.max_tokens for spec in specs)
        line = self.line(instances, num_waiting, longest)
        self._admission.check([len(spec.prompt) for spec in specs], line, now_s)

    def line(self, instances: InstanceTable, num_waiting: int, num_tokens: int) -> Line:
        """What a sequence that may become so long would find before it."""
        best = instances.best_prefill(num_tokens)
        if best is None:
            return Line(num_waiting=num_waiting)
        return Line(
            num_waiting=num_waiting,
            queue=best.queued,
            times=self._book.of(best.name, best.spec.parallelism),
            num_instances=sum(instance.takes_prompts for instance in instances),
        )

    def wait_s(self, instances: InstanceTable, num_tokens: int, num_prompt: int) -> float:
        """How long a sequence that may become so long would wait for its prefill if it came now."""
        return self.line(instances, 0, num_tokens).wait_s([num_prompt]) or UNKNOWN_WAIT_S

    def chunked(self, instance: Instance, event: Chunked) -> None:
        """A part of a prompt has been computed there."""
        instance.queued.advance(event.request_id, event.num_tokens)
        self._saw(instance, event, event.num_tokens)

    def prefilled(self, instance: Instance, event: Prefilled) -> None:
        """The rest of a prompt has been computed there; of some it is the whole."""
        if (num_tokens := instance.queued.finish(event.request_id)) is not None:
            self._saw(instance, event, num_tokens)

    def _saw(self, instance: Instance, event: Prefilled | Chunked, num_tokens: int) -> None:
        self._book.steps_of(instance.name, instance.spec.parallelism).saw(
            num_tokens, event.started_s, event.ended_s, has_more=len(instance.queued) > 0
        )
