"""`distserve config`: all that is wrong, and what is in effect with where it comes from."""

import tomllib
from pathlib import Path

import pytest

from daemon.__main__ import main
from daemon.config import DaemonConfig, read_config


def written(directory: Path, text: str) -> Path:
    file = directory / "node.toml"
    file.write_text(text)
    return file


def model_in(directory: Path) -> str:
    """As much of a model as a check looks at."""
    (directory / "config.json").write_text('{"max_position_embeddings": 64}')
    return f'model = "{directory}"\n'


def test_every_trouble_is_told_on_a_line_of_its_own_with_file_and_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'modle = "x"\nport = "x"\nmixed_tp = 0\n[nodes.a]\naddress = "udp://x"\n'
    file = written(tmp_path, text)
    assert main(["config", "check", str(file)]) == 78
    assert capsys.readouterr().err.splitlines() == [
        f"distserve config: {file}: there is no key 'modle'; is model or node meant?",
        f"distserve config: {file}: port: it must be a whole number, not a text in quotes",
        f"distserve config: {file}: mixed_tp: it must be at least 1",
        f"distserve config: {file}: nodes[...].address: it does not look like one, such as "
        "tcp://10.0.0.1:7400",
    ]


def test_files_that_a_configuration_names_are_looked_at_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'model = "no-model"\napi_keys = "no-keys"\nplacement = "no-placement"\nttft = "soon"\n'
    assert main(["config", "check", str(written(tmp_path, text))]) == 78
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 4
    for what in ("no-model: no config.json", "no-keys: No such", "no-placement", "ttft is a time"):
        assert what in told


def test_a_configuration_that_can_be_used_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, model_in(tmp_path))
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file} can be used\n"
    assert main(["config", "check", "--config", str(file)]) == 0
    assert main(["config", "check", str(file), "--port", "70000"]) == 78
    assert "--port: it must be at most 65535" in capsys.readouterr().err


def test_what_is_shown_tells_where_each_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "port = 7000\n")
    flags = ["--config", str(file), "--decode", "2"]
    assert main(["config", "show", *flags]) == 0
    expected = f"version = 1\nport = 7000  # {file}\ndecode = 2  # --decode\n"
    assert capsys.readouterr().out == expected
    assert main(["config", "show", "--effective", *flags]) == 0
    shown = capsys.readouterr().out
    assert 'host = "127.0.0.1"  # default\n' in shown
    assert "# rate is not set  # default\n" in shown


def test_what_is_shown_is_a_file_that_gives_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        'model = "a \\"b\\" \\\\ \\u00e9 \\u007f"\ncors_origins = ["https://a.example", "*"]\n'
        'kv_cache_gib = 1e-05\nttft = "200ms"\n[nodes."n.0"]\naddress = "tcp://h:1"\n'
    )
    file = written(tmp_path, text)
    assert main(["config", "show", "--effective", "--config", str(file), "--insecure"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "shown.toml").write_text(shown)
    config = read_config(tmp_path / "shown.toml", {})
    assert config == read_config(file, {"insecure": True})
    assert tomllib.loads(shown).keys() <= {"version", *DaemonConfig.__struct_fields__}


def test_without_a_verb_the_usage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 64
    assert "distserve config check" in capsys.readouterr().err
