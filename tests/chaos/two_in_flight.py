"""A rig with two steps under way at a time, launched and collected in an order that dice decide."""

import random
from collections import deque
from typing import Any

from tests.gpu_workers.rig import Rig

IN_FLIGHT = 2


class TwoInFlight(Rig):
    """Its scheduler must allow them."""

    def __init__(self, *given: Any, dice: random.Random, **named: Any) -> None:
        super().__init__(*given, **named)
        self._dice = dice
        self._under_way: deque[Any] = deque()

    def step(self) -> bool:
        acts = [self._launch, self._collect]
        self._dice.shuffle(acts)
        has_acted = any(act() for act in acts)
        for pull in self.exchange.finished():
            self.scheduler.pulled(pull)
            has_acted = True
        self.check()
        return has_acted

    @property
    def is_all_free(self) -> bool:
        while self.step():
            pass
        return super().is_all_free

    def _launch(self) -> bool:
        if len(self._under_way) == IN_FLIGHT or (plan := self.scheduler.plan()) is None:
            return False
        self.now_s += 1.0
        self._under_way.append(self.executor.launch(plan))
        self.scheduler.launched(plan, self.now_s)
        return True

    def _collect(self) -> bool:
        if not self._under_way:
            return False
        result = self.executor.collect(self._under_way.popleft())
        self.scheduler.collect(result, started_s=self.now_s, ended_s=self.now_s + 0.5)
        return True
