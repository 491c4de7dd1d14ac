"""Text that comes in pieces against the whole text, over pieces that nobody would choose."""

from collections.abc import Sequence
from itertools import pairwise
from typing import AnyStr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.stop_strings import StopMatcher
from daemon.text import ChoiceText, Tokenizer
from tests.daemon.small_tokenizers import byte_level_directory, load
from tests.daemon.token_streams import byte_ids

# Few letters, so that they meet often; of one to four bytes, so that tokens end amid them.
LETTERS = "ab🎉"
TEXTS = st.lists(st.sampled_from([*LETTERS, "aab", "ba🎉a", "é世"]), max_size=16).map("".join)
STOPS = st.lists(
    st.one_of(st.text(LETTERS, min_size=1, max_size=4), st.sampled_from(["aaba", "ba🎉ab", "世é"])),
    min_size=1,
    max_size=4,
).map(tuple)
CUTS = st.lists(st.integers(0, 32), min_size=1, max_size=16)
BROKEN = st.one_of(
    st.binary(max_size=24),
    st.lists(
        st.sampled_from([*"aé世🎉".encode(), 0xC3, 0xE4, 0xB8, 0xF0, 0x9F, 0xFF, 0x80]), max_size=24
    ).map(bytes),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


def pieces(whole: AnyStr, cuts: Sequence[int]) -> list[AnyStr]:
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


def cut_by_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """By definition: the match that is complete first counts, the longest of those that end
    there; the text goes up to it."""
    for end in range(1, len(text) + 1):
        hits = [len(string) for string in stop if text[:end].endswith(string)]
        if hits:
            return text[: end - max(hits)], True
    return text, False


def could_still_stop(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    lengths = [k for string in stop for k in range(1, len(string)) if text.endswith(string[:k])]
    return max(lengths, default=0)


@given(TEXTS, STOPS, CUTS)
def test_a_text_in_any_pieces_is_cut_where_the_whole_one_is_F4_F7(
    text: str, stop: tuple[str, ...], cuts: list[int]
) -> None:
    matcher, seen, sent = StopMatcher(stop), "", ""
    for piece in pieces(text, cuts):
        seen += piece
        part, is_stopped = matcher.push(piece)
        sent += part
        expected, is_cut = cut_by_stop(seen, stop)
        assert is_stopped == is_cut
        held = 0 if is_cut else could_still_stop(seen, stop)
        assert sent == expected[: len(expected) - held]  # all that is certain, and no more
        if is_stopped:
            break
    assert sent + matcher.flush() == cut_by_stop(text, stop)[0]


@given(BROKEN, CUTS)
def test_bytes_in_any_pieces_make_the_text_of_the_whole_F1_F3(
    tokenizer: Tokenizer, raw: bytes, cuts: list[int]
) -> None:
    choice, seen, sent = ChoiceText(tokenizer), b"", ""
    for piece in pieces(raw, cuts):
        seen += piece
        sent += choice.push(byte_ids(tokenizer, piece))[0]
        known = seen.decode("utf-8", "replace")
        assert sent in (known, known.removesuffix("\ufffd"))  # at most one unfinished character
    assert sent + choice.flush() == raw.decode("utf-8", "replace")


@given(TEXTS, CUTS)
def test_a_whole_text_never_shows_a_broken_character_on_its_way_F1(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    choice = ChoiceText(tokenizer)
    parts = [choice.push(byte_ids(tokenizer, p))[0] for p in pieces(text.encode(), cuts)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == text
    assert choice.flush() == ""


@given(TEXTS, STOPS, CUTS)
def test_tokens_that_end_amid_characters_are_cut_where_the_whole_text_is_F4(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], cuts: list[int]
) -> None:
    choice, sent = ChoiceText(tokenizer, stop), ""
    for piece in pieces(text.encode(), cuts):
        part, is_stopped = choice.push(byte_ids(tokenizer, piece))
        sent += part
        assert cut_by_stop(text, stop)[0].startswith(sent)
        if is_stopped:
            break
    assert sent + choice.flush() == cut_by_stop(text, stop)[0]


@given(st.binary(max_size=24), CUTS)
def test_what_is_sent_is_always_text_that_can_be_encoded_F3(
    tokenizer: Tokenizer, raw: bytes, cuts: list[int]
) -> None:
    choice = ChoiceText(tokenizer, ("\ufffd\ufffd",))
    for piece in pieces(raw, cuts):
        choice.push(byte_ids(tokenizer, piece))[0].encode()
    choice.flush().encode()
