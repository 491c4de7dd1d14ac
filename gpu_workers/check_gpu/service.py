"""Stages: the whole daemon over HTTP, its answers compared with those of one engine here.

Both workers share a device, so times say nothing about what disaggregation gains; they say that
nothing stands in the way. Answers that differ must be near-ties, see `scoring`.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpu_workers.check_gpu import daemon_process
from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.daemon_process import Answer, DaemonProcess
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import Note, require
from gpu_workers.check_gpu.scoring import require_likely
from gpu_workers.check_gpu.tiny_models import (
    NUM_TOKEN_IDS,
    TINY,
    prompts,
    write_config,
    write_tokenizer,
)

NUM_REQUESTS, NUM_TOKENS = 16, 24
MAX_CONTEXT, KV_BYTES = 1024, 64 << 20


class Expected:
    """What one engine in this process answers, and what it thinks of other answers."""

    def __init__(self, backend: Backend, model: Path, asked: Sequence[list[int]]) -> None:
        spec = msgspec.structs.replace(
            spec_of(str(model), backend.dtype, max_context=MAX_CONTEXT, is_dummy=True),
            num_token_ids=NUM_TOKEN_IDS,  # as the service has it, which never draws others
        )
        executor = backend.executor(spec, KV_BYTES, max_batch=NUM_REQUESTS)
        self._asked = asked
        self._judge = Driver(backend.eager(executor))
        self._answers = Driver(executor).greedy(asked, NUM_TOKENS)

    def require(self, answers: Sequence[Answer], who: str) -> int:
        """All whole, and as likely as ours; how many are the same."""
        short = [i for i, answer in enumerate(answers) if len(answer.tokens) != NUM_TOKENS]
        require(not short, f"{who}: requests {short} got too few tokens")
        drawn = [answer.tokens for answer in answers]
        return require_likely(self._judge, self._asked, drawn, self._answers, who)


def check_service(backend: Backend, note: Note) -> str:
    """Requests streamed; one that is left early; the same while the prefill worker is killed."""
    asked = prompts(NUM_REQUESTS, 100)
    with _model() as model:
        expected = Expected(backend, model, asked)
        with daemon_process.running(backend, model, NUM_TOKENS) as service:
            same = _first_answers(service, expected, asked, note)
            service.leave_early(asked[-1])
            after = service.complete(asked, kill="prefill-0")
            again = expected.require(after, "after a worker was killed")
            note("same_after_kill", again)
            left = service.blocks_left()
            note("blocks_left", left)
            require(left == 0, f"{left:.0f} KV blocks are not free though nobody is served")
    return f"{same} of {NUM_REQUESTS} answers as of one engine, {again} after a worker was killed"


def check_parallel(backend: Backend, note: Note) -> str:
    """The same of a prefill instance of two workers that a decode worker pulls from: over NCCL
    where there are GPUs for both, else over gloo."""
    asked = prompts(NUM_REQUESTS, 100)
    with _model() as model:
        expected = Expected(backend, model, asked)
        with daemon_process.running(backend, model, NUM_TOKENS, ["--prefill-tp", "2"]) as service:
            same = _first_answers(service, expected, asked, note)
    return f"{same} of {NUM_REQUESTS} answers of tp 2 as of one engine, the others near-ties"


def _first_answers(
    service: DaemonProcess, expected: Expected, asked: Sequence[list[int]], note: Note
) -> int:
    answers = service.complete(asked)
    same = expected.require(answers, "at first")
    note("same_as_engine", same)
    note("requests", len(asked))
    alone = service.complete(asked[-1:])
    note("ttft_ms", {"p50": _ms([a.ttft_s for a in answers]), "alone": _ms([alone[0].ttft_s])})
    note("tpot_ms", {"p50": _ms([a.tpot_s for a in answers]), "alone": _ms([alone[0].tpot_s])})
    return same


@contextmanager
def _model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory) / "tiny", TINY)
        write_tokenizer(path)
        yield path


def _ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)
