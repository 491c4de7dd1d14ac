"""The bench against the daemon's own HTTP face, with a fake engine behind it."""

from pathlib import Path

import numpy as np
import pytest

from daemon.errors import QueueFull
from daemon.generation import Delta
from ipc.vocabulary import FinishReason
from planner.bench.options import PromptKind, ReplayOptions
from planner.bench.replay import replay
from planner.workload.requests import Requests
from tests.daemon.frontend.fake_submitter import STAGES, Step
from tests.daemon.frontend.http_calls import FAILURE, LIMITS, REPLY
from tests.daemon.frontend.http_service import Service
from tests.daemon.small_tokenizers import byte_level_directory, load

OPTIONS = ReplayOptions(token_ids=(10, 90))


@pytest.fixture
def service(tmp_path: Path) -> Service:
    tokenizer = load(byte_level_directory(tmp_path / "model"))
    return Service(tokenizer, reply=REPLY, limits=LIMITS)


def requests(count: int) -> Requests:
    return Requests(np.zeros(count), np.full(count, 12), np.full(count, 6))


@pytest.mark.parametrize("kind", list(PromptKind))
async def test_tokens_lengths_and_stages_are_as_the_service_tells_them(
    service: Service, kind: PromptKind
) -> None:
    async with service.running():
        run = await replay(service.url, requests(3), ReplayOptions(prompt=kind, token_ids=(10, 90)))
    assert run.failures == ()
    assert run.is_counted
    assert run.timeline.requests.output_tokens.tolist() == [6, 6, 6]
    # Some of the reply's characters take several tokens: those without text count, too.
    assert run.num_events == 18
    stages_s = run.timeline.stages_s()
    assert stages_s["prefill"] == pytest.approx(STAGES.prefill_s)
    assert stages_s["transfer"] == pytest.approx(STAGES.transfer_s)
    assert stages_s["decode_queue"] == pytest.approx(STAGES.decode_queue_s)
    if kind is PromptKind.TOKENS:
        assert run.timeline.requests.input_tokens.tolist() == [12, 12, 12]
    for generation in service.submitter.generations:
        assert generation.specs[0].sampling.temperature == 0
        assert generation.specs[0].sampling.end_token_ids == ()


GOOD: list[Step] = [
    [Delta(0, " a", (5,))],
    [Delta(0, "", (6,), None, FinishReason.LENGTH)],
]


async def test_a_refusal_and_a_failure_under_way_keep_their_names(service: Service) -> None:
    left: list[list[Step]] = [GOOD[:], [GOOD[0], FAILURE], GOOD[:]]

    def script(_: object) -> list[Step]:
        if not left:
            raise QueueFull("full")
        return left.pop(0)

    service.submitter.script = script
    async with service.running():
        run = await replay(service.url, requests(3), OPTIONS)
    assert sorted(failure.kind for failure in run.failures) == ["http_429", "stream_error"]
    assert FAILURE.args[0] in [failure.message for failure in run.failures]
    assert run.timeline.requests.output_tokens.tolist() == [2]
    assert run.num_short == 1
