"""A Hugging Face hub with one repository, as far as its client asks: what is there, and bytes."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 1 << 16


class FakeHub:
    """`files` by name; large ones have a SHA-256. A test may cut answers short, or spoil them."""

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo = repo
        self.commit = COMMIT
        self.files = files
        self.asked: list[tuple[str, str | None]] = []  # names that were fetched, with their range
        self.spoiled: set[str] = set()
        self.cut: str | None = None  # this file ends half way, and nothing comes after it
        self._is_down = False
        self.url = ""

    def is_large(self, name: str) -> bool:
        return len(self.files[name]) > LARGE_BYTES

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def blob_id(self, name: str) -> str:
        data = self.files[name]
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = self.blob_id(name)
            if self.is_large(name):
                lfs = {"sha256": self.sha256(name), "size": len(data), "pointerSize": 130}
                entry["lfs"] = lfs
            siblings.append(entry)
        return {"id": self.repo, "modelId": self.repo, "sha": self.commit, "siblings": siblings}

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def mend(self) -> None:
        self.cut, self._is_down = None, False
        self.spoiled.clear()

    def take(self, name: str, asked_range: str | None) -> tuple[int, bytes, bytes]:
        """Status, the bytes that are announced, and those that are sent."""
        self.asked.append((name, asked_range))
        if self._is_down:
            return 500, b"", b""
        data = self.files[name]
        if name in self.spoiled:
            data = bytes(len(data))
        start = int(asked_range.removeprefix("bytes=").partition("-")[0]) if asked_range else 0
        part = data[start:]
        if self.cut == name:
            self._is_down = True
            return 200, part, part[: len(part) // 2]
        return (206 if asked_range else 200), part, part


def _handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            api = f"/api/models/{hub.repo}"
            if path in (api, *(f"{api}/revision/{name}" for name in ("main", "v1", hub.commit))):
                self.reply(200, json.dumps(hub.listing).encode())
            elif path.startswith(f"/{hub.repo}/resolve/{hub.commit}/"):
                self.file(path.rpartition("/")[2])
            else:
                missing = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
                self.reply(404, b"{}", **{"X-Error-Code": missing})

        def file(self, name: str) -> None:
            etag = hub.sha256(name) if hub.is_large(name) else hub.blob_id(name)
            told = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit}
            if self.command == "HEAD":
                self.reply(200, hub.files[name], **told)
                return
            status, announced, sent = hub.take(name, self.headers.get("Range"))
            self.reply(status, announced, sent, **told)

        def reply(
            self, status: int, announced: bytes, sent: bytes | None = None, **headers: str
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(announced)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(announced if sent is None else sent)
            self.close_connection = sent is not None and len(sent) < len(announced)

    return Handler
