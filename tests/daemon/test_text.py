import random

import pytest

from daemon.text import ChoiceText, Tokenizer
from tests.daemon.small_tokenizers import (
    SENTENCES,
    byte_level,
    byte_level_directory,
    load,
    sentence_piece,
    sentence_piece_directory,
)
from tests.daemon.token_streams import CHINESE_AND_EMOJI, byte_ids, id_of, stream


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(sentence_piece_directory(tmp_path_factory.mktemp("pieces") / "model"))


# Byte-level tokenizers


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_of_random_tokens_joins_to_the_whole_decode_F1(
    byte_tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        token_ids = [rng.randrange(byte_tokenizer.num_token_ids) for _ in range(40)]
        assert "".join(stream(byte_tokenizer, token_ids)) == byte_level().decode(token_ids)


def test_a_random_mix_of_broken_and_whole_characters_joins_to_the_whole_decode(
    byte_tokenizer: Tokenizer,
) -> None:
    rng = random.Random(1)
    pool = CHINESE_AND_EMOJI.encode() + b"\xff\xc0\xe4\xf0\x9f\x80abc"
    for _ in range(300):
        token_ids = byte_ids(byte_tokenizer, bytes(rng.choices(pool, k=20)))
        assert "".join(stream(byte_tokenizer, token_ids)) == byte_level().decode(token_ids)


def test_several_tokens_at_once_give_the_same_text(byte_tokenizer: Tokenizer) -> None:
    token_ids = byte_tokenizer.encode(CHINESE_AND_EMOJI)
    assert ChoiceText(byte_tokenizer).push(token_ids) == (CHINESE_AND_EMOJI, False)


def test_a_character_leaves_only_when_it_is_whole_F1(byte_tokenizer: Tokenizer) -> None:
    parts = stream(byte_tokenizer, byte_ids(byte_tokenizer, "世🎉".encode()))
    assert parts == ["", "", "世", "", "", "", "🎉", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end_F3(
    byte_tokenizer: Tokenizer,
) -> None:
    assert stream(byte_tokenizer, byte_ids(byte_tokenizer, b"a\xe4\xb8")) == ["a", "", "", "\ufffd"]


def test_a_hopeless_byte_becomes_a_replacement_as_soon_as_it_is_hopeless_F3(
    byte_tokenizer: Tokenizer,
) -> None:
    assert stream(byte_tokenizer, byte_ids(byte_tokenizer, b"\xe4a")) == ["", "\ufffda", ""]


def test_special_tokens_add_nothing_even_inside_a_character(byte_tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids(byte_tokenizer, "世".encode())
    end = id_of("<|im_end|>")
    assert "".join(stream(byte_tokenizer, [first, end, *rest])) == "世"


def test_an_added_token_with_a_space_keeps_it(byte_tokenizer: Tokenizer) -> None:
    token_id = id_of("<tool call>")
    assert "".join(stream(byte_tokenizer, [token_id])) == "<tool call>"


def test_an_id_that_no_token_has_adds_nothing_E8(byte_tokenizer: Tokenizer) -> None:
    assert "".join(stream(byte_tokenizer, [byte_tokenizer.num_token_ids + 5])) == ""


# SentencePiece-like tokenizers


@pytest.mark.parametrize("text", [*SENTENCES, CHINESE_AND_EMOJI])
def test_a_continuation_keeps_the_space_before_its_first_word(
    piece_tokenizer: Tokenizer, text: str
) -> None:
    token_ids = piece_tokenizer.encode(text, special=False)
    assert "".join(stream(piece_tokenizer, token_ids)) == " " + text


def test_prompt_and_stream_join_to_the_whole_decode(piece_tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    library = sentence_piece()
    words = [token_id for token, token_id in library.get_vocab().items() if "<" not in token]
    prompt = piece_tokenizer.encode("hello there", special=False)
    for _ in range(200):
        token_ids = rng.choices(words, k=15)
        joined = library.decode(prompt) + "".join(stream(piece_tokenizer, token_ids))
        assert joined == library.decode(prompt + token_ids)


def test_byte_tokens_join_to_characters(piece_tokenizer: Tokenizer) -> None:
    parts = stream(piece_tokenizer, piece_tokenizer.encode("🎉", special=False))
    assert [part for part in parts if part] == [" ", "🎉"]


def test_the_models_own_bos_is_added_to_text_only(piece_tokenizer: Tokenizer) -> None:
    with_bos = piece_tokenizer.encode("hello")
    assert with_bos == [piece_tokenizer.bos_id, *piece_tokenizer.encode("hello", special=False)]


# Tokens by name


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes(
    byte_tokenizer: Tokenizer,
) -> None:
    (token_id,) = byte_ids(byte_tokenizer, b"\xe4")
    assert byte_tokenizer.token_text(token_id) == "bytes:\\xe4"


def test_a_special_token_is_named_by_its_name(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_text(id_of("<|im_end|>")) == "<|im_end|>"


@pytest.mark.parametrize("text", [*SENTENCES, CHINESE_AND_EMOJI, "<|im_start|>user"])
@pytest.mark.parametrize("kind", ["byte_tokenizer", "piece_tokenizer"])
def test_a_prompts_pieces_join_to_its_text(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    token_ids = tokenizer.encode(text)
    pieces = tokenizer.prompt_pieces(token_ids)
    assert ("".join(pieces), len(pieces)) == (text, len(token_ids))


def test_the_longest_token_bounds_a_text_by_its_length(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.longest_token == max(map(len, byte_level().get_vocab()))
    for sentence in SENTENCES:
        assert len(sentence) <= byte_tokenizer.longest_token * len(byte_tokenizer.encode(sentence))
