"""Where a delay happens is where it is seen: real engines and copies, by a clock set by hand."""

from pathlib import Path

import msgspec
import pytest

from gpu_workers.cpu_exchange import Parts, copy_parts
from ipc.vocabulary import Role
from tests.daemon.small_tokenizers import byte_level_json
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.town import Town, spec, tokenizer_of

STEP_S = 0.01
STAGES = ("prefill_queue", "prefill", "transfer", "decode_queue", "decode")
NUM_REQUESTS = 5


class Clock:
    """Moves when somebody works."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class ClockedRig(EngineRig):
    """Every step takes `STEP_S`, and every pull `pull_s`."""

    def __init__(
        self, role: Role, model: Path, *, name: str, epoch: int, clock: Clock, pull_s: float
    ) -> None:
        self._clock = clock
        self._pulled_s: list[tuple[float, float]] = []

        def copy(parts: Parts) -> None:
            started_s = clock()
            copy_parts(parts)
            clock.now_s += pull_s
            self._pulled_s.append((started_s, clock()))

        super().__init__(role, model, name=name, epoch=epoch, copy=copy)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        started_s = self._clock()
        launched = self.executor.launch(plan)
        self.scheduler.launched(plan, started_s)
        begun_s = self._clock()
        self._clock.now_s += STEP_S
        self.scheduler.collect(
            self.executor.collect(launched), started_s=begun_s, ended_s=self._clock()
        )
        for pull, (from_s, to_s) in zip(self.exchange.finished(), self._pulled_s, strict=True):
            self.scheduler.pulled(msgspec.structs.replace(pull, started_s=from_s, ended_s=to_s))
        self._pulled_s.clear()
        self.check()
        return True


def stage_sums(model: Path, directory: Path, pull_s: float) -> dict[str, float]:
    """Seconds of each stage after some requests, one after the other, and of all in all."""
    clock = Clock()
    town = Town(
        tokenizer_of(directory, byte_level_json()),
        {"p0": Role.PREFILL, "d0": Role.DECODE},
        clock=clock,
        make_rig=lambda role, name, epoch: ClockedRig(
            role, model, name=name, epoch=epoch, clock=clock, pull_s=pull_s
        ),
    )
    for number in range(NUM_REQUESTS):
        town.ask(spec([number + 1, 2, 3], max_tokens=4))
        town.settle()
    registry = town.controller._metrics.registry
    sums = {
        stage: registry.get_sample_value("distserve_stage_seconds_sum", {"stage": stage})
        for stage in STAGES
    }
    labels = {"model_name": "test", "engine": "0"}
    sums["all"] = registry.get_sample_value("vllm:e2e_request_latency_seconds_sum", labels)
    sums["pulls"] = registry.get_sample_value("distserve_kv_transfer_seconds_sum")
    town.close()
    return {stage: value for stage, value in sums.items() if value is not None}


def test_a_delay_of_200_ms_in_the_pull_grows_the_transfer_stage_and_no_other(
    tiny_llama: Path, tmp_path: Path
) -> None:
    quick, slow = (stage_sums(tiny_llama, tmp_path, pull_s) for pull_s in (0.0, 0.2))
    grown = {stage: slow[stage] - quick[stage] for stage in slow}
    delay_s = 0.2 * NUM_REQUESTS
    expected = dict.fromkeys(STAGES, 0.0) | {
        "transfer": delay_s,
        "all": delay_s,
        "pulls": delay_s,
    }
    assert grown == pytest.approx(expected, abs=1e-6)
    assert quick["prefill"] == pytest.approx(NUM_REQUESTS * STEP_S)
    for sums in (quick, slow):
        assert sum(sums[stage] for stage in STAGES) == pytest.approx(sums["all"])
