"""Workers that exist and get nowhere: real processes, stopped and let go on by signals."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.service import Service, eventually, serving

BOUND_S = 3.0
FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--wedged-after-s", str(BOUND_S))
# Two seconds beyond the bound where the machine is ours; others may have it, too.
FOUND_WITHIN_S = BOUND_S + 8.0
BACK_WITHIN_S = 90.0  # new processes


@pytest.fixture(scope="module")
def service(tiny_llama: Path) -> Iterator[Service]:
    """Two prefill instances; one decode instance of two workers."""
    with serving(tiny_llama, *FLAGS, "--prefill", "2", "--decode-pp", "2") as service:
        eventually(lambda: len(service.ranks()) == 4, BACK_WITHIN_S, "all are started")
        eventually(lambda: is_whole(service), BACK_WITHIN_S, "all are ready")
        service.complete("a first step is waited for longer than others")
        service.complete("here, too", n=2)
        yield service


def is_whole(service: Service) -> bool:
    return sum(samples(service, "distserve_instance_up").values()) == 3


def samples(service: Service, name: str) -> dict[str, float]:
    """Values of one metric by instance."""
    text = httpx.get(f"{service.url}/metrics").text
    return {
        sample.labels.get("instance", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def next_prefill(service: Service) -> str:
    """Who gets the next prompt while nobody is busy: who got the last one."""
    before = service.counts()
    service.complete("hello")

    def has_grown(name: str) -> bool:
        return service.counts()[name]["prefill_tokens"] > before[name]["prefill_tokens"]

    eventually(lambda: any(map(has_grown, before)), 5, "one has told of the prompt")
    return next(filter(has_grown, before))


def others_than(service: Service, instance: str) -> dict[str, psutil.Process]:
    ranks = service.ranks().items()
    return {name: rank for name, rank in ranks if not name.startswith(instance)}


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_who_is_stopped_for_less_than_the_bound_goes_on_and_so_does_a_stopped_daemon(
    service: Service,
) -> None:
    before = service.ranks()
    with stopped(before["prefill-0/0.0"]), stopped(before["decode-0/1.0"]):
        time.sleep(BOUND_S / 2)
    assert service.complete("hello")["choices"]
    with stopped(psutil.Process(service.process.pid)):
        time.sleep(BOUND_S + 1.0)
    assert service.complete("hello")["choices"]
    assert service.ranks() == before


def test_a_stopped_prefill_worker_is_replaced_while_the_other_serves_B19(service: Service) -> None:
    name = next_prefill(service)
    victim = service.workers()[name]
    others = others_than(service, name)
    with ThreadPoolExecutor() as pool:
        victim.send_signal(signal.SIGSTOP)
        stuck = pool.submit(service.complete, "hello")
        eventually(
            lambda: samples(service, "vllm:num_requests_waiting")[""] == 1 or stuck.done(),
            BACK_WITHIN_S,
            "one is stuck there",
        )
        for _ in range(3):  # its queue is the longer one now
            answer = service.complete("hello")
        eventually(lambda: not victim.is_running(), FOUND_WITHIN_S, "the stopped worker is gone")
        assert stuck.result()["choices"] == answer["choices"], "it was done again by another"
    eventually(lambda: is_whole(service), BACK_WITHIN_S, "it is back")
    assert samples(service, "distserve_wedged_total")[name] == 1
    assert others_than(service, name) == others


def test_a_stopped_follower_of_the_only_decode_instance_is_replaced_D2_D3(
    service: Service,
) -> None:
    """It idles, so nobody waits for it; but it answers no beat."""
    victim = service.ranks()["decode-0/1.0"]
    victim.send_signal(signal.SIGSTOP)
    health = f"{service.url}/health"
    eventually(lambda: httpx.get(health).status_code == 503, FOUND_WITHIN_S, "told in /health")
    eventually(lambda: httpx.get(health).status_code == 200, BACK_WITHIN_S, "it is back")
    assert not victim.is_running()
    assert service.complete("hello")["choices"]
    service.until_told(f"wedged: decode-0/1.0 did not answer for {BOUND_S:g} s")
