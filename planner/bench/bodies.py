"""Request bodies: random prompts, each different, so that no prefix cache can help.

Pure: a body depends on the seed and the request's number alone, so a run can be repeated.
"""

from typing import Any

import numpy as np
import orjson

from planner.bench.options import PromptKind, ReplayOptions

# Common words that byte-pair vocabularies hold whole: a text of n of them has about n tokens.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)
_WORDS = _TEXT.split()

# Additions to the API, the most telling first: exact lengths, the five stage times, and the ids of
# each event's tokens. A service gets the first of these that it does not refuse.
ADDITIONS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "return_timing": True, "return_token_ids": True},
    {"ignore_eos": True},
    {},
)


def completion_body(
    options: ReplayOptions, model: str, number: int, num_prompt: int, num_output: int
) -> dict[str, Any]:
    """Body of request `number` in the plain API: `num_output` tokens at most, streamed, greedy."""
    return {
        "model": model,
        "prompt": random_prompt(options, number, num_prompt),
        "max_tokens": num_output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def random_prompt(options: ReplayOptions, number: int, num_tokens: int) -> list[int] | str:
    """The prompt of request `number`: as many tokens, or about as many words."""
    random = np.random.default_rng((options.seed, number))
    if options.prompt is PromptKind.TEXT:
        return " ".join(_WORDS[k] for k in random.integers(len(_WORDS), size=num_tokens))
    token_ids: list[int] = random.integers(*options.token_ids, size=num_tokens).tolist()
    return token_ids


def encode(body: dict[str, Any]) -> bytes:
    """As it is sent."""
    return orjson.dumps(body)
