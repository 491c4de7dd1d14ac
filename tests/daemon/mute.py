"""A real controller of instances that take everything and say only what a test makes them say."""

import asyncio
from collections.abc import Callable

from daemon.admission import Capacity
from daemon.client_call import ClientCall
from daemon.controller import Controller, LeaderEvent
from daemon.deadlines import TimeLimits
from daemon.door import Door, Target
from daemon.errors import ServeError
from daemon.generation import GenerationSpec
from daemon.instances import Instance
from daemon.metrics import Metrics
from daemon.text import Tokenizer
from ipc.kv_layout import RankLayout, Span
from ipc.messages import (
    Abort,
    Begun,
    Chunked,
    Command,
    Decode,
    Prefill,
    Prefilled,
    Pulled,
    TokenRow,
    Tokens,
)
from ipc.prefill_policy import BatchLimits, FirstComeFirstServed, prefill_queue
from ipc.vocabulary import DType, FinishReason, KVHandle, PrefillPolicy, Role, SamplingParams
from tests.daemon.metric_samples import spec_of

LAYOUT = RankLayout(Span(0, 1), Span(0, 1), 10_000, 4, 1, DType.FP32)
EPOCH = 1
PREFILL_TOKENS = 100


class MuteHouse:
    """Instances p0 and d0 (or as told), a clock that is set by hand, and what was sent to whom."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_queued: int = 1000,
        max_context: int = 10_000,
        target: Target | None = None,
        time_limits: TimeLimits | None = None,
        clock: Callable[[], float] | None = None,
        policy: PrefillPolicy = PrefillPolicy.FCFS,
    ) -> None:
        self.now_s = 0.0
        self._limits = BatchLimits(PREFILL_TOKENS, 256, policy)
        self.metrics = Metrics("mute")
        self.controller = Controller(
            tokenizer,
            self.metrics,
            Door(Capacity(max_context), max_queued=max_queued, target=target),
            time_limits=time_limits,
            clock=clock or (lambda: self.now_s),
        )
        self.sent: dict[str, list[Command]] = {}
        self.has_sent = asyncio.Event()
        self.up("p0", Role.PREFILL)
        self.up("d0", Role.DECODE)

    def up(self, name: str, role: Role) -> None:
        mail = self.sent.setdefault(name, [])

        def send(command: Command) -> None:
            mail.append(command)
            self.has_sent.set()

        policy: FirstComeFirstServed[int] = prefill_queue(self._limits)
        self.controller.instance_up(Instance(spec_of(name, role), EPOCH, LAYOUT, send, policy))

    def down(self, name: str) -> None:
        self.controller.instance_down(name, EPOCH, "killed by SIGKILL")

    def ask(self, num_prompt: int, max_tokens: int = 8) -> ClientCall:
        sampling = SamplingParams(max_tokens=max_tokens, seed=1)
        return self.controller.submit(
            [GenerationSpec(prompt=(65,) * num_prompt, sampling=sampling)]
        )

    def hears(self, name: str, event: LeaderEvent) -> None:
        self.controller.on_event(name, EPOCH, event)

    def prefills(self) -> list[Prefill]:
        return [command for command in self.sent["p0"] if isinstance(command, Prefill)]

    def begun(self, *commands: Prefill) -> None:
        """p0 launches a step with these prompts."""
        self.hears("p0", Begun(tuple(command.request_id for command in commands)))

    def prefilled(self, command: Prefill, started_s: float, ended_s: float) -> None:
        """p0 has prefilled a prompt and holds its blocks."""
        self.begun(command)
        handle = KVHandle("p0", EPOCH, command.request_id, (0,), len(command.prompt))
        event = Prefilled(command.request_id, (65,), (None,), handle, started_s, ended_s)
        self.hears("p0", event)

    def chunked(self, command: Prefill, num_tokens: int, started_s: float, ended_s: float) -> None:
        """p0 has computed a part of a prompt."""
        self.hears("p0", Chunked(command.request_id, num_tokens, started_s, ended_s))

    def pulled(self, command: Decode) -> None:
        self.hears("d0", Pulled(command.request_id, 1, 0.0, 0.0))

    def token(self, command: Decode, finished: FinishReason | None = None) -> None:
        row = TokenRow(command.sequences[0].seq_id, (65,), finished)
        self.hears("d0", Tokens(0.0, (row,)))

    def decodes(self) -> list[Decode]:
        return [command for command in self.sent["d0"] if isinstance(command, Decode)]

    def aborted(self, name: str) -> list[int]:
        return [command.request_id for command in self.sent[name] if isinstance(command, Abort)]

    def wait_until(self, now_s: float) -> None:
        self.now_s = now_s
        self.controller.timekeeper.look()


def error_of(call: ClientCall) -> ServeError | None:
    """What a call's stream has ended by, if anything."""
    return call._stream._error
