"""The next step plan while it is being written: changes gather here between two launches."""

from collections.abc import Iterable, Sequence

from gpu_workers.step_plan import (
    BlockCopy,
    DrawnToken,
    NewBlocks,
    NewSequence,
    Pull,
    Row,
    StepPlan,
)


class Draft:
    """Collects what changed; `take` turns it into a plan and starts afresh."""

    def __init__(self) -> None:
        self._step_id = 0
        self._clear()

    @property
    def step_id(self) -> int:
        """What the next plan will be called."""
        return self._step_id + 1

    def _clear(self) -> None:
        self._drawn: list[DrawnToken] = []
        self._unmapped: list[tuple[str, int]] = []
        self._removed: list[int] = []
        self._added: dict[int, NewSequence] = {}
        self._blocks: list[NewBlocks] = []
        self._copies: list[BlockCopy] = []
        self._pulls: list[Pull] = []
        self.rows: list[Row] = []

    @property
    def is_empty(self) -> bool:
        """Drawn tokens alone are no reason for a plan: they matter when their sequences run."""
        changed = self._removed or self._added or self._blocks or self._copies
        return not (changed or self._pulls or self.rows or self._unmapped)

    def drew(self, sequence: int, token_id: int) -> None:
        """The ranks that did not draw this token are to hear of it, in order: two steps of a
        sequence may have ended since the last plan."""
        self._drawn.append(DrawnToken(sequence, token_id))

    def unmap(self, instance: str, epoch: int) -> None:
        """The ranks are to forget the pools of an incarnation that has ended."""
        self._unmapped.append((instance, epoch))

    def add(self, sequence: NewSequence, block_ids: Sequence[int]) -> None:
        self._added[sequence.sequence] = sequence
        self._blocks.append(NewBlocks(sequence.sequence, tuple(block_ids)))

    def grow(self, sequence: int, block_ids: Sequence[int]) -> None:
        self._blocks.append(NewBlocks(sequence, tuple(block_ids)))

    def remove(self, sequence: int) -> None:
        """Also takes back what this draft says of it: it may have come and gone between steps."""
        self._blocks = [blocks for blocks in self._blocks if blocks.sequence != sequence]
        self.rows = [row for row in self.rows if row.sequence != sequence]
        if self._added.pop(sequence, None) is None:
            self._removed.append(sequence)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        self._copies += [BlockCopy(source, target) for source, target in copies]

    def pull(self, pull: Pull) -> None:
        self._pulls.append(pull)

    def take(self) -> StepPlan:
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            drawn=tuple(self._drawn),
            removed=tuple(self._removed),
            unmapped=tuple(self._unmapped),
            added=tuple(self._added.values()),
            blocks=tuple(self._blocks),
            copies=tuple(self._copies),
            pulls=tuple(self._pulls),
            rows=tuple(self.rows),
        )
        self._clear()
        return plan
