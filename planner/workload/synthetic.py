"""Lengths by parameters, as the command line writes them.

`synthetic:INPUT,OUTPUT`, each side `512` (fixed), `256..1024` (uniform) or `512~0.8` (log-normal:
median and standard deviation of the logarithm). `long-context` is log-normal prompts around a
long median; its defaults are a choice that fits common 128k windows, not a measurement.
"""

import re

from planner.errors import WorkloadError
from planner.parsing import finite
from planner.workload.lengths import Fixed, LogNormal, Marginal, Uniform

MOST_TOKENS = 10_000_000
MAX_LOG_SD = 3.0
LONG_CONTEXT = {"input": "32768", "spread": "0.5", "output": "512"}
HOW = "each of the two is N, LOW..HIGH or MEDIAN~SD, as in synthetic:512,64"


def parse_synthetic(parameters: str) -> tuple[Marginal, Marginal]:
    """The part after `synthetic:`."""
    sides = parameters.split(",")
    if len(sides) != 2:
        raise WorkloadError(f"synthetic needs an input and an output length: {HOW}")
    return _marginal(sides[0].strip()), _marginal(sides[1].strip())


def parse_long_context(parameters: str) -> tuple[Marginal, Marginal]:
    """The part after `long-context:`, or nothing for the defaults."""
    given = dict(LONG_CONTEXT)
    for part in filter(None, parameters.split(",")):
        key, _, value = part.partition("=")
        if key.strip() not in LONG_CONTEXT:
            raise WorkloadError(
                f"long-context does not know {part!r}: it takes input=N, spread=SD and output=N"
            )
        given[key.strip()] = value.strip()
    median, output = (_tokens(given[side], f"long-context {side}") for side in ("input", "output"))
    return LogNormal(median, _log_sd(given["spread"])), Fixed(output)


def _marginal(text: str) -> Marginal:
    if ".." in text:
        low, high = (_tokens(side, f"synthetic {text!r}") for side in text.split("..", 1))
        if low > high:
            raise WorkloadError(f"synthetic {text!r}: the range must not fall")
        return Uniform(low, high)
    if "~" in text:
        median, _, log_sd = text.partition("~")
        return LogNormal(_tokens(median, f"synthetic {text!r}"), _log_sd(log_sd))
    return Fixed(_tokens(text, f"synthetic {text!r}"))


def _tokens(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,8}", text) or not 1 <= int(text) <= MOST_TOKENS:
        raise WorkloadError(
            f"{where}: a length must be a whole number from 1 to {MOST_TOKENS}, not {text!r}"
        )
    return int(text)


def _log_sd(text: str) -> float:
    log_sd = finite(text)
    if log_sd is None or not 0 <= log_sd <= MAX_LOG_SD:
        raise WorkloadError(
            f"the spread of log-normal lengths must lie between 0 and {MAX_LOG_SD:g}, not {text!r}"
        )
    return log_sd
