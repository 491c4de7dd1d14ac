"""`distserve models fetch ORG/NAME`: a model from a Hugging Face hub, as data and never as code.

Run in a process of its own by `distserve models`, since what it takes to talk to a hub is not
needed to serve. Safetensors, tokenizer and configuration files of one commit are fetched into a
partial folder, which a fetch that was cut short goes on with; each is checked against the hub's
own checksum, and the folder is moved into place whole, with the commit recorded.
"""

import argparse
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import httpx2
import msgspec
import orjson
from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import http_get
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from daemon.errors import ExitError
from daemon.models import MARKER, FetchFailed, Origin, locked, read_origin, require_space

WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|"
    r"tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|"
    r"chat_template\.(jinja|json)|model\.safetensors\.index\.json|"
    r"model(-[0-9]+-of-[0-9]+)?\.safetensors"
)
"""All that is ever fetched, and from the top of the repository only: no code, no pickles."""
NEEDED = ("config.json", "tokenizer.json")
SPARE_BYTES = 64 << 20


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of the commit. Large files have a SHA-256, the others git's own hash of a blob."""

    name: str
    num_bytes: int
    sha256: str | None
    blob_id: str | None


class Snapshot(msgspec.Struct, frozen=True):
    """One commit of a repository, as far as it is wanted."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def origin(self) -> Origin:
        """The hash is one over all files' names and hashes."""
        lines = sorted(f"{file.name} {file.sha256 or file.blob_id}" for file in self.files)
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return Origin(f"{self.repo}@{self.commit}", digest)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or the class's of what went wrong."""
    parser = argparse.ArgumentParser(prog="distserve models fetch")
    parser.add_argument("repo")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--dir", type=Path, required=True)
    asked = parser.parse_args(argv)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what fails is told by us
    try:
        folder = fetch(asked.repo, asked.revision, asked.dir)
        sys.stderr.write(f"distserve models: ready: {folder}\n")
    except ExitError as error:
        sys.stderr.write(f"distserve: {error}\n")
        return error.exit_code
    return 0


def fetch(repo: str, revision: str, models_dir: Path) -> Path:
    """The folder that holds the model, made now unless that commit is there already.

    Raises:
        FetchFailed: one sentence says what is missing or wrong.
    """
    folder = models_dir / repo.rpartition("/")[2]
    with locked(models_dir), _told(repo, revision):
        snapshot = look_up(repo, revision)
        if folder.exists():
            if (origin := read_origin(folder)) is None:
                raise FetchFailed(
                    f"{folder} exists and was not fetched by this command: move it away"
                )
            if origin == snapshot.origin:
                return folder
            if not origin.requirement.startswith(f"{repo}@"):
                raise FetchFailed(f"{folder} holds {origin.requirement}: move it away")
        partial = models_dir / f".part-{repo.replace('/', '--')}-{snapshot.commit}"
        _download(snapshot, partial)
        _finish(snapshot, partial, folder)
    return folder


def look_up(repo: str, revision: str) -> Snapshot:
    """Which commit a revision is, and what of it is wanted. Raises FetchFailed."""
    info = HfApi(_endpoint()).model_info(repo, revision=revision, files_metadata=True)
    files = tuple(
        RemoteFile(
            name=each.rfilename,
            num_bytes=each.size or 0,
            sha256=each.lfs.sha256 if each.lfs else None,
            blob_id=each.blob_id,
        )
        for each in info.siblings or ()
        if WANTED.fullmatch(each.rfilename)
    )
    names = {file.name for file in files}
    if missing := [name for name in NEEDED if name not in names]:
        raise FetchFailed(f"{repo} has no {' and no '.join(missing)} at {revision}")
    if not any(name.endswith(".safetensors") for name in names):
        raise FetchFailed(f"{repo} has no safetensors at {revision}, and other weights are code")
    if not info.sha:
        raise FetchFailed(f"{repo}: the hub does not say which commit {revision} is")
    return Snapshot(repo, info.sha, files)


def _download(snapshot: Snapshot, partial: Path) -> None:
    """What is not there yet, the small files first; each is checked before it has its name."""
    partial.mkdir(parents=True, exist_ok=True)
    missing = [file for file in snapshot.files if not (partial / file.name).exists()]
    num_bytes = sum(file.num_bytes - _num_begun(partial, file) for file in missing)
    require_space(partial, num_bytes + SPARE_BYTES)
    with _progress() as progress:
        for file in sorted(missing, key=lambda file: file.num_bytes):
            begun = _begun(partial, file)
            with open(begun, "ab") as stream:
                if stream.tell() < file.num_bytes:
                    _get(snapshot, file, stream, _bar_of(progress, file.name))
            check(begun, file)
            begun.rename(partial / file.name)


def _get(snapshot: Snapshot, file: RemoteFile, stream: BinaryIO, bar: type) -> None:
    """The rest of a file. The client's own way to one forgets what a killed process had of it."""
    url = hf_hub_url(snapshot.repo, file.name, revision=snapshot.commit, endpoint=_endpoint())
    http_get(
        url,
        stream,
        resume_size=stream.tell(),
        headers={"authorization": f"Bearer {token}"} if (token := get_token()) else {},
        expected_size=file.num_bytes,
        tqdm_class=cast(Any, bar),
    )


def _begun(partial: Path, file: RemoteFile) -> Path:
    return partial / f"{file.name}.begun"


def _num_begun(partial: Path, file: RemoteFile) -> int:
    path = _begun(partial, file)
    return path.stat().st_size if path.exists() else 0


def check(path: Path, file: RemoteFile) -> None:
    """Raises FetchFailed: it is not what the hub says it is, and is removed."""
    with open(path, "rb") as stream:
        if file.sha256 is not None:
            is_whole = hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
        else:
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
            digest.update(stream.read())
            is_whole = file.blob_id is not None and digest.hexdigest() == file.blob_id
    if not is_whole:
        path.unlink()
        raise FetchFailed(f"{file.name} arrived damaged and was removed: fetch it again")


def _finish(snapshot: Snapshot, partial: Path, folder: Path) -> None:
    (partial / MARKER).write_bytes(orjson.dumps(msgspec.to_builtins(snapshot.origin)))
    if folder.exists():  # an older commit
        replaced = folder.with_name(f".fetch-{folder.name}")
        folder.rename(replaced)
        shutil.rmtree(replaced)
    partial.rename(folder)


@contextmanager
def _told(repo: str, revision: str) -> Iterator[None]:
    """What the hub or the way to it refuses, in a sentence."""
    endpoint = _endpoint()
    try:
        yield
    except HFValidationError as error:
        raise FetchFailed(f"{repo!r} is no ORG/NAME of a hub") from error
    except RepositoryNotFoundError as error:
        raise FetchFailed(
            f"{endpoint} has no model {repo}, or does not show it to us (HF_TOKEN)"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise FetchFailed(
            f"{endpoint} answers {status} for {repo} at {revision}"
            + (": there is no such revision" if status == 404 else "")
        ) from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise FetchFailed(
            f"{repo} could not be fetched from {endpoint}: {error}; what has come is kept, and the "
            "next fetch goes on from there"
        ) from error


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))


def _bar_of(progress: Progress, name: str) -> type:
    """The face that the client expects of a progress bar, for one of rich's."""

    class Bar:
        def __init__(
            self, _: Iterable[object] = (), *, total: int | None, initial: int, **__: Any
        ) -> None:
            self._task = progress.add_task(name, total=total, completed=initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, num_bytes: float) -> None:
            progress.advance(self._task, num_bytes)

        def close(self) -> None: ...

    return Bar


if __name__ == "__main__":
    sys.exit(main())
