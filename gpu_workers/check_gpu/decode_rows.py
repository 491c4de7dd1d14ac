"""A batch of decode rows of one context, in scattered blocks, for kernels to be timed with."""

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpu_workers.batch import Batch, build_batch
from gpu_workers.check_gpu.tiny_models import write_config
from gpu_workers.models.config import ModelConfig, read_config
from gpu_workers.sequence_table import SequenceTable
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, StepPlan
from ipc.kv_layout import blocks_for
from ipc.vocabulary import SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def decode_rows(num_rows: int, context: int, num_blocks: int) -> Batch:
    """Each of them attends to `context` tokens, the new one included.

    Args:
        num_blocks: of the pool, as many as may be used.
    """
    need = blocks_for(context, BLOCK_SIZE)
    blocks = random.Random(0).sample(range(num_blocks), num_rows * need)
    table = SequenceTable(block_size=BLOCK_SIZE, max_tokens=context)
    ids = range(num_rows)
    tokens = (0,) * context
    table.apply(
        StepPlan(
            step_id=0,
            added=tuple(NewSequence(i, (0,), tokens, (), context - 1, GREEDY) for i in ids),
            blocks=tuple(NewBlocks(i, tuple(blocks[i * need : (i + 1) * need])) for i in ids),
        )
    )
    return build_batch(table, [Row(i, 1, True) for i in ids])


def config_of(shape: Mapping[str, Any]) -> ModelConfig:
    """Of a model of that shape whose heads are not rotated: it is not what is timed."""
    with tempfile.TemporaryDirectory() as directory:
        config = read_config(str(write_config(Path(directory), dict(shape))))
    return msgspec.structs.replace(config, rope=None)
