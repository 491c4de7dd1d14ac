"""Clients that people use, against the whole service: a stream, its usage, and errors each.

They live in a virtual environment of their own, made here at the first run (some gigabytes:
guidellm brings torch) and kept in the user's cache. DISTSERVE_CLIENTS names another interpreter
that has them. Where neither can be had, the tests are skipped and say why.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.api_keys import add_key, make_key
from tests.end_to_end.service import Service, serving

REQUIREMENTS = Path(__file__).with_name("clients.txt")
CALLS = Path(__file__).with_name("client_calls.py")
INSTALL_S, CALL_S = 1500, 240

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + CALL_S)]


@pytest.fixture(scope="module")
def interpreter() -> Path:
    """A Python that has the clients."""
    if given := os.environ.get("DISTSERVE_CLIENTS"):
        return Path(given)
    version = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "distserved-tests" / f"clients-{version}"
    if not (directory / "complete").exists():
        _install_into(directory)
    return directory / "bin" / "python"


def _install_into(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    command = [directory / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        shutil.rmtree(directory)
        pytest.skip(f"the clients cannot be installed: {done.stderr.strip()[-300:]}")
    (directory / "complete").touch()


class Keyed:
    """A service, and a key for it."""

    def __init__(self, service: Service, key: str, model: Path) -> None:
        self.url = service.url
        self.key = key
        self.model = model


@pytest.fixture(scope="module")
def keyed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    file, key = tmp_path_factory.mktemp("keys") / "keys.toml", make_key()
    add_key(file, "clients", key)
    flags = ("--kv-cache-gib", "0.25", "--admin-host", "none", "--api-keys", str(file))
    with serving(smollm2, *flags) as service:
        yield Keyed(service, key, smollm2)


def seen_by(client: str, interpreter: Path, keyed: Keyed, model: str = "smollm2") -> dict[str, Any]:
    command = [interpreter, CALLS, client, keyed.url, keyed.key, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.parametrize(
    ("client", "refusals"),
    [
        (
            "openai_sync",
            {
                "wrong_key": ["AuthenticationError", "invalid_api_key"],
                "too_long": ["BadRequestError", "context_length_exceeded"],
                "wrong_model": ["NotFoundError", "model_not_found"],
            },
        ),
        ("openai_async", {"too_long": ["BadRequestError", "context_length_exceeded"]}),
        (
            "litellm",
            {
                "wrong_key": ["AuthenticationError", None],
                "too_long": ["ContextWindowExceededError", None],
            },
        ),
        (
            "langchain",
            {
                "wrong_key": ["OpenAIAuthenticationError", "invalid_api_key"],
                "too_long": ["OpenAIInvalidRequestError", "context_length_exceeded"],
            },
        ),
    ],
)
def test_a_library_sees_a_stream_its_usage_and_each_error_as_what_it_is(
    interpreter: Path, keyed: Keyed, client: str, refusals: dict[str, list[str | None]]
) -> None:
    seen = seen_by(client, interpreter, keyed)
    assert seen["text"]
    assert seen["num_chunks"] > 1
    assert 1 < seen["num_output"] <= 8
    assert {what: seen[what] for what in refusals} == refusals


def test_the_command_llm_prints_a_stream_its_usage_and_what_is_wrong(
    interpreter: Path, keyed: Keyed
) -> None:
    seen = seen_by("llm", interpreter, keyed)
    assert seen["text"]
    assert "Token usage: " in seen["usage"]
    assert " output" in seen["usage"]
    code, told = seen["wrong_key"]
    assert code == 1
    assert "401" in told
    assert "Incorrect API key provided" in told


def test_guidellm_measures_the_service_and_counts_its_tokens(
    interpreter: Path, keyed: Keyed
) -> None:
    seen = seen_by("guidellm", interpreter, keyed, str(keyed.model))
    assert "failed" not in seen, seen["failed"]
    assert (seen["num_good"], seen["num_bad"]) == (3, 0)
    assert seen["num_output"] == [8, 8, 8]
    assert all(ttft_ms > 0 for ttft_ms in seen["ttft_ms"])


def test_curl_sees_events_usage_and_an_errors_status(keyed: Keyed) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {
        "model": "smollm2",
        "prompt": "The capital of France is",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text = curl(keyed, body, keyed.key)
    events = text.strip().split("\n\n")
    assert (status, events[-1]) == (200, "data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]).startswith(" Paris")
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    status, text = curl(keyed, body, "sk-wrong")
    assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
    status, text = curl(keyed, body | {"max_tokens": "many"}, keyed.key)
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")


def curl(keyed: Keyed, body: dict[str, Any], key: str) -> tuple[int, str]:
    command = ["curl", "-sN", "-w", "%{http_code}", f"{keyed.url}/v1/completions"]
    command += ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
    done = subprocess.run(
        [*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout[-3:]), done.stdout[:-3]
