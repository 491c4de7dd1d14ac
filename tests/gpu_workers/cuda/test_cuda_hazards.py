"""Mistakes that a GPU would answer with wrong tokens or a crash much later: each is seen here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.cuda_attention import PagedAttention
from gpu_workers.cuda_device import send
from gpu_workers.cuda_kernels import CudaKernels
from gpu_workers.cuda_runner import CudaRunner
from gpu_workers.cuda_switches import SWITCHES
from tests.gpu_workers.checkpoints import NUM_TOKEN_IDS, llama_gqa
from tests.gpu_workers.cuda.fake_device import FakeDevice, FakeEvent, UsedTooEarly
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer
from tests.gpu_workers.cuda.no_reading import NoReading
from tests.gpu_workers.cuda.rig import CudaDriver, on_cpu
from tests.gpu_workers.driving import greedy

PROMPT = list(b"Full fathom five thy father lies")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[int]:
    return on_cpu(model_dir, num_token_ids=NUM_TOKEN_IDS).generate(PROMPT, 6)


def drawn(model_dir: Path) -> list[int]:
    return CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS).generate(PROMPT, 6)


def spoil_views(
    monkeypatch: pytest.MonkeyPatch, view: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """Kernels whose layers' keys and values are seen otherwise by attention."""
    build = CudaKernels.__init__

    def spoiled(self: CudaKernels, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        run = PagedAttention.run

        def run_otherwise(attention: PagedAttention, q: Any, kv: Any, out: Any) -> None:
            run(attention, q, view(*kv), out)

        monkeypatch.setattr(PagedAttention, "run", run_otherwise)

    monkeypatch.setattr(CudaKernels, "__init__", spoiled)


def test_unspoiled_all_is_well(model_dir: Path, expected: list[int]) -> None:
    assert drawn(model_dir) == expected


def test_swapped_keys_and_values_draw_other_tokens(
    model_dir: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_views(monkeypatch, lambda keys, values: (values, keys))
    assert drawn(model_dir) != expected


def test_keys_and_values_of_unequal_strides_are_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_views(monkeypatch, lambda keys, values: (keys, values.contiguous()))
    with pytest.raises(ValueError, match="strides must be identical"):
        drawn(model_dir)


def test_a_wrong_stride_draws_other_tokens(
    model_dir: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens_apart(cache: torch.Tensor) -> torch.Tensor:
        """Heads and tokens of a page taken for each other's."""
        pages, heads, size, width = cache.shape
        steps = (cache.stride(0), width, heads * width, 1)
        return cache.as_strided((pages, heads, size, width), steps, cache.storage_offset())

    spoil_views(monkeypatch, lambda keys, values: (tokens_apart(keys), tokens_apart(values)))
    assert drawn(model_dir) != expected


class Impatient(FakeEvent):
    """An event that nobody waits for."""

    def synchronize(self) -> None:
        pass


def overlapping(model_dir: Path) -> list[dict[int, Any]]:
    """Four decode steps, two under way at a time."""
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
    sequence = driver.add(PROMPT, greedy())
    driver.prefill(sequence, len(PROMPT))
    launched = [driver.launch((sequence, 1, True)) for _ in range(4)]
    return [driver.collect(step) for step in launched]


def test_a_plan_waits_until_the_one_before_it_has_gone_over(model_dir: Path) -> None:
    assert len(overlapping(model_dir)) == 4


def test_a_plan_that_does_not_wait_is_seen(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDevice, "event", lambda device: Impatient(device))
    with pytest.raises(UsedTooEarly, match="planned again before"):
        overlapping(model_dir)


def test_tokens_that_are_not_waited_for_are_not_there(
    model_dir: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_token() -> int:
        driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
        return driver.prefill(driver.add(PROMPT, greedy()), len(PROMPT)).token_ids[0]

    assert first_token() == expected[0]
    monkeypatch.setattr(FakeDevice, "event", lambda device: Impatient(device))
    monkeypatch.setattr(FakeFlashInfer, "bind", _patient(FakeFlashInfer.bind))
    assert first_token() != expected[0]


def _patient(bind: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Plans wait by themselves: what is left to be seen are results."""

    def patient(library: FakeFlashInfer, name: str, *given: Any, **named: Any) -> dict[str, Any]:
        if name.endswith(".plan"):
            library.device.past = library.device.now
        return bind(library, name, *given, **named)

    return patient


def test_a_step_that_does_not_take_the_tokens_under_way_draws_others(
    model_dir: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = [step[1].token_ids[0] for step in overlapping(model_dir)]
    assert right == expected[1:5]
    monkeypatch.setattr(CudaRunner, "_fill", lambda *_: None)
    wrong = [step[1].token_ids[0] for step in overlapping(model_dir)]
    assert wrong != right


def test_pinned_memory_that_changes_under_its_copy_is_seen() -> None:
    device = FakeDevice()
    host = device.pinned(4, torch.int64)
    target = torch.zeros(4, dtype=torch.int64)
    device.upload(host, target)
    host[0] = 1
    with pytest.raises(UsedTooEarly, match="pinned memory changed"):
        device.synchronize()


def test_a_graph_on_other_memory_than_it_was_captured_on_is_seen(model_dir: Path) -> None:
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS)
    sequence = driver.add(PROMPT, greedy())
    driver.prefill(sequence, len(PROMPT))
    driver.step((sequence, 1, True))
    driver.executor.kernels._rope = driver.executor.kernels._rope.clone()
    with pytest.raises(UsedTooEarly, match="other memory"):
        driver.step((sequence, 1, True))


def test_a_launched_step_reads_nothing_from_the_device(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the library's own calls, whose fakes do read."""
    monkeypatch.setenv(SWITCHES, "")
    driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS, max_batch=1)
    monkeypatch.setattr(PagedAttention, "plan", lambda *_: None)
    monkeypatch.setattr(PagedAttention, "run", lambda *_: None)
    kinds = [greedy(logprobs=1), greedy(temperature=0.9, top_p=0.8, top_k=9, min_p=0.01)]
    sequences = [driver.add(PROMPT, kind, prompt_logprobs=1) for kind in kinds]
    with NoReading():
        steps = [driver.launch(*((s, len(PROMPT), True) for s in sequences))]
        steps += [driver.launch(*((s, 1, True) for s in sequences)) for _ in range(2)]
    assert [len(driver.collect(step)) for step in steps] == [2, 2, 2]


def test_several_arrays_go_over_in_one_copy() -> None:
    device = FakeDevice()
    arrays = [torch.arange(n).numpy() for n in (3, 0, 5)]
    parts = send(device, arrays)
    assert device.now == 1
    assert [part.tolist() for part in parts] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
