import json
from pathlib import Path

import pytest

from daemon.errors import ConfigError
from tests.daemon.small_tokenizers import (
    SENTENCES,
    byte_level,
    byte_level_directory,
    load,
    sentence_piece_directory,
)
from tests.daemon.token_streams import id_of


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


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", {"vocab_size": "400"}, "vocab_size: it must be a whole number"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id: it must be a"),
        ("generation_config.json", {"eos_token_id": [[1]]}, r"eos_token_id\[.*: it must be a"),
        ("generation_config.json", {"eos_token_id": 10**30}, "eos_token_id: "),
    ],
)
def test_a_number_that_is_none_is_refused_with_its_file_and_key(
    tmp_path: Path, file: str, content: dict[str, object], why: str
) -> None:
    directory = byte_level_directory(tmp_path / "m")
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"{file}: {why}"):
        load(directory)
