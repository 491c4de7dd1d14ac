"""A device that is behind: what is looked at too early is old, and whole instances are right."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_workers.cuda_sampler import DeviceSampler
from ipc.messages import Abort, Prefilled
from tests.gpu_workers.checkpoints import NUM_TOKEN_IDS, llama_gqa
from tests.gpu_workers.cuda.fake_device import FakeEvent, UsedTooEarly
from tests.gpu_workers.cuda.lagging_device import LaggingDevice
from tests.gpu_workers.cuda.rig import CudaDriver, on_cpu
from tests.gpu_workers.cuda.test_cuda_instance import KINDS, TEXTS, ask
from tests.gpu_workers.driving import Driver
from tests.gpu_workers.test_steps_ahead import Ahead

SEEDS = range(3)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(model_dir: Path) -> Driver:
    return on_cpu(model_dir, num_token_ids=NUM_TOKEN_IDS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The model is tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Stalled(LaggingDevice):
    """Does nothing until somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._random.randrange = lambda *_: 1  # type: ignore[method-assign]


def uploaded(device: LaggingDevice, *numbers: float) -> torch.Tensor:
    host = torch.tensor(numbers)
    target = torch.zeros(len(numbers))
    device.upload(host, target)
    return target


def test_a_result_is_there_when_it_has_been_waited_for_and_not_before() -> None:
    device = Stalled()
    with device.stream:
        total = uploaded(device, 1.0, 2.0) + uploaded(device, 3.0, 4.0)
        done = device.event()
        done.record()
    assert total.tolist() != [4.0, 6.0]
    done.synchronize()
    assert total.tolist() == [4.0, 6.0]


def test_what_is_written_into_its_memory_is_written_in_turn() -> None:
    device = Stalled()
    with device.stream:
        own = uploaded(device, 1.0, 2.0, 3.0)
        before = own[1:] * 10
        own[1:] = own[:2].clone()
        own[0].add_(5.0)
    assert own.tolist() == [0.0, 0.0, 0.0]
    device.synchronize()
    assert own.tolist() == [6.0, 1.0, 2.0]
    assert before.tolist() == [20.0, 30.0]


def test_a_copy_to_the_host_is_of_what_the_device_holds_by_then() -> None:
    device = Stalled()
    host = device.pinned(2, torch.float32)
    with device.stream:
        own = uploaded(device, 1.0, 2.0)
        own.mul_(2.0)
        device.download(own, host)
        own.mul_(2.0)
    assert host.tolist() == [77.0, 77.0]
    device.synchronize()
    assert host.tolist() == [2.0, 4.0]


def test_a_number_that_the_host_asks_for_makes_it_wait() -> None:
    device = Stalled()
    with device.stream:
        assert int(uploaded(device, 3.0).sum()) == 3


def test_memory_of_the_host_is_the_hosts_alone() -> None:
    device = Stalled()
    with device.stream:
        own = uploaded(device, 3.0)
        assert (torch.tensor([1.0]) + 1).tolist() == [2.0]
    assert own.tolist() == [0.0]


def test_pinned_memory_that_changes_under_its_copy_is_seen() -> None:
    device = Stalled()
    host = torch.zeros(2)
    device.upload(host, torch.zeros(2))
    host[0] = 1.0
    with pytest.raises(UsedTooEarly, match="pinned memory changed"):
        device.synchronize()


def instance(model_dir: Path, seed: int, num_blocks: int) -> tuple[LaggingDevice, Ahead]:
    device = LaggingDevice(seed=seed)
    with device.stream:
        driver = CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS, device=device)
    engine = (driver.executor, driver.pool)
    return device, Ahead(num_blocks=num_blocks, max_in_flight=2, engine=engine)


def drawn(model_dir: Path, seed: int) -> dict[int, list[int]]:
    """Of requests that come and go in a small pool, two steps under way; some are left early."""
    device, rig = instance(model_dir, seed, num_blocks=40)
    asks = [ask(number, text, KINDS[number % 3]) for number, text in enumerate(TEXTS * 2, 1)]
    with device.stream:
        for command in asks:
            rig.tell(command)
            for _ in range(1 + seed % 3):
                rig.turn()
            if command.request_id % 4 == 0:
                rig.tell(Abort(command.request_id - 1, (1000 * (command.request_id - 1),)))
        rig.finish()
    assert device.num_behind_most > 50
    found = {e.request_id: [*e.token_ids] for e in rig.events if isinstance(e, Prefilled)}
    for sequence, tokens in rig.decoded().items():
        found[sequence // 1000] += tokens
    return found


def is_right(model_dir: Path, cpu: Driver, seed: int) -> bool:
    found = drawn(model_dir, seed)
    for number, text in enumerate(TEXTS * 2, 1):
        sampling = KINDS[number % 3]
        whole = cpu.generate(list(text), sampling.max_tokens, sampling)
        tokens = found.get(number, [])
        if tokens != whole[: len(tokens)] or (number % 4 != 3 and tokens != whole):
            return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_of_an_instance_that_is_behind_get_the_tokens_they_get_on_a_cpu(
    model_dir: Path, cpu: Driver, seed: int
) -> None:
    assert is_right(model_dir, cpu, seed)


def nobody_waits(patch: Patch) -> None:
    """For drawn tokens: the host takes what is there."""

    def fetch_tokens(sampler: DeviceSampler, drawn: torch.Tensor) -> Callable[[], list[int]]:
        host = sampler._device.pinned(len(drawn), drawn.dtype)
        sampler._device.download(drawn, host)
        return host.tolist

    patch.setattr(DeviceSampler, "fetch_tokens", fetch_tokens)


def plans_overtake(patch: Patch) -> None:
    """Events that are over at once: a plan is written over the one before it."""
    patch.setattr(FakeEvent, "synchronize", lambda event: None)


@pytest.mark.parametrize("spoil", [nobody_waits, plans_overtake], ids=lambda f: f.__name__)
def test_without_a_wait_it_goes_red(
    model_dir: Path, cpu: Driver, spoil: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    spoil(monkeypatch)
    with contextlib.suppress(UsedTooEarly):
        assert not is_right(model_dir, cpu, seed=0)
