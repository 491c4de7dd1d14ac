"""What is wrong with a value, in a sentence: msgspec's findings in words for people.

Pure. Names the field by its path and where the value came from is the caller's to say. A finding
that is not known here keeps msgspec's own words, so nothing is lost.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import msgspec

_PATH = re.compile(r" - at `(key in )?\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_TYPE = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`")
_RANGE = re.compile(r"Expected `(?P<kind>[^`]+)` (?P<sign>>=|<=|>|<) (?P<bound>\S+)")
_LENGTH = re.compile(r"Expected `(?P<kind>[^`]+)` of length >= 1")
_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_PATTERN = re.compile(r"Expected `str` matching regex")

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_EXAMPLES = {
    "address": "tcp://10.0.0.1:7400",
    "admin_address": "tcp://127.0.0.1:9471",
    "otlp_endpoint": "http://localhost:4318",
}
_SIGNS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def sentence_of(error: msgspec.ValidationError, kind: Any, path: str = "") -> str:
    """`port: it must be at most 65535`; `kind` is the type that the value at `path` should have."""
    text = str(error)
    inner = ""
    if found := _PATH.search(text):
        text, inner = text[: found.start()], found["path"]
    where = f"{path}{inner}".lstrip(".")
    finding = _finding(text, kind, inner) + (_example(where) if _PATTERN.match(text) else "")
    return f"{where}: {finding}" if where else finding


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, without Python's numbers, codecs and the path once more."""
    match error:
        case OSError(strerror=str(reason)):
            return reason
        case UnicodeDecodeError():
            return "it is no text in UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return str(error)


def unknown(key: str, known: Iterable[str]) -> str:
    """A key that nobody knows, and the one that was perhaps meant."""
    near = difflib.get_close_matches(key, list(known), n=2)
    meant = f"; is {' or '.join(near)} meant?" if near else ""
    return f"there is no key {key[:100]!r}{meant}"


def _finding(text: str, kind: Any, inner: str) -> str:
    if found := _UNKNOWN.fullmatch(text):
        return unknown(found["field"], _fields(kind, inner))
    if found := _MISSING.fullmatch(text):
        return f"it needs the key {found['field']}"
    if found := _TYPE.fullmatch(text):
        return f"it must be {_named(found['wanted'])}, not {_named(found['got'])}"
    if found := _RANGE.fullmatch(text):
        return f"it must be {_SIGNS[found['sign']]} {found['bound']}"
    if _LENGTH.fullmatch(text):
        return "it must not be empty"
    if found := _CHOICE.fullmatch(text):
        return _choice(found["value"], kind, inner)
    if _PATTERN.match(text):
        return "it does not look like one"
    return text


def _example(where: str) -> str:
    """Of a field with a pattern, which nobody could read."""
    name = re.split(r"[^a-z_]", where.replace("-", "_"))[-1].lstrip("_")
    return f", such as {_EXAMPLES[name]}" if name in _EXAMPLES else ""


def _named(types: str) -> str:
    """`int | null`: a key that is absent is null, and nobody writes one."""
    names = [name for name in types.split(" | ") if name != "null"] or ["null"]
    return " or ".join(_TYPES.get(name, name) for name in names)


def _choice(value: str, kind: Any, inner: str) -> str:
    choices = [] if inner else _choices(kind)
    told = f"; there are: {', '.join(choices)}" if choices else ""
    return f"{value[:100]} is none of its values{told}"


def _choices(kind: Any) -> list[str]:
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.EnumType(cls=cls):
            return [str(member.value) for member in cls]
        case msgspec.inspect.LiteralType(values=values):
            return [str(value) for value in values]
        case _:
            return []


def _fields(kind: Any, inner: str) -> Iterable[str]:
    """Of the struct itself; what lies deeper has too few fields for a guess."""
    return getattr(kind, "__struct_fields__", ()) if not inner else ()
