"""A whole service whose workers compute on played GPUs, two steps under way, answers what one on
the CPU answers: every feature, in a decode pool too small for all, and when workers are killed.

The processes are the real ones. The model says nothing near a tie, so 16 bit say what 32 say.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.parity_http import Answers, all_at_once, assert_same, one_by_one
from tests.end_to_end.service import Service, eventually, serving
from tests.end_to_end.terse_model import terse_llama

TOLERANCE = 0.1  # of log probabilities
BACK_WITHIN_S = 120.0
MOST_KILLS = 5
HERE = Path(__file__).parent
LIMITS = ("--block-size", "4", "--max-batch", "16", "--kv-cache-gib", "0.02")
SMALL = ("--decode-kv-cache-gib", "0.00019")  # 48 blocks, and one for padding
MIXED = ("--prefill", "0", "--decode", "0", "--mixed", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_llama(tmp_path_factory.mktemp("models") / "terse-llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> Answers:
    """Of the CPU in 32 bit, each request alone."""
    with serving(model, *LIMITS, *MIXED, "--dtype", "float32") as service:
        return one_by_one(service)


@contextmanager
def played(model: Path, *flags: str) -> Iterator[Service]:
    path = os.pathsep.join((str(HERE / "played"), str(HERE.parents[1])))
    gpus = ("--device", "cuda", "--dtype", "float16")
    with serving(model, *gpus, *LIMITS, *flags, PYTHONPATH=path) as service:
        yield service


@pytest.fixture(scope="module")
def divided(model: Path) -> Iterator[Service]:
    """One prefill and one decode instance."""
    with played(model, *SMALL) as service:
        yield service


def total(service: Service, name: str) -> float:
    text = httpx.get(f"{service.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE))


def check_killed(service: Service, victim: str, expected: Answers) -> None:
    """While it has work under way; all answers come, and are the same."""
    retries = total(service, "distserve_retries_total")
    for _ in range(MOST_KILLS):
        kill_once(service, victim, expected)
        if total(service, "distserve_retries_total") > retries:
            return  # a machine that has no time for us may kill it when all is done
    pytest.fail(f"{victim} was never killed at work")


def kill_once(service: Service, victim: str, expected: Answers) -> None:
    before, process = service.counts()[victim]["num_steps"], service.workers()[victim]
    lives = service.log.count(f"{victim}/0.0 started, process")
    with all_at_once(service) as answers:
        eventually(
            lambda: service.counts()[victim]["num_steps"] > before + 20, 60, f"{victim} is at work"
        )
        process.kill()
        assert_same(answers(), expected, TOLERANCE)
    service.until_told(f"{victim}/0.0 started, process", times=lives + 1)
    eventually(
        lambda: total(service, "distserve_instance_up") == len(service.counts()),
        BACK_WITHIN_S,
        f"{victim} is back",
    )
    eventually(lambda: service.is_all_free, 20, "all blocks are free")


def test_every_feature_is_answered_as_on_the_cpu_though_sequences_are_preempted_B15_F22(
    divided: Service, expected: Answers
) -> None:
    with all_at_once(divided) as answers:
        assert_same(answers(), expected, TOLERANCE)
    assert divided.counts()["decode-0"]["num_preempted"] > 0
    divided.until_told("on flashinfer-")  # kernels
    eventually(lambda: divided.is_all_free, 20, "all blocks are free")


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.slow)])
def test_nobody_notices_a_gpu_worker_that_is_killed_at_work_B1_B2_B3(
    divided: Service, expected: Answers, victim: str
) -> None:
    check_killed(divided, victim, expected)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(), ("--chunk-tokens", "24")], ids=["whole", "in chunks"])
def test_a_mixed_instance_answers_the_same_also_when_it_is_killed(
    model: Path, expected: Answers, chunks: tuple[str, ...]
) -> None:
    with played(model, *MIXED, *chunks) as service:
        with all_at_once(service) as answers:
            assert_same(answers(), expected, TOLERANCE)
        check_killed(service, "mixed-0", expected)
