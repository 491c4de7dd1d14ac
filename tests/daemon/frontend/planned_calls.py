"""Bodies on their way to a `Call`, without a server."""

import json
from pathlib import Path
from typing import Any

from daemon.chat_template import ChatTemplate
from daemon.errors import PromptTooLong
from daemon.frontend.calls import Call, plan_chat, plan_completion
from daemon.frontend.schema import ChatBody, CompletionBody, read_body
from daemon.frontend.served_model import ServedModel
from daemon.generation import GenerationSpec
from tests.daemon.frontend.http_service import TEMPLATE
from tests.daemon.small_tokenizers import load

USER = {"role": "user", "content": "hello"}


def served(directory: Path, template: str | None = TEMPLATE) -> ServedModel:
    return ServedModel(
        id="tiny",
        tokenizer=load(directory),
        chat_template=None if template is None else ChatTemplate(template),
        max_context=256,
        created=0,
    )


def max_output(num_prompt: int) -> int:
    if num_prompt >= 256:
        raise PromptTooLong(num_prompt=num_prompt, num_output=1, limit=256)
    return 256 - num_prompt


async def completion(model: ServedModel, /, **fields: Any) -> Call:
    body = read_body(json.dumps({"prompt": "hello"} | fields).encode(), CompletionBody)
    return await plan_completion(body, model, max_output)


async def chat(model: ServedModel, /, **fields: Any) -> Call:
    body = read_body(json.dumps({"messages": [USER]} | fields).encode(), ChatBody)
    return await plan_chat(body, model, max_output)


async def spec_of(model: ServedModel, /, **fields: Any) -> GenerationSpec:
    return (await completion(model, **fields)).specs[0]
