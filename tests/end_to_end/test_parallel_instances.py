"""Prefill in tensor-parallel pairs and decode in a pipeline, as real processes, under load."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.end_to_end.reference import PROMPTS, Reference
from tests.end_to_end.service import Service, eventually, serving, shapes
from tests.gpu_workers.driving import Driver

NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """Prompts of many lengths, answers of many lengths."""
    return [
        {"prompt": [(7 * i + j) % 250 for j in range(1 + 6 * i)], "max_tokens": 3 + 5 * i % 23}
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def solo_answers(tiny_llama: Path, requests: list[dict[str, Any]]) -> list[list[int]]:
    """What one engine says that has each request alone."""
    driver = Driver(tiny_llama)
    return [driver.generate(request["prompt"], request["max_tokens"]) for request in requests]


def token_ids(service: Service, request: dict[str, Any]) -> list[int]:
    answer: Any = service.complete(**request, ignore_eos=True, return_token_ids=True)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def ending(service: Service, request: dict[str, Any]) -> httpx.Response:
    body = request | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=60.0)


def test_answers_one_after_the_other_are_those_of_one_engine_alone(
    parallel_service: Service, requests: list[dict[str, Any]], solo_answers: list[list[int]]
) -> None:
    answers = [token_ids(parallel_service, request) for request in requests[:30]]
    assert answers == solo_answers[:30]
    eventually(lambda: parallel_service.is_all_free, 20, "all blocks free")


def test_answers_at_the_same_time_are_those_of_one_engine_alone_B10_B11(
    parallel_service: Service, requests: list[dict[str, Any]], solo_answers: list[list[int]]
) -> None:
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda request: token_ids(parallel_service, request), requests))
    assert answers == solo_answers
    eventually(lambda: parallel_service.is_all_free, 20, "all blocks free")


def test_an_idle_instance_uses_no_time(parallel_service: Service) -> None:
    """Followers wait, they do not look."""
    processes = list(parallel_service.ranks().values())
    eventually(lambda: parallel_service.is_all_free, 20, "all blocks free")
    before = sum(map(cpu_s, processes))
    time.sleep(1.0)
    assert sum(map(cpu_s, processes)) - before < 0.1


@pytest.mark.parametrize("victim", ["prefill-0/0.1", "prefill-0/0.0"])
def test_a_rank_that_is_killed_under_load_takes_its_instance_along_and_nothing_else(
    parallel_service: Service,
    requests: list[dict[str, Any]],
    solo_answers: list[list[int]],
    victim: str,
) -> None:
    service, instance = parallel_service, victim.split("/")[0]
    before = service.ranks()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        endings = [pool.submit(ending, service, request) for request in requests]
        next(iter(endings)).result()  # one has been through; the others are anywhere
        before[victim].kill()
        responses = [future.result() for future in endings]
    for response, expected in zip(responses, solo_answers, strict=True):
        assert response.status_code == 200, response.text  # also of who came while it was down
        assert response.json()["choices"][0]["token_ids"] == expected
    unit = {name for name in before if name.startswith(f"{instance}/")}
    eventually(lambda: restarted(service, before) == unit, 60, "started again as a unit")
    assert not any(before[name].is_running() for name in unit)
    eventually(lambda: httpx.get(f"{service.url}/health").status_code == 200, 60, "ready again")
    assert restarted(service, before) == unit
    assert token_ids(service, requests[5]) == solo_answers[5]
    eventually(lambda: service.is_all_free, 20, "all blocks free")


@pytest.mark.slow
def test_real_prompts_are_answered_by_shapes_that_do_not_divide_each_other(
    smollm2: Path, smollm2_reference: Reference
) -> None:
    """Three-way tensor parallel prefill, two stages of decode: each token is the argmax of
    transformers' logits after all before it."""
    flags = ("--dtype", "float32", "--kv-cache-gib", "0.1", "--max-context-tokens", "256")
    prompts = [smollm2_reference.tokenizer.encode(prompt) for prompt in PROMPTS[:5]]
    with serving(smollm2, *flags, *shapes(prefill=(3, 1), decode=(1, 2))) as service:
        asked = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        answer: Any = service.complete(prompts, **asked)
        alone: Any = service.complete(prompts[0], **asked)
    outputs = [c["token_ids"] for c in sorted(answer["choices"], key=lambda c: c["index"])]
    assert alone["choices"][0]["token_ids"] == outputs[0]
    assert {len(output) for output in outputs} == {12}
    assert smollm2_reference.shortfalls(prompts, outputs) == [0.0] * len(prompts)


def restarted(service: Service, before: dict[str, psutil.Process]) -> set[str]:
    """The ranks that are other processes than they were; none while some are missing."""
    try:
        return {name for name, rank in service.ranks().items() if rank.pid != before[name].pid}
    except psutil.NoSuchProcess:
        return set()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
