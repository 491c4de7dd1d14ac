"""Speculative decoding as a latency model: a step drafts g tokens and checks them at once.

How many of them are accepted is the simulator's affair; here is what such a step costs:
`T_target(B (g + 1) rows) + g T_draft(B)`.
"""

from collections.abc import Sequence

from planner.latency.interface import Chunk, Estimate, LatencyModel, Source, StepLine

ORDER = (Source.MEASURED, Source.FITTED, Source.ROOFLINE)


class Speculative:
    """A target with a draft model on the same devices; `num_drafted` tokens per step.

    The check is a decode step of the target with `num_drafted + 1` rows for each sequence, all of
    them over the same keys and values: the batch grows, the summed context does not.
    """

    def __init__(self, target: LatencyModel, draft: LatencyModel, num_drafted: int) -> None:
        self._target, self._draft, self._num_drafted = target, draft, num_drafted
        self.num_stages = target.num_stages
        self.slowest = target.slowest
        self.num_devices = target.num_devices
        self.source = _worse(target.source, draft.source)
        # The draft runs as a whole on each step; a stage carries its share.
        self._draft_share = draft.num_stages / target.num_stages

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        """Both models must have seen the prompt."""
        return self._both(self._target.prefill(chunks), self._draft.prefill(chunks))

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        drafted = self._num_drafted
        check = self._target.decode(batch * (drafted + 1), context_tokens)
        draft = self._draft.decode(batch, context_tokens)
        share = drafted * self._draft_share
        # The draft's own context grows by a token of each sequence from draft to draft.
        grown_s = draft.per_token_s * batch * (drafted - 1) / 2
        return StepLine(
            check.base_s + share * (draft.base_s + grown_s),
            check.per_token_s + share * draft.per_token_s,
            min(check.until_tokens, draft.until_tokens),
            _worse(check.source, draft.source),
        )

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        rows = batch * (self._num_drafted + 1)
        step = self._both(
            self._target.mixed(chunks, rows, context_tokens),
            self._draft.mixed(chunks, batch, context_tokens),
        )
        if not batch:
            return step
        further = self._draft.decode(batch, context_tokens)
        share = (self._num_drafted - 1) * self._draft_share
        further_s = share * further.seconds(context_tokens)
        return Estimate(step.seconds + further_s, _worse(step.source, further.source))

    def transfer(self, num_tokens: int) -> Estimate:
        """Keys and values of both models."""
        target, draft = self._target.transfer(num_tokens), self._draft.transfer(num_tokens)
        return Estimate(target.seconds + draft.seconds, _worse(target.source, draft.source))

    def _both(self, target: Estimate, draft: Estimate) -> Estimate:
        seconds = target.seconds + self._draft_share * draft.seconds
        return Estimate(seconds, _worse(target.source, draft.source))


def _worse(one: Source, other: Source) -> Source:
    return max(one, other, key=ORDER.index)
