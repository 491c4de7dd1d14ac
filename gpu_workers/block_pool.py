"""The books of one instance's KV blocks: who references which, what is held, what is free.

Pure: no tensors. A block has two lifetimes: the sequences that reference it (counted; a shared
block counts once in the books) and the copies that read it. It is free only when both have ended,
so at any moment free + held + in use = total. A released block returns to the free list only when
every step that was launched before, and so may still name it, has been collected.
"""

from collections import deque
from collections.abc import Iterable


class NotEnoughBlocks(Exception):
    """The pool cannot give that many; nothing was taken."""


class BlockPool:
    """Free list and reference counts. Ids are handed out lowest first while the pool is fresh."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._held: dict[int, tuple[int, ...]] = {}
        self._retiring: deque[tuple[int, int]] = deque()  # (last launched step, block)
        self._num_launched = 0
        self._num_collected = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Released blocks that come free when steps under way have been collected."""
        return len(self._retiring)

    @property
    def num_held(self) -> int:
        """Blocks of prefilled prompts that wait for their readers to end."""
        return sum(len(block_ids) for block_ids in self._held.values())

    @property
    def num_in_use(self) -> int:
        """Blocks that running sequences or steps under way may use, each counted once."""
        return self.num_blocks - self.num_free - self.num_held

    def reserve(self, num_blocks: int) -> tuple[int, ...]:
        """Take free blocks, each with one reference.

        Raises:
            NotEnoughBlocks: fewer are free.
        """
        if num_blocks > len(self._free):
            raise NotEnoughBlocks(f"{num_blocks} blocks wanted, {len(self._free)} free")
        taken = tuple(self._free.pop() for _ in range(num_blocks))
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each; they must be in use."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is not in use"
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Give one reference back for each; a block without references is free."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} released twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._retire(block_id)

    def step_launched(self) -> None:
        """From now on, blocks released are kept until this step has been collected."""
        self._num_launched += 1

    def step_collected(self) -> None:
        """The oldest launched step has ended; steps are collected in order."""
        self._num_collected += 1
        while self._retiring and self._retiring[0][0] <= self._num_collected:
            self._free.append(self._retiring.popleft()[1])

    def hold(self, request_id: int, block_ids: tuple[int, ...]) -> None:
        """Keep a prefilled prompt's blocks for readers, until `end_hold`."""
        assert request_id not in self._held, f"request {request_id} is held already"
        assert all(self._references[b] == 1 for b in block_ids), "held blocks have one owner"
        self._held[request_id] = block_ids

    def end_hold(self, request_id: int) -> bool:
        """The last reader has ended. False when nothing is held for it (any more)."""
        block_ids = self._held.pop(request_id, None)
        if block_ids is None:
            return False
        self.release(block_ids)
        return True

    def check_integrity(self, referenced: Iterable[int]) -> list[str]:
        """Compare the books with the tables of the running sequences: every block they list, as
        often as they list it. Returns what does not agree, in words; empty when all is well."""
        expected = [0] * self.num_blocks
        for block_id in referenced:
            expected[block_id] += 1
        for block_ids in self._held.values():
            for block_id in block_ids:
                expected[block_id] += 1
        faults = [
            f"block {block_id}: {counted} references in the books, {want} in the tables"
            for block_id, (counted, want) in enumerate(zip(self._references, expected, strict=True))
            if counted != want
        ]
        free = set(self._free)
        if len(free) != len(self._free):
            faults.append("the free list names a block twice")
        faults += [f"block {b} is free and referenced" for b in free if self._references[b]]
        known = len(free) + len(self._retiring) + sum(1 for count in self._references if count)
        lost = self.num_blocks - known
        if lost:
            faults.append(f"{lost} blocks are neither free nor referenced")
        return faults

    def _retire(self, block_id: int) -> None:
        if self._num_launched == self._num_collected:
            self._free.append(block_id)
        else:
            self._retiring.append((self._num_launched, block_id))
