"""Every command of the console against a live daemon, and what hostile consoles can do to it."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from daemon import console
from daemon.admin_keys import make_console_keys
from tests.end_to_end.service import Service, eventually, serving
from tests.systemd.tiny_model import make

FLAGS = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-gib", "0.02")
NOBODY = 65534


class Live:
    """The service, and a console that is called as from a shell."""

    def __init__(self, service: Service, address: str, keys: Path) -> None:
        self.service = service
        self.address = address
        self.keys = keys

    def run(self, *argv: str) -> int:
        return console.main([*argv, "--run-dir", str(self.service.run_dir)])

    def start(self, *argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "daemon", "console", *argv]
        command += ["--run-dir", str(self.service.run_dir)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("console")
    make_console_keys(folder / "keys", "ops")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    remote = ("--admin-address", address, "--admin-keys", str(folder / "keys"))
    (folder / "tiny").mkdir()
    with serving(make(folder / "tiny"), *FLAGS, *remote) as service:
        yield Live(service, address, folder / "keys")


Shown = Callable[..., dict[str, Any]]


@pytest.fixture
def shown(live: Live, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs a command that succeeds and reads its object."""

    def show(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        code = live.run(*argv, "--json")
        told = capsys.readouterr()
        assert code == 0, told.err
        found: dict[str, Any] = json.loads(told.out)
        assert (found.pop("v"), found.pop("ok")) == (1, True)
        return found

    return show


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("status", {"state", "model", "instances", "requests", "uptime_s"}),
        ("instances", {"instances"}),
        ("instances decode-0", {"instances"}),
        ("workers", {"workers"}),
        ("requests", {"requests", "is_truncated", "num_open"}),
        ("requests list --state finished", {"requests", "is_truncated"}),
        ("requests list --slow 5", {"requests"}),
        ("kv pools", {"instances"}),
        ("kv audit", {"books"}),
        ("slo", {"targets", "windows"}),
        ("plan show", {"placement"}),
        ("trace --last 2", {"timelines", "now_s"}),
        ("config", {"config"}),
        ("events", {"events", "next_after", "num_lost"}),
        ("version", {"version", "worker_protocol", "pid"}),
        ("ping", {"answered_after_s"}),
        ("drain --dry-run", {"sentences"}),
        ("restart decode-0 --dry-run", {"sentences"}),
        ("scale add decode --dry-run", {"sentences"}),
        ("log-level debug --dry-run", {"sentences"}),
        ("shutdown --now --dry-run", {"sentences"}),
    ],
)
def test_what_is_asked_is_answered_for_programs_and_for_people(
    live: Live, shown: Shown, line: str, keys: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    live.service.complete([5, 6, 7], max_tokens=4)
    assert keys <= shown(*line.split()).keys()
    assert live.run(*line.split()) == 0
    assert capsys.readouterr().out.strip()


def test_an_audit_of_idle_pools_agrees(shown: Shown) -> None:
    books = shown("kv", "audit")["books"]
    assert {book["instance"] for book in books} == {"prefill-0", "decode-0"}
    for book in books:
        assert (book["has_answered"], book["faults"]) == (True, 0)
        assert book["blocks"]["free"] == book["blocks"]["total"] > 0


def test_a_request_is_traced_and_its_chrome_trace_written(
    live: Live, shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live.service.complete([5, 6, 7], max_tokens=4)
    (timeline,) = shown("trace", "--last", "1")["timelines"]
    assert timeline["spans"][0]["stage"] == "prefill_queue"
    number = str(timeline["number"])
    assert shown("requests", "show", number)["timelines"] == [timeline]
    assert live.run("trace", number, "--chrome", str(tmp_path / "trace.json")) == 0
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert {"prefill", "decode"} <= {event["name"] for event in events}
    assert live.run("requests", "show", "no-such") == 6
    assert "no request 'no-such' is open" in capsys.readouterr().err


def test_a_running_request_is_listed_and_can_be_aborted(live: Live, shown: Shown) -> None:
    body = {"prompt": [5, 6], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"{live.service.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60.0) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        (request,) = shown("requests")["requests"]
        assert request["state"] in ("decode", "handoff", "prefill")
        number = str(request["number"])
        assert "after" in shown("requests", "abort", number, "--dry-run")["sentences"][0]
        assert shown("requests", "abort", number)["said"] == f"request {number} is ended"
        rest = list(lines)
    assert any("aborted_by_operator" in line for line in rest)
    assert live.run("requests", "abort", number) == 6
    ended = shown("requests", "list", "--state", "failed")["requests"]
    assert number in [str(request["number"]) for request in ended]


def test_a_drained_node_refuses_and_takes_requests_again(live: Live, shown: Shown) -> None:
    assert shown("drain", "--deadline", "30")["said"] == "drained"
    try:
        assert shown("status")["state"] == "draining"
        refused = httpx.post(f"{live.service.url}/v1/completions", json={"prompt": [5]})
        assert refused.status_code == 503
    finally:
        assert live.run("undrain") == 0
    live.service.complete([5, 6, 7], max_tokens=2)


def test_a_drained_instance_gets_nothing_until_it_is_taken_back(live: Live, shown: Shown) -> None:
    shown("drain", "decode-0", "--deadline", "30")
    (told,) = shown("instances", "decode-0")["instances"]
    assert told["state"] == "draining"
    shown("undrain", "decode-0")
    assert live.run("undrain", "decode-0") == 6
    assert live.run("drain", "decode-9") == 6
    live.service.complete([5, 6, 7], max_tokens=2)


def test_a_restart_replaces_the_process_and_is_told_among_the_events(
    live: Live, shown: Shown
) -> None:
    before = shown("workers")["workers"]
    after = shown("events")["next_after"]
    assert shown("restart", "decode-0", "--deadline", "10")["said"] == "decode-0 can serve again"
    now = shown("workers")["workers"]
    assert {w["pid"] for w in before} != {w["pid"] for w in now}
    told = [e for e in shown("events")["events"] if e["number"] > after]
    kinds = [e["kind"] for e in told if e["subject"] == "decode-0"]
    assert kinds == ["stopped", "started", "ready"]
    live.service.complete([5, 6, 7], max_tokens=2)
    assert "admin console: Restart instance=decode-0 deadline_s=10.0, by user" in live.service.log


def test_an_instance_is_added_and_removed(live: Live, shown: Shown) -> None:
    assert shown("scale", "add", "decode")["said"] == "decode-1 can serve"
    assert [i["name"] for i in shown("instances")["instances"]][-1] == "decode-1"
    assert shown("scale", "remove", "decode-1")["said"] == "decode-1 is gone"
    assert live.run("scale", "remove", "decode-0") == 6
    assert live.run("scale", "add", "decode", "--tp", "7") == 6


def test_the_placement_that_is_shown_can_be_checked_and_applied(
    live: Live, shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = shown("plan", "show")["placement"]
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(placement))
    assert shown("plan", "check", str(file))["sentences"] == ["keep prefill-0, decode-0"]
    assert shown("plan", "apply", str(file))["said"] == "the placement is taken over"
    file.write_text("{}")
    assert live.run("plan", "apply", str(file)) == 6
    assert "no placement file" in capsys.readouterr().err


def test_a_log_level_goes_back_by_itself(live: Live, shown: Shown) -> None:
    said = shown("log-level", "debug", "daemon.serve", "--for", "0.05")["said"]
    assert said == "the logger daemon.serve: debug, for 0.05 s"
    live.service.until_told("the log level of daemon.serve is the root's again")


def test_a_console_with_keys_comes_in_over_tcp_and_one_without_does_not(
    live: Live, tmp_path: Path
) -> None:
    keys = str(live.keys / "ops.key")
    assert live.run("status", "--connect", live.address, "--keys", keys) == 0
    stranger = make_console_keys(live.keys, "stranger")  # the daemon has read whom it lets in
    assert live.run("status", "--connect", live.address, "--keys", str(stranger)) == 4


def test_garbage_is_answered_with_an_error_and_the_service_goes_on(live: Live) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as hostile:
        hostile.setsockopt(zmq.LINGER, 0)
        hostile.connect(f"ipc://{live.service.run_dir / 'admin.ipc'}")
        for body in (b"", b"\xff" * 1000, b"[" * 50_000, b'{"version": 1}'):
            hostile.send(body)
            assert json.loads(hostile.recv())["answer"]["code"] == "bad_request"
    context.term()
    live.service.complete([5, 6, 7], max_tokens=2)
    assert live.run("ping") == 0


def test_a_follower_that_is_stopped_harms_nobody_and_misses_nothing_C21(
    live: Live, shown: Shown
) -> None:
    with live.start("events", "--follow", "--json") as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["kind"]
        os.kill(follower.pid, signal.SIGSTOP)
        for _ in range(50):
            shown("log-level", "info", "daemon.nobody")
        live.service.complete([5, 6, 7], max_tokens=2)
        last = shown("events")["next_after"]
        os.kill(follower.pid, signal.SIGCONT)
        told = json.loads(follower.stdout.readline())
        numbers = [told["number"]]
        while numbers[-1] < last:
            numbers.append(json.loads(follower.stdout.readline())["number"])
        follower.send_signal(signal.SIGINT)
    assert numbers == list(range(numbers[0], last + 1))
    assert follower.returncode == 130


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_another_user_is_refused_even_where_the_socket_can_be_reached(live: Live) -> None:
    run_dir = live.service.run_dir
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, run_dir / "admin.ipc")}
    try:
        for path in modes:
            path.chmod(0o777)
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setuid(NOBODY)
            os._exit(live.run("status"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    live.service.until_told(f"admin console: refused user {NOBODY}")


def test_a_shutdown_ends_what_is_under_way_and_the_daemon(live: Live, shown: Shown) -> None:
    answers: list[httpx.Response] = []
    body = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True}
    url = f"{live.service.url}/v1/completions"
    waiting = threading.Thread(
        target=lambda: answers.append(httpx.post(url, json=body, timeout=60.0))
    )
    waiting.start()
    eventually(lambda: shown("requests")["num_open"] == 1, 20, "the request is under way")
    assert shown("shutdown", "--now")["said"] == "the daemon drains and ends"
    waiting.join(30)
    assert answers[0].status_code == 503
    assert live.service.process.wait(30) == 0
    assert live.run("status") == 3
