"""Fields that exist elsewhere and are not offered here: refused by name unless they change nothing.

A client that asks for tools, a grammar or an image must not get an answer without them. Fields
that nobody here has heard of are ignored.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from daemon.errors import UnsupportedParameter

# Each with the values that change nothing; null is one of them everywhere.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_UNSUPPORTED_IN_MESSAGES = ("tool_calls", "function_call", "audio")
_OF_ANSWERS = ("refusal", "annotations")  # which come back as messages, with nothing in them
_IN_MESSAGES = frozenset(f"messages.{name}" for name in (*_UNSUPPORTED_IN_MESSAGES, *_OF_ANSWERS))
_NO_TEXT = ("image_url", "input_audio", "file")


def refuse_unsupported(
    content: Mapping[str, Any], elsewhere: Mapping[str, tuple[object, ...]]
) -> None:
    """`elsewhere` are the fields that only the other endpoint has, with their neutral values.

    Raises:
        UnsupportedParameter: a field asks for what is not offered.
    """
    for name in _unneutral(content, _NEUTRAL_VALUES):
        raise _unsupported(name)
    for name in _unneutral(content, elsewhere):
        raise UnsupportedParameter(f"'{name}' is no field of this endpoint.", param=name)
    messages = content.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            _refuse_in_message(f"messages[{index}]", message)


def unheard_of(
    content: Mapping[str, Any], body: msgspec.Struct, elsewhere: Collection[str]
) -> list[str]:
    """The fields, by their paths, that are neither read as a part of the body, nor known to the
    other endpoint or to this module."""
    heard_of = (elsewhere, _NEUTRAL_VALUES, _IN_MESSAGES)
    unread = dict.fromkeys(_unread(content, body))  # of many messages each name once
    return [name for name in unread if not any(name in names for names in heard_of)]


def _unread(content: Any, value: object, path: str = "") -> Iterator[str]:
    """What the content has and the value that was made of it has not; with objects in lists."""
    if isinstance(value, msgspec.Struct):
        known = value.__struct_fields__
        for name, inner in content.items():
            if name not in known:
                yield f"{path}{name}"
            elif isinstance(inner, (dict, list)):
                yield from _unread(inner, getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        for inner, item in zip(content, value, strict=True):
            yield from _unread(inner, item, path)


def _unneutral(content: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> list[str]:
    """The fields among these that ask for something, in the order of their names."""
    given = sorted(neutral.keys() & content.keys())
    return [
        name for name in given if content[name] is not None and content[name] not in neutral[name]
    ]


def _refuse_in_message(path: str, message: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED_IN_MESSAGES:
        if message.get(name):
            raise _unsupported(f"{path}.{name}")
    if message.get("role") in ("tool", "function"):
        raise UnsupportedParameter("Messages of tools are not supported.", param=f"{path}.role")
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, dict) and part.get("type") in _NO_TEXT:
            raise UnsupportedParameter(
                "This model reads text only.", param=f"{path}.content[{index}].type"
            )


def _unsupported(name: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"'{name}' is not supported by this service.", param=name)
