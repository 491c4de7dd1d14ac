"""Inputs for decoders: noise, valid documents with something wrong in them, and bombs."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

# JSON as clients may send it, whether or not the standard allows it: Python's own writer puts
# out NaN, lone surrogates and integers of any length.
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**64), 10**400]),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=5),
    st.sampled_from(["", "0", "-1", "\x00", "\ud800", "NaN", "null", "text", "a" * 10_000]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(TEXTS, inner, max_size=5)),
    max_leaves=10,
)


def noise() -> st.SearchStrategy[bytes]:
    """Bytes of no meaning, and JSON of any."""
    return st.one_of(st.binary(max_size=300), VALUES.map(dumped), st.sampled_from(BOMBS))


def spoiled(*documents: Any) -> st.SearchStrategy[bytes]:
    """Valid documents (of JSON's types) with a few things changed, then perhaps some bytes."""
    return _changed(documents).flatmap(lambda raw: st.one_of(st.just(raw), spoiled_bytes(raw)))


@st.composite
def spoiled_bytes(draw: st.DrawFn, raw: bytes) -> bytes:
    """Some bytes replaced, inserted or left out, at up to three places."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = draw(st.integers(start, min(start + 8, len(raw))))
        raw = raw[:start] + draw(st.binary(max_size=8)) + raw[stop:]
    return raw


@st.composite
def _changed(draw: st.DrawFn, documents: tuple[Any, ...]) -> bytes:
    document = json.loads(dumped(draw(st.sampled_from(documents))))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        path = draw(st.sampled_from(places))
        change = draw(st.sampled_from([_replace, _remove, _add, _wrap]))
        change(_parent(document, path), path[-1], draw(VALUES))
    return dumped(document)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all values within a document."""
    pairs: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _parent(document: Any, path: Path) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def _replace(parent: Any, key: Any, value: Any) -> None:
    parent[key] = value


def _remove(parent: Any, key: Any, _: Any) -> None:
    del parent[key]


def _add(parent: Any, key: Any, value: Any) -> None:
    if isinstance(parent, list):
        parent.insert(key, value)
    else:
        parent[f"{key}_"] = value


def _wrap(parent: Any, key: Any, _: Any) -> None:
    parent[key] = [parent[key]]


def _nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return opening * depth + b"1" + closing * depth


BOMBS: tuple[bytes, ...] = (
    *(_nested(b"[", b"]", depth) for depth in (30, 500, 1_000, 100_000)),
    *(_nested(b'{"a":', b"}", depth) for depth in (30, 500, 1_000, 100_000)),
    b"[" * 500_000,
    b"9" * 100_000,
    b"-0." + b"1" * 100_000 + b"e-400",
    b'"' + b"\\ud83d" * 10_000 + b'"',
    b'"' + b"a" * 1_000_000 + b'"',
    b"\xff" * 100_000,
)
