"""A mixed instance over several ranks, and clients who come, go and are sent back to the queue.

The real scheduler, as many steps under way as the engine takes; a seed says who comes when, and
whether the leader launches or collects next. What every choice should get is what one CPU draws
for it alone.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc.messages import Abort, MixedPolicy, Preempted, Prefill, Prefilled, Tokens
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import PrefillPolicy, Role, SamplingParams
from tests.gpu_workers.driving import Driver, greedy
from tests.gpu_workers.rig import BLOCK_SIZE
from tests.gpu_workers.scripted_engine import ScriptedExchange
from tests.gpu_workers.test_steps_ahead import Ahead

MAX_BATCH = 6
WORDS = b"Hark hark, the lark at heaven's gate sings, and Phoebus gins arise"


@dataclass
class Choice:
    """What one choice of a request wants, and what it got."""

    seq_id: int
    choice: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    drawn: list[int] = field(default_factory=list)
    is_aborted: bool = False
    is_over: bool = False

    def is_right(self, cpu: Driver) -> bool:
        """Whether it got what one CPU draws for it, to the end unless it left before."""
        expected = self._alone(cpu)
        return self.drawn == (expected[: len(self.drawn)] if self.is_aborted else expected)

    def _alone(self, cpu: Driver) -> list[int]:
        sequence = cpu.add(self.prompt, self.sampling, choices=(self.choice,))
        drawn = [*cpu.prefill(sequence, len(self.prompt)).token_ids]
        ends = self.sampling.end_token_ids
        while len(drawn) < self.sampling.max_tokens and drawn[-1] not in ends:
            drawn += cpu.step((sequence, 1, True))[sequence].token_ids
        cpu.remove(sequence)
        return drawn


class ParallelRig(Ahead):
    """`Ahead` over the ranks of an instance."""

    def __init__(
        self,
        ranks: Any,
        *,
        num_blocks: int = 200,
        chunk_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(num_blocks=num_blocks, engine=(ranks, ScriptedExchange()))
        self.max_in_flight = ranks.shape.pp * ranks.max_in_flight
        self.scheduler = Scheduler(
            Owner(self.name, self.epoch),
            Role.MIXED,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(24, MAX_BATCH, PrefillPolicy.FCFS),
            parallelism=ranks.shape,
            max_in_flight=ranks.max_in_flight,
        )
        self.dice = random.Random(seed)
        self.choices: dict[int, Choice] = {}
        self.num_deepest = 0
        self._commands: dict[int, Prefill] = {}
        self._num_seen = 0

    def ask(self, number: int, sampling: SamplingParams, num_choices: int = 1) -> None:
        """Somebody asks, with a prompt of the seed's choosing."""
        prompt = tuple(WORDS[: self.dice.randint(1, 30)]) + tuple(WORDS[number : number + 3])
        seq_ids = tuple(1000 * number + choice for choice in range(num_choices))
        for choice, seq_id in enumerate(seq_ids):
            self.choices[seq_id] = Choice(seq_id, choice, prompt, sampling)
        self._tell(
            Prefill(number, number, seq_ids, tuple(range(num_choices)), prompt, (), sampling)
        )

    def abort(self, number: int) -> None:
        """The client of a request leaves; so do those who came back to the queue for it."""
        for choice in self.choices.values():
            choice.is_aborted |= choice.seq_id // 1000 == number
        for command in list(self._commands.values()):
            if command.seq_ids[0] // 1000 == number:
                self.tell(Abort(command.request_id, command.seq_ids))

    def launch(self) -> bool:
        has_ended = not self.under_way
        if not super().launch():
            return False
        if has_ended:
            self.executor.check_tables()
        return True

    def act(self) -> bool:
        """Launch or collect, as the dice say; False when there is nothing to do."""
        can_launch = self.num_busy < self.max_in_flight
        acted = can_launch and self.dice.random() < 0.7 and self.launch()
        self.num_deepest = max(self.num_deepest, self.num_busy)
        if not acted and self.under_way:
            self.collect()
            acted = True
        self._hear()
        return acted or (can_launch and self.launch())

    def finish(self) -> None:
        while self.act():
            pass
        assert all(c.is_over or c.is_aborted for c in self.choices.values())

    def _tell(self, command: Prefill) -> None:
        self._commands[command.request_id] = command
        self.tell(command)

    def _hear(self) -> None:
        self.events += self.take_events()
        for event in self.events[self._num_seen :]:
            match event:
                case Prefilled():
                    self._hear_first(event)
                case Tokens(_, rows):
                    for row in rows:
                        self.choices[row.seq_id].drawn += row.token_ids
                        self.choices[row.seq_id].is_over = row.finished is not None
                case Preempted(seq_id):
                    self._send_back(self.choices[seq_id])
                case _:
                    pass
        self._num_seen = len(self.events)

    def _hear_first(self, event: Prefilled) -> None:
        command = self._commands[event.request_id]
        for seq_id, token, reason in zip(
            command.seq_ids, event.token_ids, event.finished, strict=True
        ):
            self.choices[seq_id].drawn.append(token)
            self.choices[seq_id].is_over = reason is not None

    def _send_back(self, choice: Choice) -> None:
        """As the daemon does with who had to make room."""
        if choice.is_aborted:
            return
        number = 1 + max(self._commands)
        first = choice.seq_id // 1000
        command = Prefill(
            request_id=max(number, 100),
            arrival=first,
            seq_ids=(choice.seq_id,),
            choices=(choice.choice,),
            prompt=choice.prompt,
            output=tuple(choice.drawn),
            sampling=choice.sampling,
        )
        self._tell(command)


def kinds_of(dice: random.Random, end_token_ids: tuple[int, ...]) -> list[SamplingParams]:
    """Ways to draw, of lengths of the dice's choosing."""

    def some(**changes: object) -> SamplingParams:
        return greedy(max_tokens=dice.randint(1, 16), **changes)

    return [
        some(),
        some(end_token_ids=end_token_ids),
        some(temperature=0.9, seed=dice.randrange(99), top_p=0.9),
        some(temperature=1.1, seed=dice.randrange(99), top_k=20, end_token_ids=end_token_ids),
        some(repetition_penalty=1.3),
        some(temperature=0.7, seed=dice.randrange(99), presence_penalty=0.5),
        some(logprobs=2),
    ]


def run_crowd(rig: ParallelRig, num_requests: int) -> None:
    """So many requests at moments of the dice's choosing; some leave."""
    # The tokens that some texts draw now and then: those choices end before their time.
    ends = tuple(rig.dice.sample(range(260), 60))
    waiting = list(range(1, num_requests + 1))
    while waiting:
        if rig.dice.random() < 0.5:
            number = waiting.pop(0)
            kind = rig.dice.choice(kinds_of(rig.dice, ends))
            rig.ask(number, kind, rig.dice.choice((1, 1, 1, 2, 3)))
            if rig.dice.random() < 0.15:
                rig.abort(rig.dice.randint(1, number))
        rig.act()
    rig.finish()
