"""What a JSON text holds is counted before it is decoded: exactly, wherever strings are cut."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.errors import InvalidJson
from daemon.frontend.json_shape import MAX_DEPTH, MAX_PARTS, MAX_VALUES, SLICE_BYTES, check_shape

TRICKY = st.text(st.sampled_from('\\"[]{},:/ué😀 '))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TRICKY


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_a_text_may_be_nested_so_deep_and_no_deeper(opened: str) -> None:
    closed = "]" if opened == "[" else "}"
    check_shape((opened * MAX_DEPTH + "1" + closed * MAX_DEPTH).encode())
    with pytest.raises(InvalidJson, match="nested deeper than 32"):
        check_shape((opened * (MAX_DEPTH + 1) + "1" + closed * (MAX_DEPTH + 1)).encode())


def test_many_lists_side_by_side_are_not_deep() -> None:
    check_shape(json.dumps([[[]] * 1000] * 10).encode())


def test_a_text_may_hold_so_many_values_and_no_more() -> None:
    check_shape(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")
    with pytest.raises(InvalidJson, match="more than"):
        check_shape(b"[" + b"1," * MAX_VALUES + b"1]")


@pytest.mark.parametrize("part", [b"[]", b"{}"])
def test_a_text_may_hold_so_many_lists_and_objects_and_no_more(part: bytes) -> None:
    check_shape(b"[" + b",".join([part] * (MAX_PARTS - 1)) + b"]")
    with pytest.raises(InvalidJson, match="more than"):
        check_shape(b"[" + b",".join([part] * MAX_PARTS) + b"]")


def test_fields_count_like_lists() -> None:
    with pytest.raises(InvalidJson, match="more than"):
        check_shape(json.dumps({str(i): i for i in range(MAX_PARTS)}).encode())


@pytest.mark.parametrize("mark", ["[", "]", "{", ",", ":", '\\"', "\\\\", '\\\\\\"', "\\u005b"])
def test_what_is_inside_a_string_does_not_count(mark: str) -> None:
    text = b'["' + mark.encode() * MAX_VALUES + b'", "a"]'
    check_shape(text)
    with pytest.raises(InvalidJson):
        check_shape(text[:-1] + b", " + b"[" * 40 + b"]" * 41)


@given(
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TRICKY, inner)),
    st.integers(0, 40),
)
def test_strings_are_told_from_structure_wherever_a_slice_ends(value: object, offset: int) -> None:
    """Pads a text so that the end of the first slice falls on any of its bytes; 33 lists follow."""
    text = json.dumps(value, ensure_ascii=False)
    padding = "." * max(0, SLICE_BYTES - len(text.encode()) + offset - 4)
    check_shape(f'["{padding}",{text},{"[" * 20 + "]" * 20}]'.encode())
    with pytest.raises(InvalidJson, match="nested deeper"):
        check_shape(f'["{padding}",{text},{"[" * 33 + "]" * 33}]'.encode())


@given(st.binary(max_size=200))
def test_what_is_no_json_is_left_to_the_decoder_or_refused(text: bytes) -> None:
    with contextlib.suppress(InvalidJson):
        check_shape(text)
