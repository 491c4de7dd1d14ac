"""Real requests of all kinds, and what each must answer: the same whatever happens.

Only prompts without near-ties are asked: where transformers' logits, shifted at random by far more
than fp32 rounds, would have drawn another token, the prompt is left out.
"""

import json
import random
import time
from enum import StrEnum, auto
from typing import Any

import httpx
import msgspec
import torch

from gpu_workers.sampler import Draw, draw_tokens
from ipc.vocabulary import SamplingParams
from tests.end_to_end.reference import Reference
from tests.end_to_end.service import Service
from tests.gpu_workers.checkpoints import NUM_TOKEN_IDS

MAX_PROMPT, MAX_TOKENS = 100, 40
NOISE = 1e-3
NUM_SHIFTS = 4
DOOR_S = 150.0  # so long a refusal at the door is tried again

Answer = tuple[tuple[str, str, tuple[int, ...]], ...]
"""By choice: text, finish reason, tokens."""


class Ending(StrEnum):
    """How a call ended. A call has exactly one."""

    ANSWERED = auto()
    LEFT = auto()  # by the client
    ERROR = auto()  # told by the service
    CUT = auto()  # the connection broke in the middle
    REFUSED = auto()  # nobody was there to take it


class Outcome(msgspec.Struct, frozen=True):
    ending: Ending
    answer: Answer | None
    seconds: float
    told: str = ""


class Ask(msgspec.Struct, frozen=True):
    """One call to /v1/completions; `leaves_after` so many chunks of a stream the client is gone."""

    prompt: list[int]
    sampling: SamplingParams
    num_choices: int
    stop: list[str]
    streams: bool
    leaves_after: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        how = msgspec.to_builtins(self.sampling)
        fields = ("max_tokens", "seed", "temperature", "top_p", "presence_penalty")
        return {field: how[field] for field in fields} | {
            "prompt": self.prompt,
            "n": self.num_choices,
            "stop": self.stop,
            "stream": self.streams,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def by(self, client: httpx.Client) -> Outcome:
        """Ask until the door is open; what became of it then."""
        began_s = time.monotonic()
        while True:
            try:
                outcome = self._once(client, began_s)
            except httpx.TransportError as error:
                return Outcome(Ending.REFUSED, None, time.monotonic() - began_s, repr(error))
            if outcome is not None:
                return outcome
            assert time.monotonic() < began_s + DOOR_S, "the service takes nothing any more"
            time.sleep(0.1)  # it said Retry-After

    def _once(self, client: httpx.Client, began_s: float) -> Outcome | None:
        with client.stream("POST", "/v1/completions", json=self.body) as response:
            if response.status_code in (429, 503):
                return None
            try:
                if self.streams and response.status_code == 200:
                    return self._read_stream(response, began_s)
                content = json.loads(response.read())
            except httpx.TransportError as error:
                return Outcome(Ending.CUT, None, time.monotonic() - began_s, repr(error))
        seconds = time.monotonic() - began_s
        if response.status_code != 200:
            return Outcome(Ending.ERROR, None, seconds, str(content["error"]))
        choices = sorted(content["choices"], key=lambda choice: choice["index"])
        answer = tuple(
            (choice["text"], choice["finish_reason"], tuple(choice["token_ids"]))
            for choice in choices
        )
        return Outcome(Ending.ANSWERED, answer, seconds)

    def _read_stream(self, response: httpx.Response, began_s: float) -> Outcome:
        parts: list[list[Any]] = [["", None, []] for _ in range(self.num_choices)]
        error = ""
        for count, line in enumerate(filter(None, response.iter_lines())):
            if self.leaves_after is not None and count >= self.leaves_after:
                return Outcome(Ending.LEFT, None, time.monotonic() - began_s)
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                assert not error, "two errors in one stream"
                error = str(chunk["error"])
                continue
            for choice in chunk["choices"]:
                part = parts[choice["index"]]
                assert part[1] is None, "a choice went on after its end"
                part[0] += choice["text"]
                part[1] = choice["finish_reason"]
                part[2] += choice["token_ids"]
        else:
            raise AssertionError("a stream ended without [DONE]")
        seconds = time.monotonic() - began_s
        if error:
            return Outcome(Ending.ERROR, None, seconds, error)
        return Outcome(Ending.ANSWERED, tuple((t, r, tuple(i)) for t, r, i in parts), seconds)


def random_ask(dice: random.Random, max_tokens: int = MAX_TOKENS) -> Ask:
    sampling = SamplingParams(
        max_tokens=dice.randint(1, max_tokens),
        seed=dice.randrange(1 << 40),
        temperature=dice.choice((0.0, 0.0, 0.8)),
        top_p=dice.choice((1.0, 0.9)),
        presence_penalty=dice.choice((0.0, 0.5)),
    )
    return Ask(
        prompt=[dice.randrange(256) for _ in range(dice.randint(1, MAX_PROMPT))],
        sampling=sampling,
        num_choices=dice.choice((1, 1, 2, 3)),
        stop=dice.choice(([], [], [chr(dice.randrange(97, 123))])),
        streams=dice.random() < 0.7,
    )


def known_asks(
    service: Service,
    reference: Reference,
    count: int,
    seed: int,
    *,
    noise: float = NOISE,
    max_tokens: int = MAX_TOKENS,
) -> list[tuple[Ask, Answer]]:
    """With the answers of a service that nothing has happened to yet.

    `noise` is more than its logits may be off by.
    """
    dice = random.Random(seed)
    known: list[tuple[Ask, Answer]] = []
    with service.client() as client:
        while len(known) < count:
            ask = random_ask(dice, max_tokens)
            outcome = ask.by(client)
            assert outcome.answer is not None, outcome
            if is_decided(reference, ask, outcome.answer, noise):
                known.append((ask, outcome.answer))
    return known


def is_decided(reference: Reference, ask: Ask, answer: Answer, noise: float = NOISE) -> bool:
    """Whether every token leads so clearly that no rounding could draw another."""
    outputs = [list(token_ids) for _, _, token_ids in answer]
    rows = [ask.prompt + output for output in outputs]
    longest = max(map(len, rows))
    with torch.inference_mode():
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = reference.model(padded).logits
    generator = torch.Generator().manual_seed(0)
    for choice, output in enumerate(outputs):
        first = len(ask.prompt) - 1
        due = logits[choice, first : first + len(output)]
        tokens = rows[choice]
        draws = [
            Draw(i, ask.sampling, choice, tokens[: first + 1 + i], len(ask.prompt))
            for i in range(len(output))
        ]
        for _ in range(NUM_SHIFTS):
            shifted = due + noise * torch.randn(due.shape, generator=generator)
            if [d.token_id for d in draw_tokens(shifted, draws, NUM_TOKEN_IDS)] != output:
                return False
    return True
