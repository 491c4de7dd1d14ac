import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from daemon.chat_template import ChatTemplate
from daemon.errors import ConfigError, InvalidRequest
from daemon.text import ChoiceText, Tokenizer
from tests.daemon.small_tokenizers import (
    SENTENCES,
    byte_level,
    byte_level_directory,
    load,
    sentence_piece,
    sentence_piece_directory,
)

CHINESE_AND_EMOJI = "你好，世界！🎉 Party 👩‍👩‍👧 naïve"  # noqa: RUF001


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_directory(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(sentence_piece_directory(tmp_path_factory.mktemp("pieces") / "model"))


def stream(tokenizer: Tokenizer, token_ids: list[int], *stop: str) -> list[str]:
    """What a client gets of each token, and what is left at the end."""
    text = ChoiceText(tokenizer, stop)
    return [text.push((token_id,))[0] for token_id in token_ids] + [text.flush()]


def id_of(token: str) -> int:
    """The id of one of the byte-level tokenizer's tokens."""
    return byte_level().get_vocab()[token]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token per byte, whatever the bytes are."""
    by_bytes = {tokenizer.token_bytes(k): k for k in reversed(range(tokenizer.num_token_ids))}
    return [by_bytes[bytes([byte])] for byte in raw]


# Byte-level tokenizers


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_of_random_tokens_joins_to_the_whole_decode(
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


def test_a_character_leaves_only_when_it_is_whole(byte_tokenizer: Tokenizer) -> None:
    parts = stream(byte_tokenizer, byte_ids(byte_tokenizer, "世🎉".encode()))
    assert parts == ["", "", "世", "", "", "", "🎉", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end(
    byte_tokenizer: Tokenizer,
) -> None:
    assert stream(byte_tokenizer, byte_ids(byte_tokenizer, b"a\xe4\xb8")) == ["a", "", "", "\ufffd"]


def test_a_hopeless_byte_becomes_a_replacement_as_soon_as_it_is_hopeless(
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


def test_an_id_that_no_token_has_adds_nothing(byte_tokenizer: Tokenizer) -> None:
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


# Stop strings


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
def test_stop_strings_cut_as_defined_however_the_text_is_split(
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


def test_a_stop_string_is_found_across_tokens(byte_tokenizer: Tokenizer) -> None:
    token_ids = byte_ids(byte_tokenizer, b"ABC DEFGHIJ KLM")
    assert "".join(stream(byte_tokenizer, token_ids, "DEFGHIJ")) == "ABC "


def test_no_part_of_a_stop_string_is_sent_before_it_is_ruled_out(
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


# Model directories


def opt_directory(path: Path) -> Path:
    """As OPT's repositories are: no tokenizer.json, and a BOS that is `</s>`."""
    path.mkdir()
    byte_level().model.save(str(path))
    (path / "config.json").write_text(json.dumps({"model_type": "opt", "eos_token_id": 0}))
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": {"content": "</s>"}}
    (path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True} | settings))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    return path


def test_a_vocabulary_and_merges_make_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = load(opt_directory(tmp_path / "opt"))
    expected = byte_level().encode(SENTENCES[1]).ids
    assert tokenizer.encode(SENTENCES[1], special=False) == expected


def test_opts_bos_comes_before_a_text(tmp_path: Path) -> None:
    tokenizer = load(opt_directory(tmp_path / "opt"))
    assert tokenizer.encode("hello")[0] == id_of("</s>")


def test_opts_special_tokens_are_recognised_in_a_text(tmp_path: Path) -> None:
    tokenizer = load(opt_directory(tmp_path / "opt"))
    assert tokenizer.encode("</s>", special=False) == [id_of("</s>")]


def test_a_bos_asked_for_by_the_settings_is_added_where_the_tokenizer_does_not(
    tmp_path: Path,
) -> None:
    directory = byte_level_directory(tmp_path / "m", bos_token="</s>", add_bos_token=True)
    assert load(directory).encode("hello")[0] == id_of("</s>")


def test_a_bos_is_not_added_twice(tmp_path: Path) -> None:
    directory = sentence_piece_directory(tmp_path / "m", add_bos_token=True)
    tokenizer = load(directory)
    assert tokenizer.encode("hello").count(tokenizer.bos_id or 0) == 1


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, (3,)),
        ({}, {"eos_token_id": 1}, (1, 3)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 1}, (2, 3)),
        ({"eos_token_id": 0}, {}, (0, 3)),
    ],
)
def test_ends_of_sequence_come_from_all_configuration_files(
    tmp_path: Path,
    generation: dict[str, object],
    config: dict[str, object],
    expected: tuple[int, ...],
) -> None:
    directory = byte_level_directory(tmp_path / "m")
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "config.json").write_text(json.dumps(config))
    assert load(directory).eos_ids == expected


def test_ids_end_where_the_models_vocabulary_does(tmp_path: Path) -> None:
    directory = byte_level_directory(tmp_path / "m")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 400}))
    assert load(directory).num_token_ids == 400


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_refused(tmp_path: Path, file: str) -> None:
    directory = byte_level_directory(tmp_path / "m")
    (directory / file).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(directory)


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    directory = byte_level_directory(tmp_path / "m")
    library = byte_level()
    library.enable_truncation(4)
    (directory / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    assert len(load(directory).encode(SENTENCES[0])) > 4


# Chat templates

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTION = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
DATED = """{% if not date is defined %}{% set date = strftime_now("%Y") %}{% endif %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
  {% set ns.count = ns.count + 1 %}
  {% if message.role == "system" %}{% continue %}{% endif %}
<{{ ns.count }}|{{ message.role }}>{{ message | tojson }}
  {% if ns.count > 2 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
Year {{ date }}
"""
MARKED = """{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
{{ message.content }}
    {% endif %}
{% endfor %}{{ add_generation_prompt }}"""
CHATS = [
    [{"role": "user", "content": "Hi <b>there</b> 世界 🎉 "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ' What\'s "up"?\n'},
        {"role": "assistant", "content": "All & well"},
        {"role": "user", "content": "Good."},
    ],
]
NAMES = {"bos_token": "</s>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [CHATML, INSTRUCTION, DATED, MARKED])
def test_a_chat_is_rendered_as_transformers_does(
    source: str, chat: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMES)  # type: ignore[no-untyped-call]
    expected = reference.apply_chat_template(
        chat,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    template = ChatTemplate(source, NAMES)
    assert template.render(chat, add_generation_prompt=add_generation_prompt) == expected


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(CHATS[0])


def test_a_template_that_reaches_for_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages[0].content.none.such }}").render(CHATS[0])


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        template.render(CHATS[0])


def test_a_template_cannot_change_the_messages() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages.clear() }}").render(list(CHATS[0]))


def test_a_template_that_is_none_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError):
        ChatTemplate("{% if %}")


@pytest.fixture
def template_of(tmp_path: Path) -> Callable[..., ChatTemplate | None]:
    """Loads a directory that holds such settings and, perhaps, such a template file."""

    def load_template(file: str | None = None, **settings: object) -> ChatTemplate | None:
        directory = byte_level_directory(tmp_path / "m", **settings)
        if file is not None:
            (directory / "chat_template.jinja").write_text(file, encoding="utf-8")
        return ChatTemplate.from_directory(directory)

    return load_template


def rendered(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render(CHATS[0])


def test_a_template_may_stand_in_the_settings(
    template_of: Callable[..., ChatTemplate | None],
) -> None:
    assert rendered(template_of(chat_template="{{ eos_token }}")) == "<|im_end|>"


def test_a_file_of_its_own_counts_more(template_of: Callable[..., ChatTemplate | None]) -> None:
    assert rendered(template_of("file", chat_template="settings")) == "file"


def test_of_several_templates_the_default_is_taken(
    template_of: Callable[..., ChatTemplate | None],
) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    assert rendered(template_of(chat_template=named)) == "plain"


def test_a_model_may_have_no_template(template_of: Callable[..., ChatTemplate | None]) -> None:
    assert template_of() is None
