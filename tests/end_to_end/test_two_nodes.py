"""Segments on nodes: two daemons, one pair of pipelines; what crosses, and who dies with whom."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.node_pair import (
    BOUND_S,
    NODES,
    Pair,
    flags_for,
    is_alive,
    node_pair,
)
from tests.end_to_end.service import Service, eventually
from tests.gpu_workers.checkpoints import NUM_TOKEN_IDS
from tests.gpu_workers.driving import Driver

PROMPTS = [[1, 2, 3], list(range(7, 207)), [250, 9] * 20]
NUM_TOKENS = 12
STAGES = ("prefill-0/0.0", "decode-0/0.0", "prefill-0/1.0", "decode-0/1.0")
HIDDEN_BYTES_PER_TOKEN = 96 * 4  # of the tiny model in fp32
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 4  # two layers, keys and values, two heads of 64


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with node_pair(tiny_llama, tmp_path_factory.mktemp("pair")) as both:
        both.until_ready()
        yield both


@pytest.fixture(scope="module")
def solo(tiny_llama: Path) -> list[list[int]]:
    """What one worker alone says."""
    driver = Driver(tiny_llama, num_token_ids=NUM_TOKEN_IDS)
    return [driver.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]


def answers(service: Service) -> list[list[int]]:
    how = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    replies = [service.complete(prompt, **how)["choices"] for prompt in PROMPTS]
    return [reply[0]["token_ids"] for reply in replies]  # type: ignore[index]


def far_workers(pair: Pair) -> list[psutil.Process]:
    return [rank for name, rank in pair.home.service.ranks().items() if "/1." in name]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def test_two_nodes_say_what_one_worker_says(pair: Pair, solo: list[list[int]]) -> None:
    ranks = pair.home.service.ranks()
    assert sorted(ranks) == sorted(STAGES)
    parents = [ranks[name].ppid() for name in STAGES]
    daemons = [node.service.process.pid for node in (pair.home, pair.host)]
    assert parents == [daemons[0], daemons[0], daemons[1], daemons[1]]
    assert answers(pair.home.service) == solo
    eventually(lambda: pair.home.service.is_all_free, 20, "all blocks free")


def test_activations_cross_and_keys_and_values_do_not(pair: Pair) -> None:
    service = pair.home.service
    before = service.counts()
    answers(service)
    num_prompt = sum(map(len, PROMPTS))
    num_decoded = len(PROMPTS) * (NUM_TOKENS - 1)

    def gained(instance: str, count: str) -> float:
        return service.counts()[instance][count] - before[instance][count]

    eventually(lambda: gained("decode-0", "decode_tokens") == num_decoded, 20, "all is counted")
    eventually(lambda: gained("prefill-0", "prefill_tokens") == num_prompt, 20, "all is counted")
    assert gained("prefill-0", "hidden_bytes") == num_prompt * HIDDEN_BYTES_PER_TOKEN
    assert gained("decode-0", "hidden_bytes") == num_decoded * HIDDEN_BYTES_PER_TOKEN
    assert gained("decode-0", "pulled_bytes") >= num_prompt * KV_BYTES_PER_TOKEN
    ranks = service.ranks()
    for stage in (0, 1):  # each has its own node's pool in its memory, and no other's
        maps = Path(f"/proc/{ranks[f'decode-0/{stage}.0'].pid}/maps").read_text()
        pools = {name for name in STAGES if f"memfd:distserved-{name}" in maps}
        assert pools == {f"prefill-0/{stage}.0", f"decode-0/{stage}.0"}


def test_the_host_says_that_it_serves_nothing_of_its_own(pair: Pair) -> None:
    assert pair.host.health == (
        "this node serves no requests of its own: it hosts workers of instances of other nodes: "
        "2 of n0"
    )


def test_killing_a_rank_on_the_other_node_restarts_the_whole_instance(
    pair: Pair, solo: list[list[int]]
) -> None:
    before = pair.home.service.ranks()
    before["decode-0/1.0"].kill()
    eventually(lambda: gone([before["decode-0/0.0"]]), BOUND_S, "the leader is taken down too")
    eventually(lambda: pair.home.health != "", BOUND_S, "the home tells")
    pair.until_serving()
    after = pair.home.service.ranks()
    assert {n for n in STAGES if after[n].pid != before[n].pid} == {"decode-0/0.0", "decode-0/1.0"}
    pair.home.service.until_told("decode-0 ended: decode-0/1.0 killed by SIGKILL")
    assert answers(pair.home.service) == solo


@pytest.mark.slow
def test_a_stopped_host_loses_its_segments_and_joins_again(
    pair: Pair, solo: list[list[int]]
) -> None:
    """Its daemon cannot kill anybody; its workers end since their leaders are gone."""
    far = far_workers(pair)
    pair.host.signal(signal.SIGSTOP)
    try:
        eventually(lambda: "n1 is not joined" in pair.home.health, BOUND_S, pair.log)
        eventually(lambda: gone(far), BOUND_S, "workers of the stopped node end")
    finally:
        pair.host.signal(signal.SIGCONT)
    pair.until_serving()
    assert answers(pair.home.service) == solo


@pytest.mark.slow
def test_a_stopped_homes_segments_are_killed_within_the_bound(pair: Pair) -> None:
    """Its leaders live on, so that only its silence can tell."""
    far = far_workers(pair)
    pair.home.signal(signal.SIGSTOP)
    try:
        eventually(lambda: gone(far), BOUND_S, "the host kills them")
        pair.host.service.until_told("2 workers of n0 are killed: n0 was silent for 2 s")
        assert pair.host.health.endswith("none yet")
    finally:
        pair.home.signal(signal.SIGCONT)
    pair.until_serving()


@pytest.mark.slow
def test_a_killed_host_is_reported_within_the_bound(pair: Pair) -> None:
    far = far_workers(pair)
    pair.host.end()
    eventually(lambda: gone(far), BOUND_S, "workers go with their daemon")
    eventually(lambda: "n1 is not joined" in pair.home.health, BOUND_S, "the home tells")


def test_without_keys_nothing_is_started(tiny_llama: Path, tmp_path: Path) -> None:
    flags = flags_for(tiny_llama, tmp_path, ("127.0.0.1", "127.0.0.1"))
    command = [sys.executable, "-P", "-m", "daemon", "serve", "--node", "n1", "--port", "0"]
    finished = subprocess.run(
        [*command, *flags, "--run-dir", str(tmp_path / "n1")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 78
    assert "nodes are joined with link_keys only" in finished.stderr


ADDRESSES = ("10.77.0.1", "10.77.0.2")
ASK = """
import json, sys, urllib.request
url, body = sys.argv[1:]
call = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
print(urllib.request.urlopen(call, timeout=30).read().decode())
"""


def ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    names = [f"distserved-{node}" for node in NODES]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.slow
def test_in_two_network_namespaces_the_cable_carries_activations_only(
    tiny_llama: Path, tmp_path: Path, namespaces: list[str], solo: list[list[int]]
) -> None:
    inside = [["ip", "netns", "exec", name] for name in namespaces]

    def cable_bytes() -> int:
        (link,) = json.loads(ip("-n", namespaces[0], "-s", "-j", "link", "show", "cable"))
        return int(link["stats64"]["rx"]["bytes"]) + int(link["stats64"]["tx"]["bytes"])

    def ask(prompt: list[int], num_tokens: int) -> list[int]:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        url = f"http://127.0.0.1:{pair.home.port}/v1/completions"
        command = [*inside[0], sys.executable, "-c", ASK, url, json.dumps(body)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        choices = json.loads(answer.stdout)["choices"]
        assert isinstance(choices[0]["token_ids"], list)
        return list(choices[0]["token_ids"])

    with node_pair(tiny_llama, tmp_path, hosts=ADDRESSES, inside=(inside[0], inside[1])) as pair:
        pair.until_ready()
        assert ask(PROMPTS[1], NUM_TOKENS) == solo[1]
        num_prompt = 400
        before = cable_bytes()
        ask([5] * num_prompt, 1)  # is not handed over
        prefilled = cable_bytes()
        ask([5] * num_prompt, 2)  # is
        handed_over = cable_bytes()
        far = far_workers(pair)
        pair.home.end()
        eventually(lambda: gone(far), BOUND_S, "a dead home's workers go too")
        assert pair.host.service.stop() == 0
    first, second = prefilled - before, handed_over - prefilled
    far_kv_bytes = num_prompt * KV_BYTES_PER_TOKEN // 2
    assert first > num_prompt * HIDDEN_BYTES_PER_TOKEN
    assert abs(second - first) < far_kv_bytes / 10
