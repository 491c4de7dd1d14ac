import random

import pytest

from daemon.text import ChoiceText, Tokenizer
from tests.daemon.small_tokenizers import (
    byte_level_directory,
    load,
)
from tests.daemon.token_streams import byte_ids, stream


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


def walk(text: str, stop: tuple[str, ...]) -> tuple[str, str, bool]:
    """By definition: what is certain, what is held back, and whether a stop string ended it."""
    for end in range(1, len(text) + 1):
        hits = [string for string in stop if text[:end].endswith(string)]
        if hits:
            return text[: end - max(map(len, hits))], "", True
    starts = [string[:k] for string in stop for k in range(len(string))]
    held = max((start for start in starts if text.endswith(start)), key=len)
    return text[: len(text) - len(held)], held, False


@pytest.mark.parametrize("seed", range(10))
def test_stop_strings_cut_as_defined_however_the_text_is_split_F4(
    byte_tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        stop = tuple("".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(3))
        text = "".join(rng.choices("abc", weights=(5, 5, 1), k=12))
        choice, sent, seen = ChoiceText(byte_tokenizer, stop), "", ""
        while len(seen) < len(text):
            piece = text[len(seen) : len(seen) + rng.randint(1, 4)]
            seen += piece
            part, stopped = choice.push(byte_ids(byte_tokenizer, piece.encode()))
            sent += part
            certain, held, expected = walk(seen, stop)
            assert (sent, stopped) == (certain, expected)
            if stopped:
                break
            assert ChoiceText(byte_tokenizer, stop).push(byte_tokenizer.encode(seen))[0] == sent
        else:
            assert choice.flush() == held


def test_a_stop_string_is_found_across_tokens_F4_F7(byte_tokenizer: Tokenizer) -> None:
    token_ids = byte_ids(byte_tokenizer, b"ABC DEFGHIJ KLM")
    assert "".join(stream(byte_tokenizer, token_ids, "DEFGHIJ")) == "ABC "


def test_no_part_of_a_stop_string_is_sent_before_it_is_ruled_out_F4(
    byte_tokenizer: Tokenizer,
) -> None:
    parts = stream(byte_tokenizer, byte_ids(byte_tokenizer, b"xDEFy"), "DEFG")
    assert parts == ["x", "", "", "", "DEFy", ""]


def test_what_was_held_back_comes_at_the_end(byte_tokenizer: Tokenizer) -> None:
    assert stream(byte_tokenizer, byte_ids(byte_tokenizer, b"xDE"), "DEFG")[-1] == "DE"


def test_a_stop_string_may_be_made_of_emoji(byte_tokenizer: Tokenizer) -> None:
    token_ids = byte_ids(byte_tokenizer, "好🎉🎊!".encode())
    assert "".join(stream(byte_tokenizer, token_ids, "🎉🎊")) == "好"


def test_push_says_in_which_step_the_stop_string_was_complete(byte_tokenizer: Tokenizer) -> None:
    text = ChoiceText(byte_tokenizer, ("b",))
    ids = byte_ids(byte_tokenizer, b"abc")
    assert [text.push((token_id,)) for token_id in ids] == [("a", False), ("", True), ("", True)]


def test_nothing_is_left_after_a_stop_string(byte_tokenizer: Tokenizer) -> None:
    text = ChoiceText(byte_tokenizer, ("b",))
    text.push(byte_ids(byte_tokenizer, b"abc"))
    assert text.flush() == ""


def test_an_unfinished_character_at_the_end_may_complete_a_stop_string(
    byte_tokenizer: Tokenizer,
) -> None:
    token_ids = byte_ids(byte_tokenizer, b"ab\xe4")
    assert "".join(stream(byte_tokenizer, token_ids, "b\ufffd")) == "a"
