"""A device is heard of as a socket is: when it comes to a mark, and when it fails."""

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from gpu_workers.device_watch import DeviceWatch
from ipc.cuda_runtime import CudaError

PATIENCE_S = 20.0
ILLEGAL = "an illegal memory access was encountered"


class PlayedDevice:
    """Comes to its marks when it is told to."""

    def __init__(self) -> None:
        self.gates: list[threading.Event] = []
        self.failure: Exception | None = None

    def mark(self) -> Callable[[], None]:
        gate = threading.Event()
        self.gates.append(gate)

        def wait() -> None:
            gate.wait(PATIENCE_S)
            if self.failure is not None:
                raise self.failure

        return wait


@contextmanager
def watched() -> Iterator[tuple[PlayedDevice, DeviceWatch]]:
    device = PlayedDevice()
    with closing(DeviceWatch(device.mark)) as watch:
        yield device, watch
        for gate in device.gates:
            gate.set()


def is_told(watch: DeviceWatch) -> bool:
    return bool(select.select([watch.waitable], [], [], PATIENCE_S)[0])


def test_nobody_is_told_of_a_mark_that_the_device_has_not_passed() -> None:
    with watched() as (_, watch):
        watch.mark()
        assert watch.passed() == 0


def test_marks_are_told_in_order_each_once() -> None:
    with watched() as (device, watch):
        for _ in range(3):
            watch.mark()
        device.gates[1].set()
        assert watch.passed() == 0
        device.gates[0].set()
        passed = 0
        while passed < 2:
            assert is_told(watch)
            passed += watch.passed()
        assert passed == 2
        assert watch.passed() == 0


@pytest.mark.parametrize(
    "failure",
    [RuntimeError(ILLEGAL), CudaError("cudaEventSynchronize", 700, "cudaErrorUnknown", ILLEGAL)],
    ids=["torch's", "ours"],
)
def test_a_device_that_fails_is_told_to_who_listens(failure: Exception) -> None:
    with watched() as (device, watch):
        device.failure = failure
        watch.mark()
        device.gates[0].set()
        assert is_told(watch)
        with pytest.raises(type(failure), match=ILLEGAL):
            watch.passed()


def test_who_leaves_does_not_wait_for_a_device_that_hangs() -> None:
    device = PlayedDevice()
    watch = DeviceWatch(device.mark)
    watch.mark()
    watch.close()
    device.gates[0].set()
