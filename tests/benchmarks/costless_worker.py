"""Workers that compute nothing: they answer every prefill at once, or one after the other at a
pace, and then emit one token per running choice on a clock. What a benchmark measures behind them
is the daemon alone.

As many instances as asked for, in one process, their steps spread evenly over the clock, as those
of independent instances are. Tokens of step k are the letter k % 26, so that a client can tell
when each was made. At the end the times of all steps, of one instance after the other, are
written as JSON lists to the file given.
"""

import os
import sys
import threading
import time
from collections import deque
from pathlib import Path

import orjson

from ipc.kv_layout import RankLayout, Span
from ipc.messages import (
    Abort,
    Command,
    Exit,
    Gone,
    Hello,
    Prefill,
    Prefilled,
    Ready,
    TokenRow,
    Tokens,
)
from ipc.sockets import WorkerSocket
from ipc.vocabulary import DType, FinishReason, WorkerName

EPOCH = 1
LAYOUT = RankLayout(Span(0, 1), Span(0, 1), 1 << 20, 32, 64, DType.BF16)
FIRST_LETTER = ord("a")
POLL_S = 0.001


class CostlessWorker:
    """See the module's docstring. `step_s` 0 emits as fast as it can; a prompt takes `prefill_s`
    of its instance's time."""

    def __init__(
        self, endpoint: str, number: int, step_s: float, offset_s: float, prefill_s: float = 0.0
    ) -> None:
        self._name = WorkerName(f"mixed-{number}")
        self._link = WorkerSocket(endpoint, self._name, EPOCH)
        self._step_s = step_s
        self._offset_s = offset_s
        self._prefill_s = prefill_s
        self._prompts: deque[tuple[float, Prefill]] = deque()  # when they are done
        self._left: dict[int, int] = {}
        self.step_times: list[float] = []

    def run(self) -> None:
        self._link.send(Hello(self._name, os.getpid()))
        self._link.send(Ready(LAYOUT, "costless", 0.0))
        next_s = 0.0
        while True:
            was_idle = not self._left
            due = [] if was_idle else [next_s]
            due += [self._prompts[0][0]] if self._prompts else []
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            if wait_s is not None and 0 < wait_s < POLL_S:
                # Shorter than a poll can wait: looking again and again would keep the other
                # instances' threads from the interpreter.
                time.sleep(wait_s)
                wait_s = 0.0
            for command in self._link.receive(wait_s):
                if isinstance(command, Exit):
                    return
                self._handle(command)
            self._prefill()
            if was_idle:
                next_s = self._next_tick_s()
            if self._left and time.monotonic() >= next_s:
                self._step()
                next_s = max(next_s + self._step_s, time.monotonic())

    def _next_tick_s(self) -> float:
        """The clock ticks alike for all instances, each at its own offset."""
        now_s = time.monotonic()
        if not self._step_s:
            return now_s
        return self._offset_s + ((now_s - self._offset_s) // self._step_s + 1) * self._step_s

    def _handle(self, command: Command) -> None:
        now_s = time.monotonic()
        if isinstance(command, Prefill):
            begun_s = max(now_s, self._prompts[-1][0]) if self._prompts else now_s
            self._prompts.append((begun_s + self._prefill_s, command))
        elif isinstance(command, Abort):
            left = [p for p in self._prompts if p[1].request_id != command.request_id]
            self._prompts = deque(left)
            for seq_id in command.seq_ids:
                self._left.pop(seq_id, None)
            self._link.send(Gone(command.request_id, command.seq_ids))

    def _prefill(self) -> None:
        """Answer all prompts that are done."""
        while self._prompts and self._prompts[0][0] <= time.monotonic():
            ended_s, command = self._prompts.popleft()
            for seq_id in command.seq_ids:
                self._left[seq_id] = command.sampling.max_tokens - 1
            tokens = tuple(FIRST_LETTER for _ in command.seq_ids)
            nothing = tuple(None for _ in command.seq_ids)
            started_s = ended_s - self._prefill_s
            self._link.send(
                Prefilled(command.request_id, tokens, nothing, None, started_s, ended_s)
            )

    def _step(self) -> None:
        now_s = time.monotonic()
        token = FIRST_LETTER + len(self.step_times) % 26
        self.step_times.append(now_s)
        rows = []
        for seq_id, left in list(self._left.items()):
            self._left[seq_id] = left - 1
            finished = FinishReason.LENGTH if left == 1 else None
            rows.append(TokenRow(seq_id, (token,), finished))
            if finished:
                del self._left[seq_id]
        self._link.send(Tokens(now_s, tuple(rows)))


def main(
    endpoint: str, num_workers: str, step_s: str, times_file: str, prefill_s: str = "0"
) -> None:
    sys.setswitchinterval(0.0002)
    started_s, step = time.monotonic(), float(step_s)
    workers = [
        CostlessWorker(
            endpoint, number, step, started_s + step * number / int(num_workers), float(prefill_s)
        )
        for number in range(int(num_workers))
    ]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Path(times_file).write_bytes(orjson.dumps([worker.step_times for worker in workers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
