"""A whole service with keys: who is let in, what stands in its log, who may read its files."""

import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from daemon.api_keys import add_key, make_key
from tests.end_to_end.service import Service, eventually, serving

PROMPT = "a very private sentence about marmalade"
FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--admin-host", "none")


class Keyed:
    """The service, its file of keys, and alice's."""

    def __init__(self, service: Service, file: Path, key: str) -> None:
        self.service = service
        self.file = file
        self.key = key
        self.clients: list[openai.OpenAI] = []

    def client(self, key: str) -> openai.OpenAI:
        url = f"{self.service.url}/v1"
        one = openai.OpenAI(api_key=key, base_url=url, max_retries=0, timeout=60)
        self.clients.append(one)
        return one

    def close(self) -> None:
        """A client left open is collected in the middle of some other test, and counted there."""
        for client in self.clients:
            client.close()


@pytest.fixture(scope="module")
def keyed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("keys")
    file, key = directory / "keys.toml", make_key()
    add_key(file, "alice", key)
    run_dir = directory / "run"
    flags = ("--api-keys", str(file), "--host", "0.0.0.0", "--log-level", "debug")
    with serving(tiny_llama, *FLAGS, *flags, "--run-dir", str(run_dir)) as service:
        service.run_dir = run_dir
        service.url = service.url.replace("0.0.0.0", "127.0.0.1")
        keyed = Keyed(service, file, key)
        yield keyed
        keyed.close()


def test_others_are_let_in_by_their_key_alone_and_health_is_for_everybody(keyed: Keyed) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        keyed.client("sk-wrong").completions.create(model="x", prompt="x")
    assert refused.value.code == "invalid_api_key"
    assert httpx.get(f"{keyed.service.url}/metrics").status_code == 401
    assert httpx.get(f"{keyed.service.url}/health").status_code == 200
    done = keyed.client(keyed.key).completions.create(
        model=keyed.client(keyed.key).models.list().data[0].id, prompt="hi", max_tokens=4
    )
    assert done.usage is not None
    assert done.usage.completion_tokens > 0


def test_keys_are_exchanged_by_a_signal_and_streams_go_on(keyed: Keyed) -> None:
    add_key(keyed.file, "bob", bob := make_key())
    client = keyed.client(keyed.key)
    model = client.models.list().data[0].id
    stream = client.completions.create(model=model, prompt="hi", max_tokens=40, stream=True)
    next(stream)
    keyed.service.process.send_signal(signal.SIGHUP)
    eventually(lambda: _is_let_in(keyed.client(bob)), 20, "bob is let in")
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None


def test_no_prompt_and_no_key_stands_in_any_log_line_at_debug_D17(keyed: Keyed) -> None:
    """Lines of the workers are among them."""
    client = keyed.client(keyed.key)
    model = client.models.list().data[0].id
    headers = {"x-request-id": "wanted-line"}
    for stream in (False, True):
        made = client.completions.create(
            model=model, prompt=PROMPT, user=PROMPT, stream=stream, extra_headers=headers
        )
        text = "".join(c.choices[0].text for c in made) if stream else made.choices[0].text
    httpx.post(f"{keyed.service.url}/v1/{PROMPT}?q={keyed.key}", headers={"x": keyed.key})
    keyed.service.until_told("wanted-line", times=2)
    log = keyed.service.log
    assert "key=alice" in log
    assert "prefill" in log
    for secret in ("marmalade", keyed.key, text.strip() or "marmalade"):
        assert secret not in log


def test_nothing_that_a_daemon_makes_is_open_to_others_C18(keyed: Keyed) -> None:
    """As `find -perm /o+rwx` and `-perm /g+rwx` would tell."""
    run_dir = keyed.service.run_dir
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o750
    made = list(run_dir.rglob("*"))
    assert made
    assert not [path for path in made if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def _is_let_in(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.AuthenticationError:
        return False
