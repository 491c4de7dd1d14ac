"""Stage: attention over paged keys and values, against plain attention in fp32.

Ragged lengths, with page edges and single tokens among them; prompts, chunks after a prefix,
decodes, and all of them in one batch; scattered blocks; both layers of a pool, so that a wrong
stride reads the other layer's.
"""

import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from gpu_workers.batch import build_batch
from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import Found, require
from gpu_workers.check_gpu.tiny_models import TINY, write_config
from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.kernels import Kernels
from gpu_workers.models.config import read_config
from gpu_workers.sequence_table import SequenceTable
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, StepPlan
from ipc.kv_layout import blocks_for
from ipc.vocabulary import DType, SamplingParams

BLOCK_SIZE, NUM_LAYERS, MAX_TOKENS = 16, 2, 256
LENGTHS = (1, 15, 16, 17, 63, 130)
HEADS = ((64, 8, 8), (64, 6, 2), (128, 8, 2), (128, 7, 1))
"""(head_dim, heads, kv_heads): groups of 1, 3, 4 and 7."""
TOLERANCE = {DType.BF16: 2e-2, DType.FP16: 3e-3, DType.FP32: 1e-4}


def check_attention(backend: Backend, heads: Sequence[tuple[int, int, int]] = HEADS) -> Found:
    """Every shape (head_dim, heads, kv_heads); the largest error of each."""
    errors = {f"{d}x{h}/{k}": _largest_error(backend, d, h, k) for d, h, k in heads}
    worst = max(errors.values())
    return Found(f"largest error {worst:.1e} over {len(errors)} shapes", {"errors": errors})


class _Case:
    """One shape: kernels on a pool, and what every sequence's keys and values are."""

    def __init__(self, backend: Backend, head_dim: int, num_heads: int, kv_heads: int) -> None:
        self.backend = backend
        self.widths = (num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.head_dim, self.num_heads, self.kv_heads = head_dim, num_heads, kv_heads
        self.random = torch.Generator().manual_seed(head_dim + num_heads)
        self.dtype = TORCH_DTYPES[backend.dtype]
        num_blocks = 2 + sum(blocks_for(length + 40, BLOCK_SIZE) for length in LENGTHS)
        shape = (num_blocks, kv_heads, NUM_LAYERS, 2, BLOCK_SIZE, head_dim)
        self.kernels = self._kernels(backend.place(torch.zeros(shape, dtype=self.dtype)))
        self.table = SequenceTable(block_size=BLOCK_SIZE, max_tokens=MAX_TOKENS)
        self._enter(num_blocks - 1)
        self.past = {
            (sequence, layer): torch.empty(0, 2, kv_heads, head_dim)
            for sequence, layer in itertools.product(range(len(LENGTHS)), range(NUM_LAYERS))
        }

    def step(self, rows: Sequence[Row]) -> float:
        """Append and attend in each layer; the largest error."""
        batch = build_batch(self.table, rows)
        self.kernels.prepare(batch)
        worst = 0.0
        for layer in range(NUM_LAYERS):
            qkv = torch.randn(batch.num_tokens, sum(self.widths), generator=self.random)
            qkv = qkv.to(self.dtype)
            given = self.backend.place(qkv)
            self.kernels.append(layer, given)
            attended = self.kernels.attention(layer, given).float().cpu()
            for row in batch.rows:
                tokens = slice(row.start, row.start + row.num_new)
                sequence = row.sequence.start.sequence
                expected = self._expected(sequence, layer, qkv[tokens].float())
                worst = max(worst, float((attended[tokens] - expected).abs().max()))
        for row in batch.rows:
            row.sequence.computed = row.total
        return worst

    def _kernels(self, pool: torch.Tensor) -> Kernels:
        """Without rotation, which is not what is looked at."""
        shape = TINY | {
            "num_hidden_layers": NUM_LAYERS,
            "hidden_size": self.num_heads * self.head_dim,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        with tempfile.TemporaryDirectory() as directory:
            config = read_config(str(write_config(Path(directory), shape)))
        return self.backend.kernels(msgspec.structs.replace(config, rope=None), pool, MAX_TOKENS)

    def _enter(self, num_blocks: int) -> None:
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        scattered = random.Random(0).sample(range(num_blocks), num_blocks)
        needs = [blocks_for(length + 40, BLOCK_SIZE) for length in LENGTHS]
        starts = list(itertools.accumulate(needs, initial=0))
        self.table.apply(
            StepPlan(
                step_id=0,
                added=tuple(
                    NewSequence(i, (0,), (0,) * (length + 40), (), 0, sampling)
                    for i, length in enumerate(LENGTHS)
                ),
                blocks=tuple(
                    NewBlocks(i, tuple(scattered[start : start + need]))
                    for i, (start, need) in enumerate(zip(starts, needs, strict=False))
                ),
            )
        )

    def _expected(self, sequence: int, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """(T, heads * head_dim) of one row, and its keys and values remembered."""
        q, k, v = torch.split(qkv, list(self.widths), dim=1)
        new = torch.stack((k, v), 1).view(len(qkv), 2, self.kv_heads, self.head_dim)
        known = torch.cat((self.past[sequence, layer], new))
        self.past[sequence, layer] = known
        keys, values = known.repeat_interleave(self.num_heads // self.kv_heads, dim=2).unbind(1)
        queries = q.view(len(q), self.num_heads, self.head_dim)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.head_dim**-0.5
        ahead = torch.ones(len(q), len(known)).triu(len(known) - len(q) + 1).bool()
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(len(q), -1)


def _largest_error(backend: Backend, head_dim: int, num_heads: int, kv_heads: int) -> float:
    case = _Case(backend, head_dim, num_heads, kv_heads)
    everybody = range(len(LENGTHS))
    steps = (
        [Row(i, LENGTHS[i], False) for i in everybody],  # prompts
        [Row(i, 1, False) for i in everybody],  # decodes
        [Row(i, 1 if i % 2 else 20, False) for i in everybody],  # chunks beside decodes
        [Row(i, 1, False) for i in everybody],
    )
    with torch.inference_mode():
        errors = [case.step(rows) for rows in steps]
    limit = TOLERANCE[backend.dtype]
    for kind, error in zip(("prompts", "decodes", "chunks", "more decodes"), errors, strict=True):
        require(
            error < limit,
            f"{kind} with {num_heads} heads of {head_dim} on {kv_heads} KV heads are off by "
            f"{error:.3g}, at most {limit} was expected",
        )
    return max(errors)
