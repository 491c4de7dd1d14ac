"""Whether tokens are such as an engine would have drawn: by teacher forcing, not by equality.

In 16 bit another shape of batch rounds otherwise, and random weights have near-ties: two right
engines draw different tokens now and then, and all after the first of these differ. So an eager
engine is given the tokens that the other drew. At each place the drawn token must be about as
likely as the likeliest; a wrong cache, position or block makes it as unlikely as any.
"""

from collections.abc import Sequence

from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import require

SLACK = 0.25
"""Nats below the likeliest. Rounding in a model of a few layers moves log probabilities by some
hundredths; a token picked blindly among hundreds of random ones lies some nats below."""

Tokens = Sequence[Sequence[int]]


def require_likely(judge: Driver, asked: Tokens, drawn: Tokens, expected: Tokens, who: str) -> int:
    """How many of the answers are the expected ones; the others must be as likely.

    Raises:
        CheckFailed: one is not.
    """
    differing = [i for i, pair in enumerate(zip(drawn, expected, strict=True)) if _differ(*pair)]
    unlikely = {}
    for i in differing:
        gap = max(judge.gaps(asked[i], drawn[i]))
        if gap > SLACK:
            unlikely[i] = gap
    require(
        not unlikely,
        f"{who}: sequences {sorted(unlikely)} of {len(asked)} go on otherwise, with a token "
        f"{max(unlikely.values(), default=0.0):.2f} nats less likely than the likeliest; at most "
        f"{SLACK} was expected",
    )
    return len(asked) - len(differing)


def _differ(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    return list(ours) != list(theirs)
