"""One shape of attention, appended to and read from a pool step by step, and what must come out.

Ragged lengths, with page edges and single tokens among them; prompts, chunks after a prefix,
decodes, and all of them in one batch; scattered blocks; both layers of a pool, so that a wrong
stride reads the other layer's. What was appended must be in the pool bit for bit, and nothing else.
"""

import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from gpu_workers.batch import BatchRow, build_batch
from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import require
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
GROWTH = 40  # tokens that each sequence gets at most after its prompt


class Case:
    """Kernels on a pool, and what every sequence's keys and values are.

    Args:
        head_dim: the model's; in the pool heads may be wider, with zeros beyond it.
    """

    def __init__(
        self, backend: Backend, dtype: DType, head_dim: int, num_heads: int, kv_heads: int
    ) -> None:
        self._backend, self._head_dim = backend, head_dim
        self._num_heads, self._kv_heads = num_heads, kv_heads
        self._width = backend.stored_head_dim(head_dim)
        self._random = torch.Generator().manual_seed(head_dim + num_heads)
        self._dtype = TORCH_DTYPES[dtype]
        num_blocks = sum(blocks_for(n + GROWTH, BLOCK_SIZE) for n in LENGTHS)
        shape = (num_blocks + 2, kv_heads, NUM_LAYERS, 2, BLOCK_SIZE, self._width)
        self._pool = backend.place(torch.zeros(shape, dtype=self._dtype))
        self._kernels = self._make_kernels()
        self._table = SequenceTable(block_size=BLOCK_SIZE, max_tokens=MAX_TOKENS)
        self._enter(num_blocks + 1)
        nothing = torch.empty(0, 2, kv_heads, self._width)
        everybody = itertools.product(range(len(LENGTHS)), range(NUM_LAYERS))
        self._past = dict.fromkeys(everybody, nothing)  # keys and values (S, 2, K, D), fp32

    def steps(self) -> dict[str, list[Row]]:
        """What to run, in this order."""
        everybody = range(len(LENGTHS))
        return {
            "prompts": [Row(i, LENGTHS[i], False) for i in everybody],
            "decodes": [Row(i, 1, False) for i in everybody],
            "chunks": [Row(i, 1 if i % 2 else 20, False) for i in everybody],
            "more decodes": [Row(i, 1, False) for i in everybody],
        }

    def step(self, rows: Sequence[Row]) -> float:
        """Append and attend in each layer; the largest error, of 1 or of a value that is larger:
        rounding goes with it."""
        batch = build_batch(self._table, rows)
        self._kernels.prepare(batch)
        worst = 0.0
        for layer in range(NUM_LAYERS):
            qkv = self._draw(batch.num_tokens)
            given = self._backend.place(qkv.flatten(1))
            self._kernels.append(layer, given)
            attended = self._kernels.attention(layer, given).float().cpu()
            attended = attended.view(batch.num_tokens, self._num_heads, self._width)
            for row in batch.rows:
                tokens = slice(row.start, row.start + row.num_new)
                expected = self._expected(row, layer, qkv[tokens].float())
                off = (attended[tokens] - expected).abs() / expected.abs().clamp(min=1.0)
                worst = max(worst, float(off.max()))
        for row in batch.rows:
            row.sequence.computed = row.total
        return worst

    def check_pool(self) -> None:
        """Every key and value lies where it belongs, exactly, and nothing anywhere else."""
        expected = torch.zeros(self._pool.shape)
        for (sequence, layer), past in self._past.items():  # (S, 2, K, D)
            line = self._table.block_table[self._table[sequence].line]
            positions = torch.arange(len(past))
            blocks = torch.from_numpy(line)[positions // BLOCK_SIZE]
            expected[blocks, :, layer, :, positions % BLOCK_SIZE] = past.transpose(1, 2)
        spare = self._backend.num_spare_blocks
        whole = self._pool.float().cpu()[: len(expected) - spare]
        wrong = int((whole != expected[: len(whole)]).sum())
        require(wrong == 0, f"{wrong} elements of the pool are not what was appended there")

    def _make_kernels(self) -> Kernels:
        """Without rotation, which is not what is looked at."""
        shape = TINY | {
            "num_hidden_layers": NUM_LAYERS,
            "hidden_size": self._num_heads * self._head_dim,
            "num_attention_heads": self._num_heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
        }
        with tempfile.TemporaryDirectory() as directory:
            config = read_config(str(write_config(Path(directory), shape)))
        config = msgspec.structs.replace(config, rope=None)
        return self._backend.kernels(config, self._pool, MAX_TOKENS)

    def _enter(self, num_blocks: int) -> None:
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        scattered = random.Random(0).sample(range(num_blocks), num_blocks)
        needs = [blocks_for(length + GROWTH, BLOCK_SIZE) for length in LENGTHS]
        starts = list(itertools.accumulate(needs, initial=0))
        self._table.apply(
            StepPlan(
                step_id=0,
                added=tuple(
                    NewSequence(i, (0,), (0,) * (length + GROWTH), (), 0, sampling)
                    for i, length in enumerate(LENGTHS)
                ),
                blocks=tuple(
                    NewBlocks(i, tuple(scattered[start : start + need]))
                    for i, (start, need) in enumerate(zip(starts, needs, strict=False))
                ),
            )
        )

    def _draw(self, num_tokens: int) -> torch.Tensor:
        """(T, heads + 2 kv_heads, D) of normal numbers, zeros in the padding of heads."""
        heads = self._num_heads + 2 * self._kv_heads
        qkv = torch.zeros(num_tokens, heads, self._width, dtype=self._dtype)
        qkv[..., : self._head_dim] = torch.randn(
            num_tokens, heads, self._head_dim, generator=self._random
        )
        return qkv

    def _expected(self, row: BatchRow, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """(N, H, D) of a row's own tokens, given (N, H + 2 K, D), after what came before."""
        q, pairs = qkv[:, : self._num_heads], qkv[:, self._num_heads :]
        key = (row.sequence.start.sequence, layer)
        new = pairs.view(len(qkv), 2, self._kv_heads, self._width)
        self._past[key] = past = torch.cat((self._past[key], new))
        group = self._num_heads // self._kv_heads
        keys, values = past.repeat_interleave(group, 2).unbind(1)  # (S, H, D) each
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._head_dim**-0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(len(past) - len(qkv) + 1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
