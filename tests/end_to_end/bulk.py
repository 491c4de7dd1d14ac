"""Many requests to a service, one after the other or all at once, and what each must answer."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec

from tests.end_to_end.service import Service, serving, shapes

MAX_PROMPT, MAX_TOKENS = 120, 12
FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02")


class Ask(msgspec.Struct, frozen=True):
    """A prompt, and how much is to come back."""

    prompt: list[int]
    max_tokens: int

    def by(self, client: httpx.Client) -> object:
        """The greedy answer, token by token."""
        body = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"]


def asks(count: int, seed: int = 0) -> list[Ask]:
    """Of all lengths; no two alike."""
    dice = random.Random(seed)
    return [
        Ask(
            [dice.randrange(256) for _ in range(dice.randint(1, MAX_PROMPT))],
            dice.randint(1, MAX_TOKENS),
        )
        for _ in range(count)
    ]


def one_by_one(service: Service, asked: Sequence[Ask]) -> list[object]:
    with service.client() as client:
        return [ask.by(client) for ask in asked]


def at_once(service: Service, asked: Sequence[Ask]) -> list[object]:
    limits = httpx.Limits(max_connections=len(asked))
    with (
        httpx.Client(base_url=service.url, timeout=120.0, limits=limits) as client,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        return list(threads.map(lambda ask: ask.by(client), asked))


@contextmanager
def two_prefills_one_decode(model: Path) -> Iterator[Service]:
    """Two prefill instances of tp 2, one decode instance of pp 2; every pull is verified."""
    divided = shapes(prefill=(2, 1), decode=(1, 2))
    flags = (*FLAGS, "--prefill", "2", "--decode", "1", *divided)
    with serving(model, *flags, DISTSERVE_VERIFY_PULLS="1") as service:
        yield service
