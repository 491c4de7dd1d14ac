"""An executor and an exchange that compute nothing, with the face of the real ones.

The executor keeps a table of sequences exactly as plans say and checks what a real one relies on:
known sequences, enough blocks for every row, no block written by two sequences. Its tokens are a
function of the sequence alone, so that answers do not depend on how steps were batched.
"""

from gpu_workers.step_plan import Pull, PullResult, RowResult, StepPlan, StepResult
from ipc.vocabulary import TokenLogprobs


class ScriptedSequence:
    def __init__(self, prompt: tuple[int, ...], output: tuple[int, ...], num_computed: int) -> None:
        self.prompt = prompt
        self.output = list(output)
        self.num_computed = num_computed
        self.blocks: list[int] = []


def scripted_token(prompt: tuple[int, ...], choice: int, index: int) -> int:
    """The `index`-th output token of a choice."""
    return (sum(prompt) + 7 * choice + 13 * index) % 1000


class ScriptedExecutor:
    """Checks every plan; see the module's docstring.

    One that does not draw has results without rows, and learns of tokens by plans.
    """

    def __init__(
        self, exchange: "ScriptedExchange", block_size: int, *, draws: bool = True
    ) -> None:
        self._draws = draws
        self._exchange = exchange
        self._block_size = block_size
        self.table: dict[int, ScriptedSequence] = {}
        self.choices: dict[int, tuple[int, ...]] = {}
        self.plans: list[StepPlan] = []
        self.max_tokens_at_once = 0

    def launch(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._apply(plan)
        for pull in plan.pulls:
            self._exchange.begin(pull)
        results = []
        for row in plan.rows:
            sequence = self.table[row.sequence]
            sequence.num_computed += row.num_new
            known = len(sequence.prompt) + len(sequence.output)
            assert sequence.num_computed <= known, "a token was computed before it was drawn"
            assert len(sequence.blocks) * self._block_size >= sequence.num_computed
            assert row.draws == (sequence.num_computed == known)
            if row.draws:
                results.append(self._draw(row.sequence, sequence))
        self._check_writers(plan)
        return StepResult(plan.step_id, tuple(results) if self._draws else ())

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def _apply(self, plan: StepPlan) -> None:
        for drawn in () if self._draws else plan.drawn:
            sequence = self.table[drawn.sequence]
            (choice,) = self.choices[drawn.sequence]
            token = scripted_token(sequence.prompt, choice, len(sequence.output))
            assert drawn.token_id == token, "a token is missing, or told twice"
            sequence.output.append(token)
        for instance, epoch in plan.unmapped:
            self._exchange.unmap_instance(instance, epoch)
        for removed in plan.removed:
            del self.table[removed], self.choices[removed]
        for new in plan.added:
            assert new.sequence not in self.table
            self.table[new.sequence] = ScriptedSequence(new.prompt, new.output, new.num_computed)
            self.choices[new.sequence] = new.choices
        for blocks in plan.blocks:
            self.table[blocks.sequence].blocks += blocks.block_ids

    def _draw(self, name: int, sequence: ScriptedSequence) -> RowResult:
        index = len(sequence.output)
        choices = self.choices[name]
        tokens = tuple(scripted_token(sequence.prompt, c, index) for c in choices)
        if len(choices) == 1 and self._draws:
            sequence.output.append(tokens[0])
        return RowResult(name, tokens, tuple(TokenLogprobs(t, -1.0) for t in tokens))

    def _check_writers(self, plan: StepPlan) -> None:
        """The block a row writes its last token to belongs to that sequence alone."""
        owners: dict[int, int] = {}
        for sequence in self.table.values():
            for block in sequence.blocks:
                owners[block] = owners.get(block, 0) + 1
        for row in plan.rows:
            sequence = self.table[row.sequence]
            written = sequence.blocks[(sequence.num_computed - 1) // self._block_size]
            assert owners[written] == 1, f"block {written} is written by one of several owners"


class ScriptedExchange:
    """Knows the instances that it is told of; a pull is over at once."""

    def __init__(self) -> None:
        self.known: set[tuple[str, int]] = set()
        self.pulls: list[Pull] = []
        self._finished: list[PullResult] = []

    def knows(self, instance: str, epoch: int) -> bool:
        return (instance, epoch) in self.known

    def unmap_instance(self, instance: str, epoch: int) -> None:
        self.known.discard((instance, epoch))

    def begin(self, pull: Pull) -> None:
        assert len(pull.handle.block_ids) == len(pull.into)
        self.pulls.append(pull)
        self._finished.append(PullResult(pull.handle.request_id, 1024, 1.0, 2.0))

    def finished(self) -> list[PullResult]:
        results, self._finished = self._finished, []
        return results
