"""What workers are told at their start, by role."""

from pathlib import Path

import pytest

from daemon.config import DaemonConfig
from daemon.meeting_points import MeetingPoints
from daemon.placement import counted_out
from daemon.worker_configs import WorkerConfigs
from ipc.vocabulary import PrefillPolicy, Role, WorkerName

FCFS, SKIP_JOIN = PrefillPolicy.FCFS, PrefillPolicy.SKIP_JOIN


@pytest.mark.parametrize(("chunk_tokens", "of_mixed"), [(None, SKIP_JOIN), (64, FCFS)])
def test_chunks_beside_decodes_are_taken_by_arrival_whatever_the_policy(
    tmp_path: Path, chunk_tokens: int | None, of_mixed: PrefillPolicy
) -> None:
    config = DaemonConfig(mixed=1, chunk_tokens=chunk_tokens, prefill_policy=SKIP_JOIN)
    placement = counted_out(config)
    configs = WorkerConfigs(
        config,
        placement,
        endpoint="ipc://here",
        meeting_points=MeetingPoints(tmp_path, "127.0.0.1"),
        max_context_tokens=64,
        num_token_ids=256,
    )
    policies = {
        spec.role: configs.of(spec, 1, WorkerName(spec.name)).prefill_policy
        for spec in placement.instances
    }
    assert policies[Role.PREFILL] is SKIP_JOIN
    assert policies[Role.MIXED] is of_mixed
