"""KV exchange between workers on GPUs: peers' pools opened by CUDA IPC, copied on a side stream.

A prompt's keys and values are whole when its prefill worker has fetched the first token, so a pull
need not wait for anything over there. Here, each pull ends with an event of its own: only when
that is over has the pull ended, and whatever the computing stream is asked from then on waits for
it. Nothing blocks but the parting from a peer, which ends what is under way. Where no GPU of ours
can read a pool, its owner puts blocks into memory of the host for us, and so do we for others.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import torch

from gpu_workers import pull_check
from gpu_workers.cpu_exchange import TORCH_DTYPES, block_parts
from gpu_workers.cuda_copies import plan_copies
from gpu_workers.cuda_pairing import Pairing
from gpu_workers.cuda_porter import Porter
from gpu_workers.cuda_proof import SPARE_BYTES, write_proof
from gpu_workers.cuda_routes import Gpu, Here, PullPath, Route
from gpu_workers.peer_pools import PeerPools
from gpu_workers.step_plan import Pull, PullResult
from ipc import kv_bounce
from ipc.cuda_runtime import load_runtime
from ipc.kv_bounce import Unanswered
from ipc.kv_cuda import NO_HANDLE, DeviceMemory, PoolHandle, as_bytes, document_of, parse_handle
from ipc.kv_layout import Piece, RankLayout, check_same_blocks
from ipc.kv_shm import PoolUnavailable
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)


class _Peer(NamedTuple):
    layout: RankLayout
    route: Route


class _Flight(msgspec.Struct, frozen=True):
    """A pull under way: it is over when `fence` is, and all that others `carry` for us."""

    pull: Pull
    sources: list[tuple[_Peer, Piece]]
    num_bytes: int
    started_s: float
    fence: int
    carried: list[Future[int]]

    @property
    def loss(self) -> str:
        """Why it is lost, if it is. Raises what else went wrong with it."""
        losses = [_loss(part) for part in self.carried]
        return next(filter(None, losses), "")


class Site(NamedTuple):
    """One GPU of a process: what that has of GPUs' memory, the GPU, the same as torch names it, and
    the stream that reads pulled blocks later on."""

    memory: DeviceMemory
    gpu: Gpu
    device: torch.device
    computing: Callable[[], int]


class CudaExchange:
    """Owns this worker's pool on a GPU, and opens those of its peers.

    Args:
        batch_below: copies of fewer bytes are gathered into batches; None: as measured.

    `descriptor` is for importers: a door behind which lies the handle of the pool.

    Raises:
        PoolUnavailable: the memory for the pool cannot be had.
    """

    def __init__(
        self, layout: RankLayout, label: str, site: Site, *, batch_below: int | None = None
    ) -> None:
        self.layout = layout
        self._site, self._runtime = site, site.memory.runtime
        self._runtime.use(site.gpu.index)
        num_bytes = layout.pool_bytes + SPARE_BYTES
        self._own = site.memory.allocate(num_bytes, site.gpu.uuid, must_share=False)
        write_proof(self._runtime, self._own)
        door, self.descriptor = kv_bounce.make_door(document_of(self._own.handle))
        self._porter = Porter(self._runtime, self._own, door, label)
        weakref.finalize(self, self._porter.dismiss)  # nobody may have closed us
        self._pool = self._view(self._own.address, layout)
        self._stream = self._runtime.make_stream()
        self._verifies = pull_check.is_asked_for()
        here = Here(site.memory, site.gpu, self._own, self._stream)
        self._pairing = Pairing(here, batch_below=batch_below, verifies=self._verifies)
        self._peers = PeerPools[_Peer](layout)
        self._flights: deque[_Flight] = deque()
        self._finished: list[PullResult] = []

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    @property
    def pull_path(self) -> str:
        """The slowest way in use; empty where there are no peers."""
        in_use = {peer.route.path for peer in self._peers}
        return str(max(in_use, key=list(PullPath).index, default=""))

    def map_peer(self, worker: WorkerName, epoch: int, layout: RankLayout, descriptor: int) -> None:
        try:
            check_same_blocks(self.layout, layout)
            handle = _read_handle(descriptor)
            if handle.num_bytes < layout.pool_bytes:
                raise PoolUnavailable(
                    f"the pool of {worker} has {handle.num_bytes} bytes where its layout says "
                    f"{layout.pool_bytes}"
                )
            route = self._pairing.open(worker, handle, descriptor)
        finally:
            os.close(descriptor)
        self._peers.add(worker, epoch, _Peer(layout, route))

    def unmap_instance(self, instance: str, epoch: int) -> None:
        """Let what is under way come to its end, then close the pools: their memory is given back
        only when nobody has it open any more."""
        peers = self._peers.remove(instance, epoch)
        if not peers:
            return
        for peer in peers:
            peer.route.finish()
        self._runtime.synchronize(self._stream)
        self._land()
        for peer in peers:
            peer.route.close()

    def knows(self, instance: str, epoch: int) -> bool:
        return self._peers.knows(instance, epoch)

    def begin(self, pull: Pull) -> None:
        started_s = time.monotonic()
        sources = self._peers.pieces_of(pull.handle.owner, pull.handle.epoch)
        blocks = list(zip(pull.handle.block_ids, pull.into, strict=True))
        num_bytes, carried = 0, []
        for peer, piece in sources:
            below = self._pairing.batch_below(peer.route.path)
            plan = plan_copies(peer.layout, self.layout, piece, blocks, batch_below=below)
            if (part := peer.route.copy(plan, self._own.address, self._stream)) is not None:
                carried.append(part)
            num_bytes += plan.num_bytes
        fence = self._runtime.make_event()
        self._runtime.record(fence, self._stream)
        self._flights.append(_Flight(pull, sources, num_bytes, started_s, fence, carried))

    def finished(self) -> list[PullResult]:
        """Raises CudaError: the device has failed, and with it this process's use of it."""
        self._porter.check()
        if not self._flights:
            # One who waits for work hears of its device only if it asks; and under MPS nobody gets
            # a new start there before all have heard.
            self._runtime.synchronize(self._stream)
        self._land()
        results, self._finished = self._finished, []
        return results

    def close(self) -> None:
        """Part from all peers. The pool stays until `free` or the end of the process, as others
        may have it open.

        Raises:
            CudaError: the device has failed; all that is not its own has been ended even so.
        """
        with ExitStack() as undo:  # each of these is done, though another raises
            undo.callback(os.close, self.descriptor)
            undo.callback(self._runtime.destroy_stream, self._stream)
            undo.callback(self._runtime.synchronize, self._stream)
            undo.callback(self._porter.close)
            for incarnation in self._peers.incarnations:
                undo.callback(self.unmap_instance, *incarnation)

    def free(self) -> None:
        """Give the pool back, after `close` and when nobody has it open any more."""
        self._site.memory.free(self._own)

    def _land(self) -> None:
        """In the order of their beginning, but nobody waits for one that others hold up."""
        under_way, self._flights = self._flights, deque()
        for flight in under_way:
            if self._is_over(flight):
                self._finished.append(self._landed(flight))
            else:
                self._flights.append(flight)

    def _is_over(self, flight: _Flight) -> bool:
        return all(part.done() for part in flight.carried) and self._runtime.is_over(flight.fence)

    def _landed(self, flight: _Flight) -> PullResult:
        self._runtime.wait_for(self._site.computing(), flight.fence)
        self._runtime.destroy_event(flight.fence)
        loss = flight.loss
        return PullResult(
            flight.pull.handle.request_id,
            0 if loss else flight.num_bytes,
            flight.started_s,
            time.monotonic(),
            self._verify(flight) if self._verifies and not loss else 0,
            loss,
        )

    def _verify(self, flight: _Flight) -> int:
        """Parts of blocks that differ from their source, which is still held."""
        found = sum(part.result() for part in flight.carried)
        for peer, piece in flight.sources:
            if (mapping := peer.route.mapping) is None:  # who carries it has compared it
                continue
            source = self._view(mapping.address, peer.layout)
            found += pull_check.num_different(block_parts(source, self._pool, piece, flight.pull))
        if found:
            logger.error(
                "request %d: %d parts of blocks pulled from %s differ from their source",
                flight.pull.handle.request_id,
                found,
                flight.pull.handle.owner,
            )
        return found

    def _view(self, address: int, layout: RankLayout) -> torch.Tensor:
        flat = as_bytes(address, layout.pool_bytes, self._site.device)
        return flat.view(TORCH_DTYPES[layout.dtype]).view(layout.shape)


def exchange_on(
    device: torch.device, layout: RankLayout, label: str, *, batch_below: int | None = None
) -> CudaExchange:
    """The exchange of a worker whose device that is (`cuda:N`).

    Raises:
        PoolUnavailable: the memory for the pool cannot be had.
        CudaUnavailable: there is no CUDA runtime.
    """
    site = Site(
        DeviceMemory(load_runtime()),
        gpu_of(device),
        device,
        lambda: int(torch.cuda.current_stream(device).cuda_stream),
    )
    return CudaExchange(layout, label, site, batch_below=batch_below)


def gpu_of(device: torch.device) -> Gpu:
    """What CUDA knows of it and of its neighbours."""
    count = torch.cuda.device_count()
    uuids = (str(torch.cuda.get_device_properties(index).uuid) for index in range(count))
    return Gpu(device.index or 0, tuple(uuids))


def _loss(part: Future[int]) -> str:
    """Why that part of a pull is lost, if it is. Raises what else went wrong with it."""
    if part.cancelled():
        return "we have parted from the pool's owner"
    try:
        part.result()
    except Unanswered as error:
        return str(error)
    return ""


def _read_handle(descriptor: int) -> PoolHandle:
    """How to open the pool behind that door. Raises PoolUnavailable: it is none."""
    try:
        return parse_handle(kv_bounce.read_document(descriptor))
    except OSError as error:
        raise PoolUnavailable(NO_HANDLE) from error
