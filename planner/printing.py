"""How the planner's commands speak: lines as they are written, and reports as JSON."""

import sys
from typing import Any

import msgspec
import orjson
from rich.console import Console


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line, which a terminal may wrap and a file must not; nothing in it is markup."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def print_json(report: Any) -> None:
    """A report's fields on stdout."""
    text = orjson.dumps(msgspec.to_builtins(report), option=orjson.OPT_INDENT_2)
    sys.stdout.write(text.decode() + "\n")
