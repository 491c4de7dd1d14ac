"""Which way leads to a peer's pool: the best that there is, chosen, tested and told once per peer.

Directly, where our GPU can read the pool; through the host's memory, where CUDA does not share
it: GPUs without peer access, instances of MIG, sandboxes that do not pass IPC on. What is found
out about a kind of way, such as which copies are quicker together, holds for all of its kind.
"""

import logging
import os
from collections.abc import Callable

from gpu_workers.cuda_bounce import BounceRoute
from gpu_workers.cuda_copies import BATCH_BELOW_BYTES
from gpu_workers.cuda_probe import PROBE_BYTES, NotMeasured, Probe, scratch
from gpu_workers.cuda_proof import is_read_truly
from gpu_workers.cuda_routes import DirectRoute, Here, PullPath, Route
from gpu_workers.gpu_links import Links, links_here
from ipc.cuda_runtime import CudaError
from ipc.kv_cuda import Mapping, PoolHandle
from ipc.kv_shm import PoolUnavailable
from ipc.vocabulary import WorkerName

logger = logging.getLogger(__name__)

VARIABLE = "DISTSERVE_PULL_PATH"
"""`host` in the environment: directly is not even tried."""

FLOORS: dict[PullPath, float] = {
    PullPath.LOCAL: 200e9,  # any data-centre GPU copies within its memory at several times that
    PullPath.PEER: 10e9,  # PCIe 3 x16 gives 12 GB/s, NVLink much more
    PullPath.HOST: 2e9,
}
"""Bytes per second below which something is wrong with the way, where its link is not known."""

SHARE_OF_LINK = 0.5
"""Of what a link can do: below it something is wrong with the way."""


class Pairing:
    """Finds the ways from peers' pools to one GPU.

    Args:
        batch_below: copies of fewer bytes are made together; None: as measured.
        verifies: whether what others carry for us is to be compared with its source.
        find_links: what is known of the links between GPUs, asked when the first is needed.

    Raises:
        PoolUnavailable: the environment asks for a way that nobody can be made to take.
    """

    def __init__(
        self,
        here: Here,
        *,
        batch_below: int | None = None,
        verifies: bool = False,
        find_links: Callable[[], Links] = links_here,
    ) -> None:
        self._here, self._memory, self._gpu = here, here.memory, here.gpu
        self._fixed, self._verifies = batch_below, verifies
        self._find_links = find_links
        self._links: Links | None = None
        self._batch_below: dict[PullPath, int] = {}
        self._forced = os.environ.get(VARIABLE, "")
        if self._forced not in ("", PullPath.HOST):
            raise PoolUnavailable(f"{VARIABLE} is {self._forced!r}; it may be host, or be left out")

    def batch_below(self, path: PullPath) -> int:
        """Copies of fewer bytes are quicker together on such a way."""
        if self._fixed is not None:
            return self._fixed
        return self._batch_below.get(path, BATCH_BELOW_BYTES)

    def open(self, worker: WorkerName, handle: PoolHandle, descriptor: int) -> Route:
        """The way to a worker's pool. If that has ended meanwhile, every pull is lost: others of
        our instance may have opened it in time, and pull as their leader says.

        Args:
            descriptor: the pool's; it stays the caller's.

        Raises:
            PoolUnavailable: there is none; says why.
        """
        reason = self._objection(handle)
        if reason is None:
            try:
                return self._direct(worker, handle)
            except PoolUnavailable as error:
                reason = str(error)
        return self._bounce(worker, handle, descriptor, reason)

    def _objection(self, handle: PoolHandle) -> str | None:
        """Why our GPU cannot read that pool, if that is known before it is tried."""
        if self._forced:
            return f"{VARIABLE} asks for it"
        if not handle.handle:
            return f"GPU {handle.gpu_uuid} does not share its memory"
        ours, uuids = self._gpu.index, self._gpu.uuids
        if handle.gpu_uuid == self._gpu.uuid or handle.gpu_uuid not in uuids:
            return None  # a GPU that we do not see is not ours to ask about; the driver knows
        theirs = uuids.index(handle.gpu_uuid)
        if self._memory.runtime.can_access(ours, theirs):
            return None
        return f"GPU {ours} has no peer access to GPU {theirs}"

    def _direct(self, worker: WorkerName, handle: PoolHandle) -> DirectRoute:
        """Raises PoolUnavailable: it cannot be opened, or what is read is not what is there."""
        path = PullPath.LOCAL if handle.gpu_uuid == self._gpu.uuid else PullPath.PEER
        route = DirectRoute(self._memory, self._memory.open(handle, self._gpu.index), path)
        try:
            self._test(worker, route)
        except PoolUnavailable:
            route.close()
            raise
        return route

    def _test(self, worker: WorkerName, route: DirectRoute) -> None:
        """Try the way, measure it, say which it is. Raises PoolUnavailable: it does not work."""
        self._prove(route.mapping)
        path, handle = route.path, route.mapping.handle
        runtime, num_bytes = self._memory.runtime, min(handle.num_bytes, PROBE_BYTES)
        try:
            with scratch(runtime, num_bytes) as target:
                places = {"source": route.mapping.address, "target": target}
                probe = Probe(runtime, self._here.stream, **places, num_bytes=num_bytes)
                with probe.running():
                    bytes_per_s = probe.bandwidth()
                    if path not in self._batch_below:
                        self._batch_below[path] = probe.batch_below()
        except NotMeasured as error:
            logger.info("the pool of %s is read by way of: %s (%s)", worker, path, error)
            return
        self._tell(worker, handle, path, bytes_per_s, self.batch_below(path))

    def _prove(self, theirs: Mapping) -> None:
        """Raises PoolUnavailable: copies do not bring what is there."""
        here, uuid = self._here, theirs.handle.gpu_uuid
        try:
            is_true = is_read_truly(self._memory.runtime, theirs, here.pool, here.stream)
        except CudaError as error:
            raise PoolUnavailable(f"copies from GPU {uuid} fail: {error}") from error
        if not is_true:
            raise PoolUnavailable(
                f"copies from GPU {uuid} bring other bytes than are there (PCIe ACS or an IOMMU "
                "may be in their way)"
            )

    def _bounce(
        self, worker: WorkerName, handle: PoolHandle, descriptor: int, reason: str
    ) -> Route:
        runtime, device = self._memory.runtime, self._gpu.index
        route = BounceRoute(runtime, device, descriptor, verifies=self._verifies)
        logger.warning("the pool of %s is read through the host's memory: %s", worker, reason)

        def tell(bytes_per_s: float, batch_below: int) -> None:
            self._tell(worker, handle, route.path, bytes_per_s, batch_below)

        route.measure(min(PROBE_BYTES, handle.num_bytes), tell)
        return route

    def _tell(
        self,
        worker: WorkerName,
        handle: PoolHandle,
        path: PullPath,
        bytes_per_s: float,
        batch_below: int,
    ) -> None:
        told = (worker, path, bytes_per_s / 1e9)
        logger.info(
            "the pool of %s is read by way of: %s, %.1f GB/s, copies below %.0f KiB together",
            *told,
            batch_below / 1024,
        )
        least = self._least(handle, path)
        if bytes_per_s < least:
            logger.warning(
                "pulls from %s (%s) are slow: %.2f GB/s, at least %.0f were expected",
                *told,
                least / 1e9,
            )

    def _least(self, handle: PoolHandle, path: PullPath) -> float:
        """Bytes per second that such a way should reach."""
        if path is not PullPath.PEER:
            return FLOORS[path]
        self._links = self._links or self._find_links()
        link = self._links.bytes_per_s(self._gpu.uuid, handle.gpu_uuid)
        return FLOORS[path] if link is None else SHARE_OF_LINK * link
