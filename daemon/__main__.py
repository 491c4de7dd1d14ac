"""The `distserve` command: a table of commands and what each hands over to.

`serve`, `console` and `models` run here; the others are handed over to a process of the room that
they belong to.
"""

import argparse
import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, get_args

from daemon import config_command, console, models, serve
from daemon.api_keys import add_key, entry_of, make_key
from daemon.config import DaemonConfig, LogFormat, LogLevel, read_config
from daemon.errors import ExitError
from daemon.link_keys import make_keys
from daemon.worker_process import compute_environment
from ipc import journal
from ipc.messages import LoadFormat
from ipc.vocabulary import DeviceKind, DType, PrefillPolicy

EXIT_USAGE = 64

USAGE = """usage: distserve COMMAND [options]

  serve     run the node's daemon: workers, HTTP, console (distserve serve --help)
  console   look at a running daemon, and operate it (distserve console --help)
  config    check a configuration, or show what is in effect (distserve config --help)
  api-key   make a key for a client of the API (distserve api-key --help)
  keygen    make the keys for links between nodes (distserve keygen --help)
  models    fetch a model, the embedded default one or a hub's (distserve models --help)
  profile   measure step times and L_m of a worker into a table (distserve profile --help)
  check-gpu prove a GPU, stage by stage (distserve check-gpu --help)
  plan      find the best placement for a load and its SLO (distserve plan --help)
  simulate  predict TTFT, TPOT, attainment and goodput of a deployment (distserve simulate --help)
  bench     replay a workload against a running service (distserve bench --help)
  report    the DistServe paper's figures beside this planner's (distserve report --help)
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or the class's of the error that ended the command (sysexits)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"distserve {importlib.metadata.version('distserved')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"distserve: there is no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return command(arguments[1:])
    except ExitError as error:
        print(f"distserve {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_code


def serve_command(argv: list[str]) -> int:
    flags = vars(_serve_parser().parse_args(argv))
    config_file = flags.pop("config")
    read = functools.partial(read_config, Path(config_file) if config_file else None, flags)
    config = read()
    os.umask(0o077)  # whatever it and its workers write is theirs alone
    os.environ[journal.LOG_FORMAT] = config.log_format
    journal.set_up(logging.getLevelNamesMapping()[config.log_level.upper()])
    serve.run(config, read)
    return 0


def keygen_command(argv: list[str]) -> int:
    parser = _Parser(
        prog="distserve keygen",
        description="Make the keys for the links between nodes. Copy the directory to each of them "
        "and name it there: distserve serve --link-keys DIR.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    print(f"wrote {make_keys(parser.parse_args(argv).directory)}")
    return 0


def api_key_command(argv: list[str]) -> int:
    """The key goes to stdout and nowhere else; what is kept is its hash."""
    parser = _Parser(
        prog="distserve api-key",
        description="Make a key for a client of the API. It is told once; its hash is for the file "
        "that api_keys names. A running daemon reads that again by SIGHUP (systemctl reload).",
    )
    parser.add_argument("name", metavar="NAME", help="who will use it; stands in the request log")
    parser.add_argument("--file", type=Path, metavar="FILE", help="add the hash to this file")
    asked = parser.parse_args(argv)
    key = make_key()
    if asked.file is None:
        print(f"for the file of api_keys:\n\n{entry_of(asked.name, key)}", file=sys.stderr)
    else:
        add_key(asked.file, asked.name, key)
        print(f"added to {asked.file}; the key of {asked.name}, told this once:", file=sys.stderr)
    print(key)
    return 0


def profile_command(argv: list[str]) -> int:
    """Replaces this process: the table is made where torch is, in a worker's own environment."""
    python = [sys.executable, "-P", "-m", "gpu_workers", "profile", *argv]
    threads = argparse.ArgumentParser(add_help=False)
    threads.add_argument("--threads", nargs="?", default="1", const="1")
    given = threads.parse_known_args(argv)[0].threads
    # What is no number is refused by whoever reads all of them.
    os.execve(sys.executable, python, compute_environment(int(given) if given.isdecimal() else 1))


def check_gpu_command(argv: list[str]) -> int:
    """Replaces this process: a device is used where torch is."""
    python = [sys.executable, "-P", "-m", "gpu_workers", "check-gpu", *argv]
    os.execve(sys.executable, python, compute_environment(1))


def planner_command(name: str) -> Callable[[list[str]], NoReturn]:
    """Replaces this process too: a search or a replay never shares the daemon's."""

    def command(argv: list[str]) -> NoReturn:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "planner", name, *argv])

    return command


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve_command,
    "console": console.main,
    "config": lambda argv: config_command.main(argv, _serve_parser()),
    "api-key": api_key_command,
    "keygen": keygen_command,
    "models": models.main,
    "profile": profile_command,
    "check-gpu": check_gpu_command,
    "plan": planner_command("plan"),
    "simulate": planner_command("simulate"),
    "bench": planner_command("bench"),
    "report": planner_command("report"),
}


class _Parser(argparse.ArgumentParser):
    """argparse with sysexits' code for wrong usage, which a service manager need not try again."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


def _addresses(text: str) -> dict[str, dict[str, str]]:
    """`n0=tcp://10.0.0.1:7400,n1=...` as the file would have it."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name: {"address": address} for name, _, address in pairs}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _values(kind: type[StrEnum]) -> list[str]:
    """As argparse is to tell them: it would show the members of an enum in Python's words."""
    return [member.value for member in kind]


def _serve_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="distserve serve",
        description="Run the daemon of one node. Every option may also stand in a TOML file, "
        "with underscores for dashes; a flag wins over the file.",
        epilog="example: distserve serve --model models/smollm2 --prefill 1 --decode 1 --port 8000",
    )
    parser.add_argument("--config", help="TOML file with any of the options below", metavar="FILE")
    defaults = DaemonConfig()

    def option(name: str, text: str, **how: Any) -> None:
        default = getattr(defaults, name.replace("-", "_"))
        told = "" if default in (None, {}, ()) else f" (default {default})"
        parser.add_argument(f"--{name}", help=text + told, **how)

    option("model", "local Hugging Face directory", metavar="DIR")
    option("served-model-name", "the model's id in the API (default: the directory's name)")
    option("host", "address to listen on")
    option("port", "port to listen on", type=int)
    option("admin-host", "loopback address of the status page and its /metrics, or none")
    option("admin-port", "its port; where somebody has it, the daemon serves without", type=int)
    option("otlp-endpoint", "where traces of requests go, by OTLP over HTTP (needs the extra otel)",
           metavar="URL")  # fmt: skip
    option("max-connections", "HTTP connections that may be open (default: what the limit on open "
           "files leaves, at most 16384)", type=int, metavar="N")  # fmt: skip
    option("max-connections-per-peer", "the same, from one address (default: three quarters)",
           type=int, metavar="N")  # fmt: skip
    option("cors-origins", "origins whose web pages may read answers, * for any (default: none)",
           type=_words, metavar="ORIGIN,...")  # fmt: skip
    for role, what in (
        ("prefill", "only prefill"),
        ("decode", "only decode"),
        ("mixed", "do both"),
    ):
        option(role, f"instances that {what}", type=int, metavar="N")
        option(f"{role}-tp", "tensor-parallel workers of each stage of them", type=int, metavar="N")
        option(f"{role}-pp", "pipeline stages of each of them", type=int, metavar="N")
    option("api-keys", "file with the keys of those who may use the API (`distserve api-key`); "
           "read again by SIGHUP", metavar="FILE")  # fmt: skip
    option("insecure", "listen for other machines though nobody is asked for a key",
           action="store_true", default=None)  # fmt: skip
    option("placement", "in place of counts and shapes: a file by `distserve plan`, or auto to let "
           "the planner choose for this machine and these:", metavar="FILE|auto")  # fmt: skip
    option("workload", "auto: what is sent, in the words of `distserve plan`", metavar="NAME|CSV")
    option("rate", "auto: requests per second to carry (default: the best unit)", type=float)
    option("ttft", "target for the time to first token, such as 200ms: what auto plans for, slo "
           "refuses by and metrics are judged by", metavar="TIME")  # fmt: skip
    option("tpot", "the same for the time per output token (not slo)", metavar="TIME")
    option("profile", "auto, slo: a table by `distserve profile` (default: a rough sheet of a "
           "core; slo: what is measured while it serves)", metavar="FILE")  # fmt: skip
    option("node", "this node's name in the placement (default: the only one there, else the "
           "host's)", metavar="NAME")  # fmt: skip
    option("nodes", "where the daemons of nodes that share instances listen for each other; in the "
           "file [nodes.NAME]", type=_addresses, metavar="NAME=tcp://HOST:PORT,...")  # fmt: skip
    option("link-keys", "directory of `distserve keygen`, which these nodes need", metavar="DIR")
    option("link-timeout-s", "silence after which a joined node is taken for lost", type=float)
    option("chunk-tokens", "mixed instances: token budget of a step, prompts in chunks; "
           "without it, waiting prompts run whole and first", type=int, metavar="N")  # fmt: skip
    option("dtype", "weights, activations and KV cache", choices=_values(DType))
    option("device", "what workers compute on; auto: GPUs where there are any",
           choices=_values(DeviceKind))  # fmt: skip
    option("share-gpus", "more workers than GPUs: they take turns, or share by MPS; for "
           "development and small deployments", action="store_true", default=None)  # fmt: skip
    option("gpu-memory-utilization", "share of its GPU's memory that a worker may take: what "
           "weights, steps and graphs leave of it is the KV pool, in place of kv-cache-gib",
           type=float)  # fmt: skip
    option("load-format", "dummy: random weights, for benchmarks", choices=_values(LoadFormat))
    option("max-context-tokens", "longest prompt + output (default: the model's own)", type=int)
    option("kv-cache-gib", "KV pool of each worker in GiB", type=float)
    option("prefill-kv-cache-gib", "the same, for prefill instances alone", type=float)
    option("decode-kv-cache-gib", "the same, for decode instances alone", type=float)
    option("block-size", "tokens in a KV block", type=int)
    option("prefill-tokens", "L_m: prompts are packed up to this many tokens; "
           "`distserve profile` measures it; a placement file's own wins", type=int)  # fmt: skip
    option("prefill-policy", "fcfs: prompts are read in the order of their arrival (the default); "
           "skip-join: short ones first, long ones in chunks of L_m, and nobody waits for ever; "
           "chunk-tokens has an order of its own", choices=_values(PrefillPolicy))  # fmt: skip
    option("max-batch", "choices that decode together at most", type=int)
    option("max-queued", "requests that may wait before 429 is answered", type=int)
    option("admission", "full: nobody is refused until max-queued wait; slo: nor who would have to "
           "wait past --ttft", choices=["full", "slo"])  # fmt: skip
    option("queue-timeout-s", "seconds a request may wait for its prefill, then 429", type=float)
    option("request-timeout-s", "seconds a request may take in all, then 504", type=float)
    option("outage-timeout-s", "seconds a request waits for an instance to come up, then 503",
           type=float)  # fmt: skip
    option("max-retries", "how often what a failed worker had of a request is done again", type=int)
    option("threads-per-worker", "compute threads (default: an equal share of the cores)", type=int)
    option("devices", "cores of each device, such as 0-3,4-7: workers are pinned to them (default: "
           "all cores in equal shares); or GPUs by number, range or UUID, such as 0-3 or "
           "GPU-8932f937; no other daemon may have them",
           type=_words, metavar="NAME,...")  # fmt: skip
    option("drain-s", "seconds that running requests get at the end", type=float)
    option("quarantine-deaths", "deaths of workers within 10 minutes after which a device is "
           "left alone while the others can serve; 0: never", type=int)  # fmt: skip
    option("start-timeout-s", "seconds a worker may take to be ready", type=float)
    option("wedged-after-s", "seconds without progress after which an instance is replaced",
           type=float)  # fmt: skip
    option("run-dir", "where the sockets live (default: $RUNTIME_DIRECTORY, "
           "$XDG_RUNTIME_DIR/distserved or /tmp/distserved-UID)", metavar="DIR")  # fmt: skip
    option("admin-address", "where consoles may come over TCP, with keys (default: nowhere; the "
           "socket in the run directory is always there)", metavar="tcp://HOST:PORT")  # fmt: skip
    option("admin-keys", "directory of `distserve console keygen`, which that needs", metavar="DIR")
    option("log-level", "the least that is logged", choices=get_args(LogLevel))
    option("log-format", "lines for people (with priorities where they go to the journal), or "
           "objects", choices=get_args(LogFormat))  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
