"""Two daemons that share a pair of pipelines: stage 0 of both on n0, the home, stage 1 on n1."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from daemon.link_keys import make_keys
from ipc.placement_file import FileNode, file_of, write_placement
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment
from tests.end_to_end.service import Service, eventually

SILENCE_S = 2.0
BOUND_S = SILENCE_S + 4.0  # with a busy machine's delays
READY_S = 60.0
NODES = ("n0", "n1")
FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--link-timeout-s", str(SILENCE_S))


def pipelines() -> list[InstanceSpec]:
    """A prefill and a decode instance, each with a stage on each node."""
    return [
        InstanceSpec(
            f"{role.value}-0",
            role,
            Parallelism(1, 2),
            tuple(Segment(node, (device,)) for node in NODES),
        )
        for device, role in enumerate((Role.PREFILL, Role.DECODE))
    ]


class Node:
    """One daemon.

    Args:
        inside: the command under which it runs, such as in a network namespace.
    """

    def __init__(self, name: str, flags: Sequence[str], run_dir: Path, inside: Sequence[str] = ()):
        self.name = name
        self.port = free_port()
        self._run_dir = run_dir
        self._command = [*inside, sys.executable, "-P", "-m", "daemon", "serve", *flags]
        self._command += ["--node", name, "--port", str(self.port), "--run-dir", str(run_dir)]
        self.service = self._started()

    def end(self) -> None:
        self.service.process.kill()
        self.service.process.wait()
        self.service.close()

    @property
    def health(self) -> str:
        """The refusal's words; empty when it can serve."""
        reply = httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=10)
        return "" if reply.status_code == 200 else str(reply.json()["error"]["message"])

    def signal(self, number: int) -> None:
        self.service.process.send_signal(number)

    def _started(self) -> Service:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, text=True, env=environment
        )
        service = Service(process, self._run_dir)
        service.url = f"http://127.0.0.1:{self.port}"
        return service


class Pair:
    """The home and its host."""

    def __init__(self, home: Node, host: Node) -> None:
        self.home, self.host = home, host

    @property
    def log(self) -> str:
        return f"{self.home.service.log}\n---- host:\n{self.host.service.log}"

    def until_ready(self) -> None:
        """For the first time."""
        self.home.service.until_ready()
        assert self.home.service.process.poll() is None, self.log

    def until_serving(self) -> None:
        """Again, after something happened."""
        eventually(lambda: self.home.health == "", READY_S, f"both instances up\n{self.log}")


@contextmanager
def node_pair(
    model: Path,
    directory: Path,
    *,
    hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
    inside: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Iterator[Pair]:
    """Both, started together; ended after."""
    flags = [*flags_for(model, directory, hosts), "--link-keys", str(directory / "keys")]
    make_keys(directory / "keys")
    with ExitStack() as undo:
        nodes = []
        for name, within in zip(NODES, inside, strict=True):
            nodes.append(Node(name, flags, directory / name, within))
            undo.callback(nodes[-1].end)
        yield Pair(*nodes)


def flags_for(model: Path, directory: Path, hosts: tuple[str, str]) -> list[str]:
    """All but the keys."""
    file = directory / "placement.json"
    write_placement(file, file_of(model.name, [FileNode(n, 2) for n in NODES], pipelines()))
    addresses = [f"{n}=tcp://{host}:{free_port()}" for n, host in zip(NODES, hosts, strict=True)]
    return ["--model", str(model), *FLAGS, "--placement", str(file), "--nodes", ",".join(addresses)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
