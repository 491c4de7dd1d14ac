"""The configuration: a file, flags over it, and one clear sentence for what cannot be."""

from pathlib import Path

import pytest

from daemon.config import DaemonConfig, model_context, read_config
from daemon.errors import ConfigError
from daemon.slo import Targets
from daemon.targets import slo_of
from ipc.vocabulary import DType, Role


def written(directory: Path, text: str) -> Path:
    file = directory / "node.toml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, 'dtype = "float32"\nport = 7000\n')
    config = read_config(file, {"port": 7001, "host": None})
    assert (config.dtype, config.port, config.host) == (DType.FP32, 7001, "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prot = 1", r"Object contains unknown field `prot`"),
        ('port = "x"', r"Expected `int`, got `str` - at `\$\.port`"),
        ("port = 70000", r"<= 65535 - at `\$\.port`"),
        ('dtype = "int8"', r"Invalid enum value 'int8' - at `\$\.dtype`"),
        ("kv_cache_gib = 0", r"> 0"),
        ("kv_cache_gib = inf", r"<= 1048576.0 - at `\$\.kv_cache_gib`"),
        ("kv_cache_gib = nan", r"kv_cache_gib"),
        ("drain_s = inf", r"- at `\$\.drain_s`"),
        ("port = ", r"Invalid value"),
        ("decode = 0", r"nobody decodes"),
        ('prefill_policy = "lifo"', r"Invalid enum value 'lifo' - at `\$\.prefill_policy`"),
        (
            'prefill = 0\nmixed = 1\nchunk_tokens = 64\nprefill_policy = "skip-join"',
            r"prefill_policy skip-join is for steps of prompts alone",
        ),
        ("mixed_tp = 0", r">= 1 - at `\$\.mixed_tp`"),
        ('log_level = "loud"', r"Invalid enum value 'loud' - at `\$\.log_level`"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_config(written(tmp_path, text), {})


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.toml: .*No such file"):
        read_config(Path("/nowhere.toml"), {})


@pytest.mark.parametrize("key", ["prefill", "decode_tp", "chunk_tokens"])
def test_a_placement_and_counted_instances_exclude_each_other(tmp_path: Path, key: str) -> None:
    """Also where one stands in the file and the other is a flag."""
    with pytest.raises(ConfigError, match=f"placement and {key} exclude each other"):
        read_config(written(tmp_path, f"{key} = 2"), {"placement": "two.json"})


def test_a_role_may_have_a_pool_of_its_own_size() -> None:
    config = DaemonConfig(kv_cache_gib=2.0, decode_kv_cache_gib=0.5)
    assert config.kv_bytes(Role.DECODE) == 1 << 29
    assert config.kv_bytes(Role.PREFILL) == config.kv_bytes(Role.MIXED) == 1 << 31


@pytest.mark.parametrize(
    ("config_json", "asked", "context"),
    [
        ('{"max_position_embeddings": 512}', None, 512),
        ('{"max_position_embeddings": 512}', 100, 100),
    ],
)
def test_the_context_is_the_models_unless_a_shorter_one_is_asked_for(
    tmp_path: Path, config_json: str, asked: int | None, context: int
) -> None:
    (tmp_path / "config.json").write_text(config_json)
    config = DaemonConfig(model=str(tmp_path), max_context_tokens=asked)
    assert model_context(config) == context


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "no max_position_embeddings"),
        ('{"max_position_embeddings": "512"}', "no max_position_embeddings"),
    ],
)
def test_a_broken_model_configuration_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json .*{why}"):
        model_context(DaemonConfig(model=str(tmp_path)))


def test_an_admission_by_target_needs_one(tmp_path: Path) -> None:
    file = written(tmp_path, 'admission = "slo"\n')
    with pytest.raises(ConfigError, match="needs a target for the time to first token: set ttft"):
        read_config(file, {})
    assert read_config(file, {"ttft": "200ms"}).ttft == "200ms"


def test_a_table_that_nobody_would_look_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"profile is for .*placement = auto, .*admission = slo"):
        read_config(None, {"profile": "table.json"})


def test_targets_are_told_in_any_case_for_metrics_are_judged_by_them() -> None:
    config = read_config(None, {"ttft": "1s", "tpot": "50ms"})
    assert slo_of(config) == Targets(ttft_s=1.0, tpot_s=0.05)
    assert slo_of(read_config(None, {})) == Targets()
    with pytest.raises(ConfigError, match="tpot is a time above zero such as 200ms or 2s"):
        slo_of(read_config(None, {"tpot": "soon"}))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", ""])
def test_the_admin_listener_is_on_loopback_or_nowhere(host: str) -> None:
    with pytest.raises(ConfigError, match="admin_host: .* is no loopback address"):
        read_config(None, {"admin_host": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "none"])
def test_a_loopback_admin_host_is_taken(host: str) -> None:
    assert read_config(None, {"admin_host": host}).admin_host == host
