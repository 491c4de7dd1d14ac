"""Steps of every kind keep apart what is the host's and what is the device's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.cuda_attention import stored_head_dim
from gpu_workers.cuda_engine import Gpu
from gpu_workers.cuda_memory import StepLimits
from gpu_workers.cuda_switches import SWITCHES
from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.models.config import read_config
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import CHECKPOINTS, NUM_TOKEN_IDS
from tests.gpu_workers.cuda.meta_device import META, MetaDevice, MetaFlashInfer, OneSide
from tests.gpu_workers.cuda.rig import MAX_BATCH, MAX_CONTEXT, CudaDriver
from tests.gpu_workers.driving import greedy
from tests.gpu_workers.rig import BLOCK_SIZE

PROMPT = list(b"Come away, come away, death")
KINDS = (
    greedy(),
    greedy(logprobs=0),
    greedy(temperature=0.8, top_p=0.9, top_k=7, min_p=0.05, logprobs=2),
    greedy(temperature=1.1, top_k=4),
    greedy(
        repetition_penalty=1.2,
        presence_penalty=0.3,
        logit_bias=((3, 1.0),),
        end_token_ids=(257,),
        min_tokens=5,
    ),
)


class MetaDriver(CudaDriver):
    """An engine on a device without numbers: steps are launched and never collected."""

    def __init__(self, model_dir: Path) -> None:
        config = read_config(model_dir)
        head_dim = stored_head_dim(config.head_dim)
        self.layout = pool_layout(
            config, dtype=DType.BF16, block_size=BLOCK_SIZE, kv_bytes=1 << 22, head_dim=head_dim
        )
        spec = EngineSpec(
            model_dir=str(model_dir),
            dtype=DType.BF16,
            max_context_tokens=MAX_CONTEXT,
            num_token_ids=NUM_TOKEN_IDS,
        )
        gpu = Gpu(MetaDevice(), MetaFlashInfer(), StepLimits(MAX_CONTEXT, MAX_BATCH))
        pool = PrivatePool(self.layout, META)
        self.executor = build_executor(config, spec, pool, gpu=gpu)
        self._start(BLOCK_SIZE, self.layout.num_blocks - 1)


@pytest.mark.parametrize("fused", ["", "rope,append,silu,norm"])
@pytest.mark.parametrize("model", CHECKPOINTS)
def test_no_tensor_of_the_host_meets_one_of_the_device_but_in_a_copy(
    model: str, fused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCHES, fused)
    model_dir = CHECKPOINTS[model](tmp_path)
    with OneSide():
        driver = MetaDriver(model_dir)
        sequences = [
            driver.add(PROMPT, kind, prompt_logprobs=n % 3) for n, kind in enumerate(KINDS)
        ]
        driver.launch(*((s, 7, False) for s in sequences))
        driver.launch(*((s, len(PROMPT) - 7, True) for s in sequences))
        driver.launch(*((s, 1, True) for s in sequences[:4]))  # as a graph, on tokens under way
        several = driver.add(PROMPT, KINDS[2], choices=(0, 1, 2))
        driver.launch((several, len(PROMPT), True), (sequences[0], 1, True))


def test_a_meeting_of_both_sides_is_seen() -> None:
    here, there = torch.zeros(3), torch.zeros(3, device=META)
    meetings: list[Any] = [
        lambda: there.index_select(0, here.long()),
        lambda: there.masked_fill_(here > 0, 0.0),
        lambda: torch.nn.functional.linear(there, torch.zeros(2, 3)),
    ]
    for meet in meetings:
        with OneSide(), pytest.raises(AssertionError, match="over tensors of"):
            meet()
    with OneSide():
        there.copy_(here)
