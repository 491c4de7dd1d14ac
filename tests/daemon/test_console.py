"""The console's own end, in-process: what it shows, what it asks first, how it ends."""

import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from daemon import console
from daemon.admin_commands import Drain, GetConfig, GetRequests, Restart, SetLogLevel
from daemon.admin_protocol import ConfigIs, RequestsAre
from daemon.admin_views import NodeState, RequestLine
from tests.daemon.console_house import House


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    opened = House(tmp_path)
    yield opened
    await opened.close()


async def test_status_as_json_holds_every_field(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("status", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["v"], shown["ok"], shown["state"]) == (1, True, "ready")
    assert shown["requests"] == {"queued": 0, "prefill": 1, "decode": 12}
    assert shown["instances"][0]["epoch"] == 2**63
    assert shown["instances"][0]["blocks"] == {"total": 100, "free": 60, "held": 30, "in_use": 10}


async def test_status_as_tables_fits_a_terminal_and_reads_no_markup(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("status") == 0
    shown = capsys.readouterr().out
    for part in ("ready", "smollm2", "1 d 1:01:01", "1 prefill, 12 decode", "signal 9"):
        assert part in shown
    assert "[bold]cpu" in shown
    assert "10/30/100" in shown
    assert re.search(r"\nd0 +2 +1 +0 +1 +5 +81235 *\n", shown), "its second worker"
    assert max(map(len, shown.splitlines())) <= 80


async def test_one_instance_is_shown_alone_and_in_full(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("instances", "p0") == 0
    shown = capsys.readouterr().out
    assert "signal 9" in shown
    assert "d0" not in shown
    assert await house.run("instances", "p7") == 6
    assert "there is no instance 'p7'; there are: p0, d0" in capsys.readouterr().err


async def test_workers_and_pools_are_parts_of_the_status(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("workers", "--json") == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    assert workers[1] == {"instance": "d0", "stage": 0, "tp_rank": 1, "device": 5, "pid": 81_235}
    assert await house.run("kv") == 0
    assert re.search(r"p0 +prefill +100 +60 +30 +10 +40.0%", capsys.readouterr().out)


async def test_a_list_that_is_cut_says_so(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    line = RequestLine(
        number=7, label="x-1", state="decode", instance="d0", num_prompt=3, num_output=5,
        num_choices=1, num_retries=0, age_s=1.25, ttft_s=None,
    )  # fmt: skip
    house.operator.answers[GetRequests] = RequestsAre((line,), True, 900)
    assert await house.run("requests", "list", "--state", "decode") == 0
    assert "1 shown, 900 under way; there are more, the list is cut" in capsys.readouterr().out
    assert await house.run("requests", "--slow", "1") == 0
    assert house.operator.heard == [GetRequests("decode"), GetRequests(slowest=1)]


async def test_watch_asks_again_until_interrupted(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    assert await house.run("status", "--watch", "0.5", "--json", wait=wait) == 130
    assert waits == [0.5] * 3
    assert len(capsys.readouterr().out.splitlines()) == 3


async def test_a_drain_that_is_not_done_in_time_exits_with_5(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("drain", "--deadline", "0.05", "--json") == 5
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert shown["error"]["code"] == "timeout"


async def test_undrain_is_refused_with_6_unless_the_node_drains(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("undrain") == 6
    assert "the node is not draining" in capsys.readouterr().err
    house.operator.state = NodeState.DRAINING
    assert await house.run("undrain") == 0
    assert house.operator.state is NodeState.READY


async def test_a_dry_run_says_what_would_be_and_orders_nothing(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("drain", "d0", "--dry-run") == 0
    assert capsys.readouterr().out == "the node would take nothing new\n"
    assert house.operator.heard == [Drain(120.0, "d0", dry_run=True)]
    assert house.operator.orders == []


async def test_a_script_runs_until_its_first_failure_and_keeps_its_code(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    house.operator.answers[GetConfig] = ConfigIs({"port": 8000, "model": None})
    script = tmp_path / "script"
    script.write_text("# first\nconfig --json\n\nrestart d0 --deadline 3\nundrain\nconfig\n")
    assert await house.run("-f", str(script)) == 6
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[0])["config"]["port"] == 8000
    assert "line 5: the node is not draining" in told.err
    assert house.operator.orders[:-1] == [Restart("d0", 3.0)]
    assert len([c for c in house.operator.heard if isinstance(c, GetConfig)]) == 1


async def test_what_stands_in_a_script_may_not_go_elsewhere(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script"
    for line, told in (
        ("status --run-dir /elsewhere", "is for the start of the console"),
        ("keygen /elsewhere", "only a command that asks the daemon"),
        ("-f -", "only a command that asks the daemon"),
        ('status "', "No closing quotation"),
    ):
        script.write_text(line + "\n")
        assert await house.run("-f", str(script)) == 64
        shown = capsys.readouterr().err
        assert "line 1: " in shown
        assert told in shown


async def test_a_script_that_is_not_there_is_named_with_the_reason(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("-f", "/nowhere/script") == 64
    told = capsys.readouterr().err
    assert told == "distserve: /nowhere/script cannot be read: No such file or directory\n"


async def test_a_log_level_takes_a_logger_and_a_time(house: House) -> None:
    assert await house.run("log-level", "debug", "daemon.serve", "--for", "60") == 0
    assert house.operator.orders == [SetLogLevel("debug", "daemon.serve", 60.0)]


def test_without_a_daemon_the_console_exits_with_3_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.main(["status", "--run-dir", str(tmp_path)]) == 3
    assert "is it running?" in capsys.readouterr().err


def test_a_dead_daemons_socket_exits_with_3(tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path / 'live.ipc'}")
    os.link(tmp_path / "live.ipc", tmp_path / "admin.ipc")
    context.destroy(linger=0)
    assert console.main(["status", "--json", "--run-dir", str(tmp_path)]) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_another_users_run_directory_exits_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        code = console.main(["status", "--run-dir", str(tmp_path / "run")])
    finally:
        os.seteuid(0)
    assert code == 4
    assert "another user's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "a prompt needs a terminal"),
        ("reboot", "there is no 'reboot'"),
        ("statsu", "did you mean status?"),
        ("requests shwo 3", "did you mean show?"),
        ("drain --deadline soon", "invalid seconds value: 'soon'"),
        ("drain --deadline -1", "from above 0 to a day"),
        ("drain --deadline 1e9", "from above 0 to a day"),
        ("requests show 3 4", "unrecognized arguments: 4"),
        ("requests list --slow 1000", "a number from 1 to 200"),
        ("scale add both", "there are: prefill, decode, mixed"),
        ("restart", "the following arguments are required: ID"),
        ("plan check /nowhere/plan.json", "/nowhere/plan.json cannot be read"),
        ("--connect tcp://h:1 status", "--connect takes --keys too"),
        ("-f - status", "exclude each other"),
    ],
)
async def test_wrong_usage_exits_with_64_and_says_what_was_meant(
    house: House, line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run(*line.split()) == 64
    assert told in capsys.readouterr().err
    assert house.operator.heard == []
