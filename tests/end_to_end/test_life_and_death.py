"""Starting, stopping, dying and leaving: what a service of real processes leaves behind."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.service import Service, eventually, serving, starting

FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02")
STREAM = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
PATH = "/v1/completions"


def stream_lines(service: Service, first: threading.Event, body: dict[str, object]) -> list[str]:
    """All lines of a stream; `first` is set with the first one."""
    lines = []
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                lines.append(line)
                first.set()
    return lines


def tokens_by_choice(lines: list[str]) -> list[list[int]]:
    """What a stream of token ids told of each choice; it must end as it should."""
    assert lines[-1] == "data: [DONE]", lines[-2]
    found: dict[int, list[int]] = {}
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return [found[index] for index in sorted(found)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def open_files(process: psutil.Process) -> int:
    return process.num_fds()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_killing_the_daemon_takes_its_workers_along_and_a_new_one_starts_at_once_C1_C7(
    tiny_llama: Path,
) -> None:
    before = shared_memory()
    with serving(tiny_llama, *FLAGS) as service:
        workers = list(service.workers().values())
        assert len(workers) == 2
        service.process.kill()
        service.process.wait()
        eventually(lambda: all(map(is_gone, workers)), 1.0, "workers gone with the daemon")
        command = ["--port", "0", "--run-dir", str(service.run_dir)]
        with serving(tiny_llama, *FLAGS, *command) as again:
            assert again.complete("hello")["choices"]
    assert shared_memory() == before


def test_sigterm_lets_running_streams_finish_and_leaves_nothing_C5_B25(tiny_llama: Path) -> None:
    before = shared_memory()
    with serving(tiny_llama, *FLAGS) as service, ThreadPoolExecutor() as pool:
        workers = list(service.workers().values())
        first = threading.Event()
        stream = pool.submit(stream_lines, service, first, STREAM | {"max_tokens": 100})
        assert first.wait(10)
        assert service.stop() == 0
        lines = stream.result()
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        assert os.listdir(service.run_dir) == ["lock"]
    assert all(map(is_gone, workers))
    assert shared_memory() == before


def test_what_does_not_finish_within_the_drain_time_ends_by_a_clear_error_C9(
    tiny_llama: Path,
) -> None:
    flags = (*FLAGS, "--drain-s", "0.2", "--max-context-tokens", "512")
    with serving(tiny_llama, *flags) as service, ThreadPoolExecutor() as pool:
        body = STREAM | {"max_tokens": 500}
        started = [threading.Event() for _ in range(4)]
        streams = [pool.submit(stream_lines, service, first, body) for first in started]
        assert all(first.wait(10) for first in started)
        assert service.stop() == 0
        for lines in [stream.result() for stream in streams]:
            assert lines[-1] == "data: [DONE]"
            assert "stopped before this request could finish" in lines[-2]
            assert '"error"' in lines[-2]


def test_a_draining_service_refuses_and_says_so(tiny_llama: Path) -> None:
    with serving(tiny_llama, *FLAGS) as service:
        console = [sys.executable, "-P", "-m", "daemon", "console"]
        drain = [*console, "drain", "--run-dir", str(service.run_dir)]
        assert subprocess.run(drain, timeout=20).returncode == 0
        refused = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "draining"
        assert httpx.get(f"{service.url}/health").status_code == 503
        undrain = [*console, "undrain", "--run-dir", str(service.run_dir)]
        assert subprocess.run(undrain, timeout=20).returncode == 0
        assert service.complete("hello")["choices"]


def test_a_worker_s_death_is_unseen_by_the_clients_it_was_working_for_B1(
    tiny_service: Service,
) -> None:
    service = tiny_service
    body = STREAM | {"n": 4, "max_tokens": 300, "seed": 5, "return_token_ids": True}
    undisturbed = tokens_by_choice(stream_lines(service, threading.Event(), body))
    assert [len(token_ids) for token_ids in undisturbed] == [300] * 4
    for victim in ("decode-0", "prefill-0"):
        worker = service.workers()[victim]
        # Not at the first tokens, which are the prefill's; and in one thread, so that the kill is
        # not late.
        with service.client() as client, client.stream("POST", PATH, json=body) as response:
            stream = response.iter_lines()
            lines = [line for line in itertools.islice(stream, 100) if line]
            worker.send_signal(signal.SIGKILL)
            lines += [line for line in stream if line]
        assert tokens_by_choice(lines) == undisturbed
        eventually(
            lambda: httpx.get(f"{service.url}/health").status_code == 200, 60, "healthy again"
        )
        assert service.workers()[victim].pid != worker.pid
        assert service.complete("hello")["choices"]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_who_comes_while_the_only_one_of_its_role_starts_again_is_served_B1(
    tiny_service: Service, victim: str
) -> None:
    """Health says 503 then, but a newcomer only waits, as those do who came before."""
    service = tiny_service
    expected = service.complete("hello")["choices"]
    service.workers()[victim].kill()
    health = f"{service.url}/health"
    eventually(lambda: httpx.get(health).status_code == 503, 20, "its death is seen")
    assert service.complete("hello")["choices"] == expected
    assert httpx.get(health).status_code == 200


def test_a_second_daemon_is_refused_by_run_directory_and_by_port_C11_C18(
    tiny_service: Service, tiny_llama: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "daemon", "serve", "--model", str(tiny_llama)]
    port = tiny_service.url.rsplit(":", 1)[1]
    for flags, why in (
        (["--port", "0", "--run-dir", str(tiny_service.run_dir)], "is held by the daemon"),
        (["--port", port, "--run-dir", str(tmp_path)], "is in use"),
    ):
        ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=20)
        assert ended.returncode == 75
        assert why in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--model", "/nowhere"], 78, r"/nowhere: no config\.json there"),
        (["--prefill", "0"], 78, "nobody prefills"),
        (["--block-size", "0"], 78, "--block-size: it must be at least 1"),
        (["--max-context-tokens", "100000"], 78, "the model was made for 512"),
        (["--kv-cache-gib", "0.0000001"], 78, "hold no block"),
        (["--decode-tp", "4"], 78, "decode-0 cannot run: tp 4 does not divide the 6 attention"),
        (["--kv-cache-gib", "100000"], 78, "of memory .* this machine has"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_an_exit_code_B9(
    tiny_llama: Path, tmp_path: Path, flags: list[str], code: int, why: str
) -> None:
    command = [sys.executable, "-P", "-m", "daemon", "serve", "--port", "0"]
    command += ["--model", str(tiny_llama), "--run-dir", str(tmp_path), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert ended.returncode == code, ended.stderr
    assert re.search(why, ended.stderr.splitlines()[-1])


def test_two_hundred_requests_with_random_aborts_leave_everything_as_it_was_A14_C2(
    tiny_service: Service,
) -> None:
    service = tiny_service
    service.complete("warm up")
    daemon = psutil.Process(service.process.pid)
    processes = [daemon, *daemon.children()]
    eventually(lambda: service.is_all_free, 20, "all blocks free")
    before = {process.pid: open_files(process) for process in processes}
    sockets = set(os.listdir(service.run_dir))
    segments = shared_memory()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: one_of_many(service, i), range(200)))
    eventually(lambda: service.is_all_free, 10, "all blocks free after the aborts")
    assert {p.pid for p in daemon.children()} == {p.pid for p in processes[1:]}
    eventually(
        lambda: all(open_files(p) <= before[p.pid] for p in processes), 10, "descriptors back"
    )
    assert set(os.listdir(service.run_dir)) == sockets
    assert shared_memory() == segments
    assert service.counts()["prefill-0"]["audit_failures"] == 0
    assert service.counts()["decode-0"]["audit_failures"] == 0


def one_of_many(service: Service, i: int) -> None:
    """Whole, streamed, several choices; a third of them left in the middle."""
    body: dict[str, object] = {
        "prompt": "x" * (1 + 7 * i % 90),
        "max_tokens": 1 + i % 40,
        "n": 1 + i % 2,
        "seed": i,
        "stream": i % 3 != 0,
        "ignore_eos": True,
    }
    with (
        httpx.Client(base_url=service.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        if i % 3 == 1:
            for count, _ in enumerate(response.iter_bytes()):
                if count >= i % 5:
                    return
        else:
            response.read()


def test_a_client_that_leaves_frees_both_sides_at_once_F14(tiny_service: Service) -> None:
    service = tiny_service
    eventually(lambda: service.is_all_free, 20, "all blocks free")
    body = STREAM | {"max_tokens": 450}
    with service.client() as client, client.stream("POST", PATH, json=body) as response:
        next(response.iter_lines())
    eventually(lambda: service.is_all_free, 1, "blocks free after the client left")
    whole = body | {"stream": False, "n": 8}
    with pytest.raises(httpx.ReadTimeout):  # the client gives up waiting
        httpx.post(f"{service.url}/v1/completions", json=whole, timeout=0.3)
    eventually(lambda: service.is_all_free, 1, "blocks free after an unstreamed client left")


def test_while_it_starts_it_says_so_and_refuses_B7_D4(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with starting(tiny_llama, *FLAGS, "--port", str(port)) as service:
        eventually(lambda: answers(f"{url}/health/live"), 20, "the listener")
        health = httpx.get(f"{url}/health")
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert not any("is ready: loaded" in line for line in service.lines), "started too fast"
        assert (health.status_code, refused.status_code) == (503, 503)
        assert re.search(r"prefill-0 (starting|loading)", health.json()["error"]["message"])
        assert refused.json()["error"]["code"] == "not_ready"
        service.until_ready()
        assert httpx.get(f"{url}/health").status_code == 200
        assert sum("is ready: loaded" in line for line in service.lines) == 2


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.ConnectError:
        return False


def test_the_service_manager_is_told_of_start_progress_reload_and_stop_C20(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        ThreadPoolExecutor() as pool,
    ):
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        where = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        starts = pool.submit(datagrams_until, manager, "WATCHDOG=1", after="READY=1")
        with serving(tiny_llama, *FLAGS, **where) as service:
            told = starts.result()
            service.process.send_signal(signal.SIGHUP)
            reloads = datagrams_until(manager, "READY=1", after="RELOADING=1")
            stops = pool.submit(datagrams_until, manager, "EXTEND_TIMEOUT", after="STOPPING=1")
            assert service.stop() == 0
        stopping = next(text for text in stops.result() if "STOPPING=1" in text)
    (ready,) = (text for text in told if "READY=1" in text)
    assert any("STATUS=starting: prefill-0 " in text for text in told)
    assert ready == "READY=1\nSTATUS=ready: 0 requests under way"
    assert reloads[-1] == ready
    assert stopping == "STOPPING=1\nSTATUS=draining: 0 requests under way"


def datagrams_until(manager: socket.socket, last: str, *, after: str) -> list[str]:
    """All that comes until one says `last` when another has said `after`."""
    texts = [manager.recv(4096).decode()]
    while not (last in texts[-1] and any(after in text for text in texts)):
        texts.append(manager.recv(4096).decode())
    return texts
