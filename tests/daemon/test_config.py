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
        ("prot = 1", r"node\.toml: there is no key 'prot'; is \w+ or \w+ meant\?"),
        ('port = "x"', r"node\.toml: port: it must be a whole number, not a text in quotes"),
        ("port = 70000", r"port: it must be at most 65535"),
        ('dtype = "int8"', r"dtype: 'int8' is none of its values; there are: bfloat16, float16"),
        ("kv_cache_gib = 0", r"kv_cache_gib: it must be more than 0"),
        ("kv_cache_gib = inf", r"kv_cache_gib: it must be at most 1048576"),
        ("kv_cache_gib = nan", r"kv_cache_gib"),
        ("drain_s = inf", r"drain_s: it must be at most"),
        ("port = ", r"Invalid value"),
        ("decode = 0", r"nobody decodes"),
        ('prefill_policy = "lifo"', r"prefill_policy: 'lifo' is none of its values"),
        (
            'prefill = 0\nmixed = 1\nchunk_tokens = 64\nprefill_policy = "skip-join"',
            r"prefill_policy skip-join is for steps of prompts alone",
        ),
        ("mixed_tp = 0", r"mixed_tp: it must be at least 1"),
        ("threads_per_worker = 100000", r"threads_per_worker: it must be at most 1024"),
        ("max_context_tokens = 1", r"max_context_tokens: it must be at least 2"),
        ('otlp_endpoint = "me"', r"otlp_endpoint: it does not look like one, such as http://"),
        ("a = " + "[" * 5000, r"node\.toml: it is nested too deeply"),
        ('log_level = "loud"', r"log_level: 'loud' is none of its values; there are: debug, "),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_config(written(tmp_path, text), {})


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^/nowhere\.toml: No such file or directory$"):
        read_config(Path("/nowhere.toml"), {})


def test_a_file_that_is_no_text_is_refused_and_a_byte_order_mark_is_none_of_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(b"\xef\xbb\xbfport = 7000\n")
    assert read_config(file, {}).port == 7000
    file.write_bytes(b"\x80\x81")
    with pytest.raises(ConfigError, match=r"node\.toml: it is no text in UTF-8$"):
        read_config(file, {})


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
        ('{"max_position_embeddings": -1}', "no max_position_embeddings of 2 or more"),
        ('{"max_position_embeddings": true}', "no max_position_embeddings"),
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
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
    with pytest.raises(ConfigError, match=r"admin_host: .* is no loopback address"):
        read_config(None, {"admin_host": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "none"])
def test_a_loopback_admin_host_is_taken(host: str) -> None:
    assert read_config(None, {"admin_host": host}).admin_host == host


def test_all_that_is_wrong_is_found_at_once_and_the_first_is_told(tmp_path: Path) -> None:
    file = written(tmp_path, 'port = "x"\ndrain_s = 0\n')
    with pytest.raises(ConfigError, match=r"port: .* \(and 1 more; `distserve config check`"):
        read_config(file, {})
    with pytest.raises(ConfigError, match=r"^--port: it must be at most 65535$"):
        read_config(None, {"port": 70_000})


@pytest.mark.parametrize("version", ["2", '"1"', "true"])
def test_a_file_of_another_version_is_refused_and_both_are_named(
    tmp_path: Path, version: str
) -> None:
    file = written(tmp_path, f"version = {version}\nno_such_key = 1\n")
    with pytest.raises(ConfigError, match=r"version: the file has version .*, this .* version 1"):
        read_config(file, {})
    assert read_config(written(tmp_path, "version = 1\nport = 7000\n"), {}).port == 7000


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "::ffff:10.0.0.1"]
)
def test_other_machines_may_come_only_with_keys_or_where_it_is_said(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host: .* can be reached from other machines, .*keys"):
        read_config(None, {"host": host})
    assert read_config(None, {"host": host, "api_keys": "keys.toml"}).host == host
    assert read_config(None, {"host": host, "insecure": True}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_takes_no_keys(host: str) -> None:
    assert read_config(None, {"host": host}).host == host
