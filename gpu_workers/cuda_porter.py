"""The owner's part in pulls by those who cannot read its GPU's memory: fills the slots they share.

A thread of its own does it, on a stream of its own, so that the step loop never waits for it and
nobody for the step loop. Who asks has a bounded number of slots and asks for one only when it is
empty, so nothing piles up here. That blocks are whole, and stay until their reader has ended, is
what the others see to: a reader asks only while it pulls. When it dies, what it has asked for is
filled for nobody. Nothing is asked of CUDA before the first reader comes.
"""

import logging
import selectors
import socket
import threading
from contextlib import suppress

from gpu_workers.cuda_probe import Probe
from gpu_workers.cuda_routes import copy_all
from gpu_workers.cuda_slots import NUM_SLOTS, SLOT_BYTES, TOTAL_BYTES, SharedSlots
from ipc import kv_bounce
from ipc.cuda_runtime import CudaError, CudaRuntime
from ipc.kv_bounce import NoAsking
from ipc.kv_cuda import Mapping
from ipc.kv_shm import PoolUnavailable

logger = logging.getLogger(__name__)


class Porter:
    """Serves whoever comes to a pool's door, until it is closed or its device fails."""

    def __init__(
        self, runtime: CudaRuntime, pool: Mapping, door: socket.socket, label: str
    ) -> None:
        self._runtime, self._pool, self._door = runtime, pool, door
        self._guests: dict[socket.socket, SharedSlots] = {}
        self._stream: int | None = None
        self._batch_below: int | None = None  # as measured with the first reader's slots
        self._failure: Exception | None = None
        self._watched = selectors.DefaultSelector()
        # A daemon: the end of the process does not wait for it.
        self._thread = threading.Thread(target=self._run, name=f"porter of {label}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the serving, if something did: a worker that goes on without would
        have every prompt computed again and again that is read this way."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Part from all guests, in the middle of what they asked for if need be."""
        self.dismiss()
        self._thread.join()

    def dismiss(self) -> None:
        """The same, but do not wait for it."""
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody waits for this thread: it is raised where we check
            logger.error("blocks cannot be read through the host any more: %s", error)
            self._failure = error
        finally:
            self._part_from_all()

    def _serve(self) -> None:
        self._watched.register(self._door, selectors.EVENT_READ)
        while True:
            for key, _ in self._watched.select():
                if key.fileobj is not self._door:
                    assert isinstance(key.fileobj, socket.socket)
                    self._attend(key.fileobj)
                elif not self._greet():
                    return

    def _greet(self) -> bool:
        """Whether the door is still there."""
        if (came := kv_bounce.open_door(self._door)) is None:
            return False
        guest, memory = came
        if self._stream is None:
            self._runtime.use(self._pool.device)
            self._stream = self._runtime.make_stream()
        try:
            slots = SharedSlots(self._runtime, memory)
        except PoolUnavailable as error:
            logger.error("a reader's slots cannot be filled: %s", error)
            kv_bounce.send_away(guest, str(error))  # it knocks again with its next pull
            return True
        self._guests[guest] = slots
        self._watched.register(guest, selectors.EVENT_READ)
        if slots.is_pinned and self._batch_below is None:
            self._batch_below = self._measured(slots, self._stream)
        return True

    def _measured(self, slots: SharedSlots, stream: int) -> int:
        """Below how many bytes copies into slots are quicker together."""
        num_bytes = min(TOTAL_BYTES, self._pool.handle.num_bytes)
        where = {"source": self._pool.address, "target": slots.at(0)}
        probe = Probe(self._runtime, stream, **where, num_bytes=num_bytes)
        with probe.running():
            return probe.batch_below()

    def _attend(self, guest: socket.socket) -> None:
        reason = ""
        try:
            asking = kv_bounce.read_asking(guest)
            if asking is not None and self._fill(guest, *asking):
                return
        except NoAsking as error:
            reason = str(error)
            logger.error("a reader is sent away: %s", reason)
        self._part_from(guest, reason)

    def _fill(self, guest: socket.socket, slot: int, runs: list[tuple[int, int]]) -> bool:
        """Whether the guest is still there. Raises NoAsking: that is not in pool and slot."""
        size = self._pool.handle.num_bytes
        if any(offset + num_bytes > size for offset, num_bytes in runs):
            raise NoAsking("a run is not in the pool")
        if slot >= NUM_SLOTS or sum(num_bytes for _, num_bytes in runs) > SLOT_BYTES:
            raise NoAsking("that is not in a slot")
        assert self._stream is not None
        slots, copies = self._guests[guest], []
        at = slots.at(slot)
        for offset, num_bytes in runs:
            copies.append((at, self._pool.address + offset, num_bytes))
            at += num_bytes
        below = (self._batch_below or 0) if slots.is_pinned else 0
        copy_all(self._runtime, copies, self._stream, batch_below=below)
        self._runtime.synchronize(self._stream)
        return kv_bounce.say_filled(guest, slot)

    def _part_from(self, guest: socket.socket, reason: str) -> None:
        """Nothing is under way: whatever was asked has been waited for."""
        self._watched.unregister(guest)
        if reason:
            kv_bounce.send_away(guest, reason)
        guest.close()
        self._guests.pop(guest).close()

    def _part_from_all(self) -> None:
        """Readers see it as our end."""
        for here in (self._door, *self._guests):
            here.close()
        self._watched.close()
        with suppress(CudaError):  # of a device that failed, told already
            if self._stream is not None:
                self._runtime.destroy_stream(self._stream)
            for slots in self._guests.values():  # nothing writes there any more
                slots.close()
