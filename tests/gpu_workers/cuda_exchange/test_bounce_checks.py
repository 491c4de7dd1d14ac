"""What is found out about a way through the host's memory: which copies are quicker together there,
and, where it is asked for, whether what came is what is there."""

import re
from collections.abc import Callable

import pytest
import torch

from tests.gpu_workers.cuda_exchange.fake_cudart import HOST
from tests.gpu_workers.cuda_exchange.fake_streams import Copy
from tests.gpu_workers.cuda_exchange.rigs import LARGE, Process, exporters, far, reference

BATCH = "cudaMemcpyBatchAsync"


def told(caplog: pytest.LogCaptureFixture, here: Process, there: Process) -> list[str]:
    """Below how many KiB copies go together, as soon as it is known."""
    caplog.set_level("INFO")
    here.meet([there])
    here.pull((5,), (2,))
    here.until_finished()
    return re.findall(r"by way of: host, .* copies below (\d+) KiB together", caplog.text)


@pytest.mark.parametrize(("slow_factor", "expected"), [(1, "64"), (50, "0")])
def test_which_copies_go_together_is_measured_on_either_side_once_the_way_is_known(
    caplog: pytest.LogCaptureFixture, slow_factor: float, expected: str
) -> None:
    """A call takes as long as 40 KB do, or less than one on a slow link."""
    here, (there,) = far(), exporters(1, 1)
    here.library.slow_factor = there.library.slow_factor = slow_factor
    assert told(caplog, here, there) == [expected]
    for side in (here, there):
        assert side.library.calls.count(BATCH) > 0
        side.library.calls.clear()
    here.pull((6, 1, 3), (0, 2, 4))
    here.until_finished()
    for side in (here, there):
        assert side.library.calls.count(BATCH) == (slow_factor == 1)
    assert torch.equal(here.exchange.pool[[0, 2, 4]], reference()[[6, 1, 3]])


def test_an_older_runtime_copies_one_by_one_on_either_side(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Process(LARGE, gpu=1, version=12080)
    there = Process(LARGE, version=12080)
    assert told(caplog, here, there) == ["0"]
    assert BATCH not in here.library.calls + there.library.calls


def test_an_owner_measures_with_its_first_reader_alone(caplog: pytest.LogCaptureFixture) -> None:
    (there,) = exporters(1, 1)
    told(caplog, far(), there)
    num_batches = there.library.calls.count(BATCH)
    told(caplog, far(), there)
    assert there.library.calls.count(BATCH) == num_batches


Place = Callable[[int, int, int], Copy]


def losing(copy: Place, process: Process) -> Place:
    """Copies out of the host's memory into a pool arrive nowhere."""
    pool = process.exchange.pool
    within = range(pool.data_ptr(), pool.data_ptr() + pool.nbytes)

    def lose(target: int, source: int, num_bytes: int) -> Copy:
        is_host = process.library._within(source, num_bytes).device == HOST
        return copy(target, target if is_host and target in within else source, num_bytes)

    return lose


def test_pulls_through_the_host_are_compared_with_their_source_where_asked_for_A4_A7(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    here, (there,) = far(), exporters(1, 1)
    here.meet([there])
    here.pull((5, 3), (2, 4))
    (result,) = here.until_results()
    assert (result.num_different, result.is_lost) == (0, False)
    here.library._copy = losing(here.library._copy, here)  # type: ignore[method-assign]
    here.pull((6, 1), (0, 3))
    (result,) = here.until_results()
    assert (result.num_different, result.is_lost) == (2, False)
    assert "request 7: 2 parts of blocks pulled from there differ" in caplog.text


def test_a_pull_of_many_slots_is_compared_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    here, there = far(LARGE), Process(LARGE)
    there.exchange.pool.copy_(torch.randn(LARGE.shape))
    here.meet([there])
    blocks = list(range(LARGE.num_blocks))
    here.pull(blocks, blocks)
    (result,) = here.until_results()
    assert result.num_different == 0
    assert torch.equal(here.exchange.pool, there.exchange.pool)


def test_nothing_is_asked_for_twice_where_nobody_wants_it_compared() -> None:
    here, (there,) = far(), exporters(1, 1)
    here.meet([there])
    here.pull((1,), (1,))
    here.until_finished()
    there.library.calls.clear()
    here.pull((5,), (2,))
    here.until_finished()
    assert there.library.calls.count("cudaMemcpyAsync") == 1
