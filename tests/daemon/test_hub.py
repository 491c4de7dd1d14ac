"""Fetching from a hub: data only, by commit, resumed, checked; against a hub on this machine."""

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import models
from daemon.hub import fetch, main
from daemon.models import FetchFailed, read_origin
from tests.daemon.fake_hub import COMMIT, FakeHub

REPO = "acme/tiny"
WEIGHTS = bytes(range(256)) * 1024
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling_tiny.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickled",
    "README.md": b"hello",
    "onnx/model.safetensors": b"of another runtime",
}
KEPT = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for variable in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    with FakeHub(REPO, dict(FILES)).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != models.MARKER)


def leftovers(models_dir: Path) -> list[str]:
    return sorted(path.name for path in models_dir.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_a_model_is_fetched_as_data_and_its_commit_recorded(
    hub: FakeHub, models_dir: Path, revision: str
) -> None:
    folder = fetch(REPO, revision, models_dir)
    assert folder == models_dir / "tiny"
    assert kept(folder) == KEPT
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    origin = read_origin(folder)
    assert origin is not None
    assert origin.requirement == f"{REPO}@{COMMIT}"
    assert sorted(name for name, _ in hub.asked) == KEPT
    assert leftovers(models_dir) == ["tiny"]


def test_what_is_there_is_not_fetched_again(hub: FakeHub, models_dir: Path) -> None:
    fetch(REPO, "main", models_dir)
    hub.asked.clear()
    assert fetch(REPO, "main", models_dir) == models_dir / "tiny"
    assert hub.asked == []


def test_another_commit_replaces_the_older_one(hub: FakeHub, models_dir: Path) -> None:
    fetch(REPO, "main", models_dir)
    hub.commit = "f" * 40
    hub.files["config.json"] = b'{"newer": true}'
    folder = fetch(REPO, "main", models_dir)
    assert json.loads((folder / "config.json").read_bytes()) == {"newer": True}
    assert leftovers(models_dir) == ["tiny"]


def test_a_fetch_that_was_cut_short_goes_on_where_it_stopped(
    hub: FakeHub, models_dir: Path
) -> None:
    """Whole chunks are kept, of ten megabytes each."""
    hub.cut, hub.files["model.safetensors"] = "model.safetensors", WEIGHTS * 96
    with pytest.raises(FetchFailed, match="answers 500 for acme/tiny at main"):
        fetch(REPO, "main", models_dir)
    assert not (models_dir / "tiny").exists()
    hub.mend()
    hub.asked.clear()
    folder = fetch(REPO, "main", models_dir)
    assert hub.asked == [("model.safetensors", "bytes=10485760-")]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS * 96
    assert leftovers(models_dir) == ["tiny"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_noticed_by_its_checksum_and_fetched_again(
    hub: FakeHub, models_dir: Path, name: str
) -> None:
    hub.spoiled.add(name)
    with pytest.raises(FetchFailed, match=f"{name} arrived damaged and was removed"):
        fetch(REPO, "main", models_dir)
    assert not (models_dir / "tiny").exists()
    hub.mend()
    assert (fetch(REPO, "main", models_dir) / name).read_bytes() == FILES[name]


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    hub: FakeHub, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 3_000_000))
    with pytest.raises(FetchFailed, match="has 3 MB free, fetching takes 67 MB"):
        fetch(REPO, "main", models_dir)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("model.safetensors", "no safetensors at main, and other weights are code"),
        ("config.json", "no config.json at main"),
        ("tokenizer.json", "no tokenizer.json at main"),
    ],
)
def test_a_repository_that_is_no_model_for_us_is_refused(
    hub: FakeHub, models_dir: Path, missing: str, why: str
) -> None:
    del hub.files[missing]
    with pytest.raises(FetchFailed, match=why):
        fetch(REPO, "main", models_dir)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("repo", "revision", "why"),
    [
        ("acme/other", "main", "has no model acme/other"),
        (REPO, "v9", "there is no such revision"),
        ("a/b/c", "main", "'a/b/c' is no ORG/NAME"),
        ("../etc", "main", r"'\.\./etc' is no ORG/NAME"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence(
    hub: FakeHub, models_dir: Path, repo: str, revision: str, why: str
) -> None:
    with pytest.raises(FetchFailed, match=why):
        fetch(repo, revision, models_dir)


def test_a_folder_of_somebody_else_or_of_another_model_is_left_alone(
    hub: FakeHub, models_dir: Path
) -> None:
    (models_dir / "tiny").mkdir(parents=True)
    with pytest.raises(FetchFailed, match="was not fetched by this command"):
        fetch(REPO, "main", models_dir)
    origin = {"requirement": "acme2/tiny@abc", "sha256": "0"}
    (models_dir / "tiny" / models.MARKER).write_text(json.dumps(origin))
    with pytest.raises(FetchFailed, match="holds acme2/tiny@abc"):
        fetch(REPO, "main", models_dir)


def test_a_hub_that_is_not_there_is_one_sentence_and_exit_code_69(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main([REPO, "--dir", str(tmp_path)]) == 69
    assert capsys.readouterr().err.startswith(f"distserve: {REPO} could not be fetched from http:")


def test_the_command_fetches_from_a_hub_in_a_process_of_its_own(
    hub: FakeHub, models_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main(["fetch", REPO, "--revision", "v1", "--dir", str(models_dir)]) == 0
    assert kept(models_dir / "tiny") == KEPT
    assert models.main(["list", "--dir", str(models_dir)]) == 0
    assert f"{REPO}@" in capsys.readouterr().out


def test_a_revision_of_the_embedded_model_and_an_unknown_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main(["fetch", "smollm2", "--revision", "v1", "--dir", str(tmp_path)]) == 69
    assert models.main(["fetch", "smollm9", "--dir", str(tmp_path)]) == 69
    told = capsys.readouterr().err
    assert "smollm2 is pinned" in told
    assert "no embedded model 'smollm9'" in told
