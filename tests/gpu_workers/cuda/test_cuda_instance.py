"""A whole instance on the CUDA backend: scheduler, steps two deep, graphs, tokens as on a CPU."""

from pathlib import Path
from typing import Any

import pytest

from gpu_workers.step_plan import BlockCopy, Pull, StepPlan
from ipc.messages import Abort, Prefill, Prefilled
from ipc.vocabulary import KVHandle, SamplingParams
from tests.gpu_workers.checkpoints import NUM_TOKEN_IDS, llama_gqa
from tests.gpu_workers.cuda.rig import CudaDriver, on_cpu
from tests.gpu_workers.driving import Driver, greedy
from tests.gpu_workers.test_steps_ahead import Ahead

TEXTS = [
    b"When icicles hang by the wall",
    b"And Dick the shepherd blows his nail",
    b"And Tom",
    b"bears logs into the hall, and milk comes frozen home in pail",
]
KINDS = [greedy(max_tokens=9), greedy(max_tokens=12, repetition_penalty=1.3), greedy(max_tokens=5)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(model_dir: Path) -> Driver:
    return on_cpu(model_dir, num_token_ids=NUM_TOKEN_IDS)


def ask(number: int, text: bytes, sampling: SamplingParams) -> Prefill:
    return Prefill(
        request_id=number,
        arrival=number,
        seq_ids=(1000 * number,),
        choices=(0,),
        prompt=tuple(text),
        output=(),
        sampling=sampling,
    )


def instance(model_dir: Path, *, num_blocks: int, chunk_tokens: int | None) -> Ahead:
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
    return Ahead(
        num_blocks=min(num_blocks, driver.layout.num_blocks - 1),
        max_in_flight=driver.executor.max_in_flight,
        chunk_tokens=chunk_tokens,
        engine=(driver.executor, driver.pool),
    )


def test_a_chunk_of_which_nothing_is_drawn_has_ended_when_it_is_collected_A6(
    model_dir: Path,
) -> None:
    """Its blocks may be given to others then."""
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
    sequence = driver.add(list(TEXTS[0]), greedy())
    launched = driver.launch((sequence, 8, False))
    asked = driver.device.now
    assert driver.device.past < asked
    assert driver.collect(launched) == {}
    assert driver.device.past >= asked


def test_no_pull_begins_before_blocks_that_were_copied_have_been_read_A6(model_dir: Path) -> None:
    """A step of copies alone is over for the leader at once, and their sources may be free."""
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
    pasts: list[int] = []
    exchange: Any = driver.pool
    exchange.begin = lambda pull: pasts.append(driver.device.past)
    driver.launch((driver.add(list(TEXTS[0]), greedy()), 8, False))
    driver.executor.launch(StepPlan(step_id=2, copies=(BlockCopy(0, 1),)))
    asked = driver.device.now
    assert driver.device.past < asked
    handle = KVHandle("prefill-0", 1, 7, (0,), 4)
    driver.executor.launch(StepPlan(step_id=3, pulls=(Pull(handle, (2,)),)))
    assert pasts[0] >= asked


@pytest.mark.parametrize("chunk_tokens", [None, 12])
def test_requests_that_share_steps_get_the_tokens_they_get_alone_on_a_cpu(
    model_dir: Path, cpu: Driver, chunk_tokens: int | None
) -> None:
    asks = [
        ask(number, text, KINDS[number % len(KINDS)]) for number, text in enumerate(TEXTS * 2, 1)
    ]
    rig = instance(model_dir, num_blocks=999, chunk_tokens=chunk_tokens)
    for command in asks:
        rig.tell(command)
        rig.turn()
    rig.finish()
    first = {e.request_id: e.token_ids for e in rig.events if isinstance(e, Prefilled)}
    later = rig.decoded()
    for command in asks:
        sampling = command.sampling
        expected = cpu.generate(list(command.prompt), sampling.max_tokens, sampling)
        found = [*first[command.request_id], *later.get(command.seq_ids[0], ())]
        assert found == expected
    assert rig.is_all_free
    assert rig.executor.num_sequences == 0


def test_an_abort_with_two_steps_under_way_leaves_the_others_tokens_alone(
    model_dir: Path, cpu: Driver
) -> None:
    rig = instance(model_dir, num_blocks=999, chunk_tokens=None)
    stays, goes = ask(1, TEXTS[0], KINDS[0]), ask(2, TEXTS[1], KINDS[0])
    for command in (stays, goes):
        rig.tell(command)
    rig.launch()
    rig.collect()
    while len(rig.decoded().get(1000, ())) < 3:
        rig.turn()
    rig.tell(Abort(2, (2000,)))
    late = ask(3, TEXTS[2], KINDS[0])
    rig.tell(late)
    rig.finish()
    first = {e.request_id: e.token_ids for e in rig.events if isinstance(e, Prefilled)}
    for command in (stays, late):
        expected = cpu.generate(list(command.prompt), 9, command.sampling)
        found = [*first[command.request_id], *rig.decoded()[command.seq_ids[0]]]
        assert found == expected
    assert rig.is_all_free
