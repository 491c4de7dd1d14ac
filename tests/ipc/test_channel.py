"""The inherited channel carries a configuration and descriptors, and tells when it is cut."""

import os

import pytest

from ipc import channel, kv_shm
from ipc.channel import PoolDescriptor
from ipc.messages import WorkerConfig
from ipc.vocabulary import DType, Parallelism, Role, WorkerName

CONFIG = WorkerConfig(
    name=WorkerName("decode-0"),
    epoch=5,
    role=Role.DECODE,
    parallelism=Parallelism(),
    endpoint="ipc:///run/x",
    model_dir="/models/x",
    dtype=DType.BF16,
    kv_bytes=1 << 20,
    block_size=16,
    max_context_tokens=64,
    prefill_tokens=32,
    max_batch=8,
)


def test_a_configuration_comes_out_as_it_went_in() -> None:
    ours, theirs = channel.make_pair()
    with ours, theirs:
        channel.send_config(ours, CONFIG)
        assert channel.receive_config(theirs) == CONFIG


def test_a_pool_is_the_same_memory_at_both_ends() -> None:
    ours, theirs = channel.make_pair()
    about = PoolDescriptor(WorkerName("prefill-0"), 5)
    descriptor = kv_shm.create(8192, "test")
    with ours, theirs:
        channel.send_descriptor(ours, about, descriptor)
        received, copy = channel.receive_descriptor(theirs)
    assert received == about
    with kv_shm.map_pool(descriptor, 8192) as one, kv_shm.map_pool(copy, 8192) as other:
        one[5000] = 7
        assert other[5000] == 7
    os.close(descriptor)
    os.close(copy)


def test_a_cut_channel_says_so() -> None:
    ours, theirs = channel.make_pair()
    ours.close()
    with theirs:
        with pytest.raises(channel.ChannelClosed):
            channel.receive_config(theirs)
        with pytest.raises(channel.ChannelClosed):
            channel.send_descriptor(theirs, PoolDescriptor(WorkerName("a"), 1), 0)
        with pytest.raises(channel.ChannelClosed):
            channel.send_config(theirs, CONFIG)


def test_a_channel_that_is_reset_says_so() -> None:
    """The other end was closed with something unread in it."""
    ours, theirs = channel.make_pair()
    channel.send_config(theirs, CONFIG)
    ours.close()
    with theirs, pytest.raises(channel.ChannelClosed):
        channel.receive_config(theirs)


def test_a_pool_smaller_than_its_layout_is_refused_C15() -> None:
    descriptor = kv_shm.create(4096, "test")
    with pytest.raises(kv_shm.PoolUnavailable, match="4096 bytes where its layout says 8192"):
        kv_shm.map_pool(descriptor, 8192)
    os.close(descriptor)


def test_a_pool_that_memory_cannot_hold_is_refused_C15() -> None:
    with pytest.raises(kv_shm.PoolUnavailable, match="GiB of memory are available"):
        kv_shm.create(1 << 60, "test")
