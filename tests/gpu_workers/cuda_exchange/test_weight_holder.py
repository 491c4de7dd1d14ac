"""Weights held once for several workers: what they get, who starts it, who outlives whom."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import psutil
import pytest
import torch

from gpu_workers.collectives import Alone
from gpu_workers.cuda_routes import Gpu
from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.held_weights import (
    GpuSegments,
    HeldWeights,
)
from gpu_workers.models.config import read_config
from gpu_workers.weight_guest import HolderFailed, held_weights
from gpu_workers.weight_holder import Holder, Order
from ipc.cuda_runtime import CudaError, CudaRuntime
from ipc.kv_cuda import DeviceMemory
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import llama_gqa, opt_pre_norm
from tests.gpu_workers.cuda_exchange.fake_cudart import FakeCudart
from tests.gpu_workers.cuda_exchange.fake_function import ILLEGAL_ADDRESS


def order_of(model_dir: Path) -> Order:
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=64)
    return Order(spec, "cpu")


@contextmanager
def daemon_for(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the daemon's place; holders of that directory end with it."""
    with subprocess.Popen(["sleep", "1000"]) as daemon:
        try:
            yield daemon
        finally:
            daemon.kill()
            for holder in holders(run_dir):
                with suppress(ProcessLookupError):
                    assert has_ended(holder)


def holders(run_dir: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "weight-holder" in (process.info["cmdline"] or ())
        and any(str(run_dir) in word for word in process.info["cmdline"])
    ]


def has_ended(process: int) -> bool:
    """Within a bound that a busy machine keeps, too."""
    with suppress(ProcessLookupError):
        watched = select.poll()  # played GPUs have had a thousand descriptors by now
        watched.register(os.pidfd_open(process), select.POLLIN)
        return bool(watched.poll(30_000))
    return True


class HeldUp(NamedTuple):
    """An order whose holder is held up when it reads its model's configuration."""

    order: Order
    run_dir: Path
    daemon: subprocess.Popen[bytes]
    pipe: Path

    def hold(self) -> HeldWeights:
        return held_weights(self.order, self.run_dir, self.daemon.pid)

    @contextmanager
    def loading(self) -> Iterator[tuple[int, IO[bytes]]]:
        """A holder that has begun to load, and where it reads from."""
        with open(self.pipe, "wb") as pipe:  # opens when the holder has opened it, too
            (holder,) = holders(self.run_dir)
            yield holder, pipe


WORKER = """
import sys
from pathlib import Path
import msgspec, orjson
from gpu_workers.weight_guest import held_weights
from gpu_workers.weight_holder import Order
order = msgspec.convert(orjson.loads(sys.argv[1]), Order)
held_weights(order, Path(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.fixture
def held_up(tmp_path: Path) -> Iterator[HeldUp]:
    order = order_of(llama_gqa(tmp_path / "model"))
    pipe = tmp_path / "model/config.json"
    pipe.rename(tmp_path / "config")
    os.mkfifo(pipe)
    with daemon_for(tmp_path) as daemon:
        yield HeldUp(order, tmp_path, daemon, pipe)


def logits_of(model_dir: Path, weights: HeldWeights | None) -> torch.Tensor:
    order, config = order_of(model_dir), read_config(str(model_dir))
    layout = pool_layout(config, dtype=DType.FP32, block_size=16, kv_bytes=1 << 20)
    executor = build_executor(
        config, order.spec, PrivatePool(layout), collectives=Alone(), weights=weights
    )
    with torch.inference_mode():
        hidden = torch.linspace(-1, 1, config.hidden_size).expand(2, -1)
        logits = executor.model.logits(hidden)
    assert logits is not None
    return logits.clone()


@pytest.mark.parametrize("make", [llama_gqa, opt_pre_norm])
def test_a_model_of_held_weights_computes_what_one_of_its_own_does(
    tmp_path: Path, make: object
) -> None:
    assert callable(make)
    model_dir = make(tmp_path / "model")
    with daemon_for(tmp_path) as daemon:
        held = held_weights(order_of(model_dir), tmp_path, daemon.pid)
        assert torch.equal(logits_of(model_dir, held), logits_of(model_dir, None))


def test_workers_share_one_holder_which_ends_with_the_daemon_C7(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path / "model")
    with daemon_for(tmp_path) as daemon:
        held_weights(order_of(model_dir), tmp_path, daemon.pid)
        held_weights(order_of(model_dir), tmp_path, daemon.pid)
        (holder,) = holders(tmp_path)
        assert os.getsid(holder) == holder  # killing the worker that started it leaves it alone
        daemon.kill()
        assert has_ended(holder)


def test_a_holder_that_dies_takes_nothing_away_and_is_replaced(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path / "model")
    with daemon_for(tmp_path) as daemon:
        first = held_weights(order_of(model_dir), tmp_path, daemon.pid)
        (holder,) = holders(tmp_path)
        os.kill(holder, signal.SIGKILL)
        assert has_ended(holder)
        second = held_weights(order_of(model_dir), tmp_path, daemon.pid)
        name = "model.norm.weight"
        assert torch.equal(first.take(name), second.take(name))
        assert holders(tmp_path) != [holder]


def test_a_holder_that_cannot_load_says_so_at_once(tmp_path: Path) -> None:
    model_dir = llama_gqa(tmp_path / "model")
    (model_dir / "model.safetensors").unlink()
    with daemon_for(tmp_path) as daemon, pytest.raises(HolderFailed, match="is not there; weights"):
        held_weights(order_of(model_dir), tmp_path, daemon.pid)


def test_a_holder_that_is_killed_while_it_loads_is_told_with_how_it_ended(held_up: HeldUp) -> None:
    with ThreadPoolExecutor(1) as worker:
        waiting = worker.submit(held_up.hold)
        with held_up.loading() as (holder, _):
            os.kill(holder, signal.SIGKILL)
            with pytest.raises(HolderFailed, match="the holder of the weights ended with -9"):
                waiting.result()


def test_a_holder_ends_with_the_daemon_even_while_it_loads_C7_C8(held_up: HeldUp) -> None:
    with ThreadPoolExecutor(1) as worker:
        waiting = worker.submit(held_up.hold)
        with held_up.loading() as (holder, _):
            held_up.daemon.kill()
            assert has_ended(holder)
            with pytest.raises(HolderFailed):
                waiting.result()


def test_a_worker_that_dies_while_its_holder_loads_leaves_it_to_the_next_one(
    held_up: HeldUp,
) -> None:
    """Two holders would load at the same time, and a GPU has no room for twice the weights."""
    told = [held_up.order.packed.decode(), str(held_up.run_dir), str(held_up.daemon.pid)]
    with subprocess.Popen([sys.executable, "-c", WORKER, *told]) as worker:
        with held_up.loading() as (holder, pipe):
            worker.kill()
            worker.wait()
            path = held_up.order.socket_in(held_up.run_dir, held_up.daemon.pid)
            with open(f"{path}.lock") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pipe.write((held_up.run_dir / "config").read_bytes())
        assert held_up.hold().take("model.norm.weight").numel()
        assert holders(held_up.run_dir) == [holder]


def test_other_weights_have_another_holder_and_so_have_another_daemon_and_another_gpu(
    tmp_path: Path,
) -> None:
    order = order_of(tmp_path / "a")
    others = [
        order_of(tmp_path / "b").socket_in(tmp_path, 1),
        order.socket_in(tmp_path, 2),
        # Where each worker sees its own GPU alone, all of them are number 0.
        msgspec.structs.replace(order, gpu="GPU-b").socket_in(tmp_path, 1),
    ]
    assert order.socket_in(tmp_path, 1) == order.socket_in(tmp_path, 1)
    assert len({order.socket_in(tmp_path, 1), *others}) == 4


def played_holder(tmp_path: Path, **how: float) -> tuple[Holder, FakeCudart]:
    """In this process, on a played GPU."""
    library = FakeCudart()
    memory = DeviceMemory(CudaRuntime(library))
    segments = GpuSegments(memory, Gpu(0, ("GPU-a",)), torch.device("cpu"))
    order = order_of(llama_gqa(tmp_path / "model"))
    return Holder(order, segments, tmp_path / "w0", **how), library


def test_a_holder_whose_device_failed_gives_nothing_out_and_ends(tmp_path: Path) -> None:
    holder, library = played_holder(tmp_path)
    with closing(holder), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.connect(str(tmp_path / "w0"))
        library.fails["cudaStreamSynchronize"] = ILLEGAL_ADDRESS
        with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
            holder.serve()
        assert guest.recv(16) == b""
    assert not (tmp_path / "w0").exists()


def test_a_holder_asks_its_device_even_if_nobody_comes(tmp_path: Path) -> None:
    """Under MPS a fault is that of all who use the GPU, and it recovers when all have left."""
    holder, library = played_holder(tmp_path, look_s=0.01)
    library.fails["cudaStreamSynchronize"] = ILLEGAL_ADDRESS
    with closing(holder), pytest.raises(CudaError):
        holder.serve()
