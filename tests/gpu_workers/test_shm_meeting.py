"""How ranks of a stage come by common memory, and what happens to those who do not."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_workers import shm_meeting
from gpu_workers.shm_meeting import NOBODY, Ranks, Shared
from ipc.kv_shm import PoolUnavailable

NUM_BYTES = 4096


class Words:
    """A store in this process."""

    def __init__(self) -> None:
        self._told: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._told[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._told, timeout=20.0)
            return self._told[key]


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def close(shared: Shared) -> None:
    os.close(shared.descriptor)
    for connection in shared.connections:
        connection.close()


def test_all_ranks_hold_the_same_memory_and_see_the_first_one_end(words: Words) -> None:
    with ThreadPoolExecutor(3) as pool:
        offered = pool.submit(shm_meeting.offer, words, 2, NUM_BYTES, 20.0)
        taken = [pool.submit(shm_meeting.take, words, 20.0) for _ in range(2)]
    first, others = offered.result(), [future.result() for future in taken]
    os.pwrite(first.descriptor, b"here", 100)
    close(first)
    for shared in others:
        assert shared is not None
        assert os.pread(shared.descriptor, 4, 100) == b"here"
        assert shared.connections[0].recv(1) == b""
        close(shared)


def test_without_memory_nobody_shares_any(words: Words) -> None:
    with pytest.raises(PoolUnavailable):
        shm_meeting.offer(words, 1, 1 << 60, 20.0)
    assert words.get("memory") == NOBODY
    assert shm_meeting.take(words, 20.0) is None


def test_ranks_that_never_come_are_waited_for_no_longer_than_agreed(words: Words) -> None:
    with pytest.raises(TimeoutError):
        shm_meeting.offer(words, 1, NUM_BYTES, 0.2)


def test_a_first_rank_that_is_gone_is_noticed(words: Words) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"")
        words.set("memory", listener.getsockname())
    with pytest.raises(ConnectionRefusedError):
        shm_meeting.take(words, 20.0)


def test_a_first_rank_that_goes_without_a_word_is_noticed(words: Words) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"")
        listener.listen()
        words.set("memory", listener.getsockname())
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(shm_meeting.take, words, 20.0)
            listener.accept()[0].close()
            with pytest.raises(ConnectionError, match="the first rank has left"):
                taken.result()


def test_ranks_know_of_each_other_who_cannot_share(words: Words) -> None:
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda r: Ranks.ask(words, r, 3, can_share=r == 1), range(3)))
    assert [ranks.unable for ranks in told] == [[0, 2]] * 3


def test_ranks_know_how_many_cores_they_have_together(words: Words) -> None:
    cores = sorted(os.sched_getaffinity(0))

    def ask(rank: int) -> Ranks:
        os.sched_setaffinity(0, cores[:1])  # this thread's own
        return Ranks.ask(words, rank, 2, can_share=True)

    with ThreadPoolExecutor(2) as pool:
        assert [ranks.num_cores for ranks in pool.map(ask, range(2))] == [1, 1]
