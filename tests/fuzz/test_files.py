"""Files that people write and programs leave: a value, or the room's own error in one sentence."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config import DaemonConfig, read_config
from daemon.errors import ConfigError
from ipc.placement_file import PlacementError, parse_placement, to_json
from planner.bench.run_file import read_run
from planner.errors import PlannerError
from planner.json_files import read_json
from planner.latency.profile_file import read_profile
from planner.workload.trace_file import read_trace
from tests.fuzz.documents import TEXTS, noise, spoiled, spoiled_bytes
from tests.fuzz.strict_read import strict_read
from tests.ipc.test_placement_file import good
from tests.planner.profile_tables import profile_table

PLACEMENT = msgspec.to_builtins(good())
PROFILE = msgspec.to_builtins(profile_table())
TOML = b"""\
model = "models/x"
port = 8000
prefill = 2
decode_tp = 2
kv_cache_gib = 0.5
drain_s = 3
log_level = "info"
[nodes.a]
address = "tcp://10.0.0.1:7400"
"""
TRACE = b"""\
arrival_s,input_tokens,output_tokens
0.0,12,3
0.5,700,1
1.25,9,90
"""
RUN = b"""\
arrival_s,input_tokens,output_tokens,sent_s,ttft_s,tpot_s,first_token_s,last_token_s,\
prefill_s,transfer_s,decode_queue_s,error
0.0,12,3,0.0,0.1,0.05,0.1,0.2,0.08,0.01,0.01,
0.5,700,1,0.5,,,,,,,,timeout: too late
"""
TOML_VALUES = st.one_of(
    st.sampled_from(["inf", "nan", "-1", "1e999", "2026-11-29", "07:32:00", "true", "{}", "[]"]),
    st.sampled_from(["0x" + "f" * 50, "9" * 30, "9" * 5_000, "[" * 5_000, "{a=" * 2_000, "'''"]),
    st.integers().map(str),
    st.floats().map(str),
    TEXTS.map(repr),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file"


def written(file: Path, raw: bytes) -> Path:
    file.write_bytes(raw)
    return file


@given(st.one_of(noise(), spoiled(PLACEMENT)))
def test_a_placement_file_is_one_or_is_refused(raw: bytes) -> None:
    placement = strict_read(lambda: parse_placement(raw), PlacementError)
    if placement is not None:
        assert parse_placement(to_json(placement)) == placement


def test_a_placement_file_of_a_hundred_thousand_devices_is_refused_at_once() -> None:
    """Each device was once looked for among all the others."""
    raw = json.loads(to_json(good()))
    devices = list(range(100_000))
    raw["nodes"][0]["num_devices"] = 100_000
    raw["instances"][0] |= {"tp": 100_000}
    raw["instances"][0]["stages"][0]["devices"] = devices
    text = msgspec.json.encode(raw)
    assert strict_read(lambda: parse_placement(text), PlacementError) is None


@given(st.one_of(noise(), spoiled(PROFILE)))
def test_a_profile_is_one_or_is_refused(file: Path, raw: bytes) -> None:
    table = strict_read(lambda: read_profile(written(file, raw)), PlannerError)
    if table is not None:
        assert all(point.tokens_per_s > 0 for point in table.prefill)


@given(st.one_of(noise(), spoiled_bytes(TOML)))
def test_a_configuration_is_one_or_is_refused(file: Path, raw: bytes) -> None:
    strict_read(lambda: read_config(written(file, raw), {}), ConfigError)


@given(st.sampled_from(DaemonConfig.__struct_fields__), TOML_VALUES)
def test_whatever_a_setting_holds_it_is_taken_or_refused(file: Path, key: str, value: str) -> None:
    raw = f"{key} = {value}\n".encode("utf-8", "replace")
    strict_read(lambda: read_config(written(file, raw), {}), ConfigError)


@given(st.one_of(noise(), spoiled_bytes(TRACE)))
def test_a_trace_is_one_or_is_refused(file: Path, raw: bytes) -> None:
    requests = strict_read(lambda: read_trace(written(file, raw)), PlannerError)
    if requests is not None:
        assert (requests.input_tokens >= 1).all()
        assert (requests.arrival_s[1:] >= requests.arrival_s[:-1]).all()


@given(st.one_of(noise(), spoiled_bytes(RUN)))
def test_a_benchs_run_is_one_or_is_refused(file: Path, raw: bytes) -> None:
    strict_read(lambda: read_run(written(file, raw)), PlannerError)


@given(st.one_of(noise(), spoiled({"step_s": 0.1, "prefill_s": 1})))
def test_a_file_of_figures_is_one_or_is_refused(file: Path, raw: bytes) -> None:
    figures: Any = strict_read(
        lambda: read_json(written(file, raw), dict[str, float]), PlannerError
    )
    assert figures is None or all(isinstance(value, float) for value in figures.values())
