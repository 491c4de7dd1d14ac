"""A whole service whose workers cannot read each other's GPUs: the real processes on played ones.

Their owners fill memory that both share, and die while they do so.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.service import Service, eventually, serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPTS = [list(range(start, start + 90)) for start in range(1, 9)]
FLAGS = ("--device", "cuda", "--dtype", "float16", "--kv-cache-gib", "0.02", "--prefill", "2")


@pytest.fixture(scope="module")
def apart(tiny_llama: Path) -> Iterator[Service]:
    """Two prefill instances and one that decodes."""
    path = os.pathsep.join((str(Path(__file__).parent / "played_apart"), str(ROOT)))
    with serving(tiny_llama, *FLAGS, PYTHONPATH=path) as service:
        yield service


def text_of(service: Service, prompt: list[int]) -> object:
    choices = service.complete(prompt, max_tokens=24)["choices"]
    assert isinstance(choices, list)
    return choices[0]["text"]


@pytest.fixture(scope="module")
def texts(apart: Service) -> list[object]:
    """What is answered while nobody dies."""
    return [text_of(apart, prompt) for prompt in PROMPTS]


def test_the_way_is_told_in_the_log_and_in_metrics_C14(apart: Service, texts: list[object]) -> None:
    assert all(texts)
    apart.until_told("through the host's memory: GPU 2 has no peer access to GPU 0")
    metrics = httpx.get(f"{apart.url}/metrics").text
    assert 'distserve_kv_pull_path{instance="decode-0",path="host"} 1.0' in metrics


def test_owners_that_die_under_load_cost_no_answer_A1_A4_B1_B2(
    apart: Service, texts: list[object]
) -> None:
    answers: dict[int, object] = {}

    def ask(number: int) -> None:
        answers[number] = text_of(apart, PROMPTS[number % len(PROMPTS)])

    for victim in ("prefill-0", "prefill-1"):
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(PROMPTS))]
        answers.clear()
        for thread in threads:
            thread.start()
        lives = apart.log.count(f"{victim} is ready")
        apart.workers()[victim].kill()
        for thread in threads:
            thread.join()
        assert [answers[number] for number in range(len(PROMPTS))] == texts
        apart.until_told(f"{victim} is ready", times=lives + 1)
    eventually(lambda: apart.is_all_free, 60, "all blocks are free")
