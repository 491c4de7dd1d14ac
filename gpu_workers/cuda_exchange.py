"""KV exchange between workers on GPUs: peers' pools opened by CUDA IPC, copied on a side stream.

A prompt's keys and values are whole when its prefill worker has fetched the first token, so a pull
need not wait for anything over there. Here, each pull ends with an event of its own: only when
that is over has the pull ended, and whatever the computing stream is asked from then on waits for
it. Nothing blocks but the parting from a peer, which ends what is under way.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from gpu_workers import pull_check
from gpu_workers.cpu_exchange import TORCH_DTYPES, Incarnation, block_parts
from gpu_workers.cuda_copies import BATCH_BELOW_BYTES, plan_copies
from gpu_workers.cuda_routes import SLOW_BELOW, Gpu, PullPath, Route, measure, open_route
from gpu_workers.step_plan import Pull, PullResult
from ipc.cuda_runtime import load_runtime
from ipc.kv_cuda import DeviceMemory, as_bytes, read_handle, write_handle
from ipc.kv_layout import LayoutMismatch, Piece, RankLayout, check_same_blocks, pieces
from ipc.kv_shm import PoolUnavailable
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)


class _Peer(NamedTuple):
    layout: RankLayout
    route: Route


class _Flight(msgspec.Struct, frozen=True):
    """A pull under way: `fence` is over when its last copy is done."""

    pull: Pull
    sources: list[tuple[_Peer, Piece]]
    num_bytes: int
    started_s: float
    fence: int


class CudaExchange:
    """Owns this worker's pool on a GPU, and opens those of its peers.

    Args:
        memory: what this process has of GPUs' memory.
        gpu: our device.
        device: the same, as torch names it.
        computing: the stream that reads pulled blocks later on.
        batch_below: copies of fewer bytes are gathered into batches.

    `descriptor` is for importers: a memory file with the handle of the pool.

    Raises:
        PoolUnavailable: the memory for the pool cannot be had, or cannot be shared.
    """

    def __init__(
        self,
        layout: RankLayout,
        label: str,
        memory: DeviceMemory,
        gpu: Gpu,
        *,
        device: torch.device,
        computing: Callable[[], int],
        batch_below: int = BATCH_BELOW_BYTES,
    ) -> None:
        self.layout = layout
        self._memory, self._runtime = memory, memory.runtime
        self._gpu, self._device = gpu, device
        self._computing = computing
        self._batch_below = batch_below
        self._runtime.use(gpu.index)
        self._own = memory.allocate(layout.pool_bytes, gpu.uuid)
        self.descriptor = write_handle(self._own.handle, label)
        self._pool = self._view(self._own.address, layout, device)
        self._stream = self._runtime.make_stream()
        self._peers: dict[Incarnation, dict[tuple[int, int], _Peer]] = {}
        self._pieces: dict[Incarnation, list[tuple[_Peer, Piece]]] = {}
        self._flights: deque[_Flight] = deque()
        self._finished: list[PullResult] = []
        self._verifies = pull_check.is_asked_for()

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    @property
    def pull_path(self) -> str:
        """The slowest way in use; empty where there are no peers."""
        in_use = {peer.route.path for ranks in self._peers.values() for peer in ranks.values()}
        return str(max(in_use, key=list(PullPath).index, default=""))

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        try:
            check_same_blocks(self.layout, layout)
            handle = read_handle(descriptor)
        finally:
            os.close(descriptor)
        if handle.num_bytes < layout.pool_bytes:
            raise PoolUnavailable(
                f"the pool of {worker} has {handle.num_bytes} bytes where its layout says "
                f"{layout.pool_bytes}"
            )
        route = open_route(self._memory, self._gpu, handle)
        self._test(worker, route)
        ranks = self._peers.setdefault((worker.instance, epoch), {})
        ranks[worker.stage, worker.tp_rank] = _Peer(layout, route)
        self._pieces.pop((worker.instance, epoch), None)

    def unmap_instance(self, instance: str, epoch: int) -> None:
        """Let what is under way come to its end, then close the pools: their memory is given back
        only when nobody has it open any more."""
        ranks = self._peers.pop((instance, epoch), {})
        if not ranks:
            return
        self._pieces.pop((instance, epoch), None)
        self._runtime.synchronize(self._stream)
        self._land()
        for peer in ranks.values():
            peer.route.close()

    def knows(self, instance: str, epoch: int) -> bool:
        if (instance, epoch) not in self._peers:
            return False
        try:
            self._pieces_of((instance, epoch))
        except LayoutMismatch:  # some of its ranks have not been mapped yet
            return False
        return True

    def begin(self, pull: Pull) -> None:
        started_s = time.monotonic()
        sources = self._pieces_of((pull.handle.owner, pull.handle.epoch))
        blocks = list(zip(pull.handle.block_ids, pull.into, strict=True))
        num_bytes = 0
        for peer, piece in sources:
            plan = plan_copies(
                peer.layout, self.layout, piece, blocks, batch_below=self._batch_below
            )
            peer.route.copy(plan, self._own.address, self._stream)
            num_bytes += plan.num_bytes
        fence = self._runtime.make_event()
        self._runtime.record(fence, self._stream)
        self._flights.append(_Flight(pull, sources, num_bytes, started_s, fence))

    def finished(self) -> list[PullResult]:
        """Raises CudaError: a copy has failed, and with it this process's use of the device."""
        self._land()
        results, self._finished = self._finished, []
        return results

    def close(self) -> None:
        """Part from all peers. The pool stays until `free` or the end of the process, as others
        may have it open."""
        for incarnation in list(self._peers):
            self.unmap_instance(*incarnation)
        self._runtime.synchronize(self._stream)
        self._runtime.destroy_stream(self._stream)
        os.close(self.descriptor)

    def free(self) -> None:
        """Give the pool back, after `close` and when nobody has it open any more."""
        self._memory.free(self._own)

    def _land(self) -> None:
        """Pulls end in the order of their beginning: they share a stream."""
        while self._flights and self._runtime.is_over(self._flights[0].fence):
            flight = self._flights.popleft()
            self._runtime.wait_for(self._computing(), flight.fence)
            self._runtime.destroy_event(flight.fence)
            self._finished.append(
                PullResult(
                    flight.pull.handle.request_id,
                    flight.num_bytes,
                    flight.started_s,
                    time.monotonic(),
                    self._verify(flight) if self._verifies else 0,
                )
            )

    def _verify(self, flight: _Flight) -> int:
        """Parts of blocks that differ from their source, which is still held."""
        found = 0
        for peer, piece in flight.sources:
            address = peer.route.mapping.address
            source = self._view(address, peer.layout, self._seen_from(peer))
            found += pull_check.num_different(block_parts(source, self._pool, piece, flight.pull))
        if found:
            logger.error(
                "request %d: %d parts of blocks pulled from %s differ from their source",
                flight.pull.handle.request_id,
                found,
                flight.pull.handle.owner,
            )
        return found

    def _seen_from(self, peer: _Peer) -> torch.device:
        if self._device.type == "cpu":
            return self._device
        return torch.device(self._device.type, peer.route.mapping.device)

    def _test(self, worker: WorkerName, route: Route) -> None:
        """Measure the way, and say which it is."""
        bytes_per_s = measure(self._runtime, route, self._stream)
        told = (worker, route.path, bytes_per_s / 1e9)
        logger.info("the pool of %s is read by way of: %s, %.1f GB/s", *told)
        if bytes_per_s < SLOW_BELOW[route.path]:
            expected = SLOW_BELOW[route.path] / 1e9
            logger.warning(
                "pulls from %s (%s) are slow: %.2f GB/s, at least %.0f were expected",
                *told,
                expected,
            )

    def _pieces_of(self, incarnation: Incarnation) -> list[tuple[_Peer, Piece]]:
        """What to copy from which of its pools; worked out once per incarnation."""
        if incarnation not in self._pieces:
            peers = list(self._peers[incarnation].values())
            found = pieces(self.layout, [peer.layout for peer in peers])
            self._pieces[incarnation] = [(peers[piece.source], piece) for piece in found]
        return self._pieces[incarnation]

    def _view(self, address: int, layout: RankLayout, device: torch.device) -> torch.Tensor:
        flat = as_bytes(address, layout.pool_bytes, device)
        return flat.view(TORCH_DTYPES[layout.dtype]).view(layout.shape)


def exchange_on(
    device: torch.device, layout: RankLayout, label: str, *, batch_below: int = BATCH_BELOW_BYTES
) -> CudaExchange:
    """The exchange of a worker whose device that is (`cuda:N`).

    Raises:
        PoolUnavailable: the memory for the pool cannot be had, or cannot be shared.
        CudaUnavailable: there is no CUDA runtime.
    """
    return CudaExchange(
        layout,
        label,
        DeviceMemory(load_runtime()),
        gpu_of(device),
        device=device,
        computing=lambda: int(torch.cuda.current_stream(device).cuda_stream),
        batch_below=batch_below,
    )


def gpu_of(device: torch.device) -> Gpu:
    """What CUDA knows of it and of its neighbours."""
    count = torch.cuda.device_count()
    uuids = (str(torch.cuda.get_device_properties(index).uuid) for index in range(count))
    return Gpu(device.index or 0, tuple(uuids))
