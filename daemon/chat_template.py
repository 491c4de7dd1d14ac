"""Render a chat to the prompt that the model was trained on, by the template in its directory.

Templates come with the model and are run in jinja's sandbox, with the same names in scope as
transformers gives them. What a template refuses is the client's mistake, not ours.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daemon.config_errors import reason_of, sentence_of
from daemon.errors import ConfigError, InvalidRequest
from daemon.tokenizer_files import named_tokens, read_json

# What a template may end in that meets messages or variables it was not written for.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
)


class _Named(msgspec.Struct):
    """One of several in `tokenizer_config.json`."""

    name: str
    template: str


class ChatTemplate:
    """One model's chat format."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables` are the special tokens by name (`bos_token`, ...).

        Raises:
            ConfigError: the source is no jinja template.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from error
        self._variables = dict(variables or {})

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate | None":
        """The template of a model directory, or None for a model that has none.

        Raises:
            ConfigError: it has one that cannot be read.
        """
        source = _find_source(directory)
        return None if source is None else cls(source, named_tokens(directory))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a chat; `extra` are further variables that templates may know.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        scope = {"tools": None, "documents": None, **(extra or {}), **self._variables}
        scope |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(scope)
        except _REFUSALS as error:
            reason = str(error)[:200]
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {reason}", param="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _find_source(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {reason_of(error)}") from error
    settings = directory / "tokenizer_config.json"
    found = read_json(settings).get("chat_template")
    if isinstance(found, list):
        return _default_of(_named(found, settings))
    return found if isinstance(found, str) else None


def _named(templates: list[Any], file: Path) -> dict[str, str]:
    try:
        return {entry.name: entry.template for entry in msgspec.convert(templates, list[_Named])}
    except msgspec.ValidationError as error:
        where = sentence_of(error, list[_Named], "chat_template")
        raise ConfigError(f"{file}: {where}") from error


def _default_of(templates: Mapping[str, str]) -> str | None:
    """Of several named templates the one called default, else the first."""
    return templates.get("default", next(iter(templates.values()), None))
