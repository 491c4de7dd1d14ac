"""Targets and tables as the configuration names them."""

from pathlib import Path

import msgspec
import pytest

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from daemon.targets import read_table, read_time_s, target_of
from ipc.vocabulary import DType
from tests.daemon.test_prefill_times import POINTS, table


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("2s", 2.0), ("50us", 5e-5), ("1.5", 1.5), (" .5 s ", 0.5)],
)
def test_a_time_has_a_unit_or_is_seconds(text: str, seconds: float) -> None:
    assert read_time_s(text, "ttft") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", "0ms", "1h", "1e3", "inf", "9" * 400])
def test_what_is_no_time_above_zero_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft is a time above zero such as 200ms or 2s"):
        read_time_s(text, "ttft")


def test_a_table_is_read_as_profile_writes_it(tmp_path: Path) -> None:
    written = table(*POINTS)
    (tmp_path / "table.json").write_bytes(msgspec.json.encode(written))
    assert read_table(tmp_path / "table.json") == written


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "unexpected end"),
        ("[]", "version None, and this .* version 2; measure one by `distserve profile`"),
        ('{"version": 1}', "a profile of version 1, and this daemon reads version 2"),
        ('{"version": 2}', "missing required field `model`"),
    ],
)
def test_what_is_no_table_is_refused_with_its_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"table\.json: .*{why}"):
        read_table(tmp_path / "table.json")


def test_a_table_without_times_is_refused(tmp_path: Path) -> None:
    for points, why in (((), "prefill holds no steps"), (((1, 16, 0.0),), r"prefill\[0\]\.ms")):
        (tmp_path / "table.json").write_bytes(msgspec.json.encode(table(*points)))
        with pytest.raises(ConfigError, match=why):
            read_table(tmp_path / "table.json")


def test_a_table_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.json: .*No such file"):
        read_table(Path("/nowhere.json"))


def test_only_an_admission_by_target_has_one(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(msgspec.json.encode(table(*POINTS)))
    config = DaemonConfig(
        admission="slo", ttft="200ms", profile=str(tmp_path / "table.json"), dtype=DType.FP32
    )
    target = target_of(config)
    assert target is not None
    assert (target.ttft_s, target.table) == (0.2, table(*POINTS))
    searched = msgspec.structs.replace(config, admission="full", placement="auto")
    assert target_of(searched) is None
    with pytest.raises(ConfigError, match="was measured in float32, this service computes in bfl"):
        target_of(msgspec.structs.replace(config, dtype=DType.BF16))
