"""What workers are told at their start, by role."""

import os
from pathlib import Path

import msgspec
import pytest

from daemon.config import DaemonConfig
from daemon.meeting_points import MeetingPoints
from daemon.placement import counted_out
from daemon.worker_configs import WorkerConfigs
from ipc.vocabulary import PrefillPolicy, Role, WorkerName

FCFS, SKIP_JOIN = PrefillPolicy.FCFS, PrefillPolicy.SKIP_JOIN


def configs_of(config: DaemonConfig, directory: Path) -> WorkerConfigs:
    """Of the instances that it counts out."""
    return WorkerConfigs(
        config,
        counted_out(config),
        endpoint="ipc://here",
        meeting_points=MeetingPoints(directory, "127.0.0.1"),
        max_context_tokens=64,
        num_token_ids=256,
    )


@pytest.mark.parametrize(("chunk_tokens", "of_mixed"), [(None, SKIP_JOIN), (64, FCFS)])
def test_chunks_beside_decodes_are_taken_by_arrival_whatever_the_policy(
    tmp_path: Path, chunk_tokens: int | None, of_mixed: PrefillPolicy
) -> None:
    config = DaemonConfig(mixed=1, chunk_tokens=chunk_tokens, prefill_policy=SKIP_JOIN)
    configs = configs_of(config, tmp_path)
    policies = {
        spec.role: configs.of(spec, 1, WorkerName(spec.name)).prefill_policy
        for spec in configs.placement.instances
    }
    assert policies[Role.PREFILL] is SKIP_JOIN
    assert policies[Role.MIXED] is of_mixed


@pytest.mark.parametrize("threads", [None, 3])
def test_a_worker_has_the_cores_of_its_device_and_a_thread_for_each(
    tmp_path: Path, threads: int | None
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    words = tuple(str(core) for core in reversed(cores))
    config = DaemonConfig(mixed=len(cores), prefill=0, decode=0, devices=words)
    config = msgspec.structs.replace(config, threads_per_worker=threads)
    configs = configs_of(config, tmp_path)
    made = [configs.of(spec, 1, WorkerName(spec.name)) for spec in configs.placement.instances]
    assert [each.cpu_cores for each in made] == [(core,) for core in reversed(cores)]
    assert [each.num_threads for each in made] == [threads or 1] * len(cores)


def test_all_workers_keep_the_model_that_the_daemon_started_with(tmp_path: Path) -> None:
    """Keys and values of another version would be decoded with this one's weights."""
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "v1")
    config = DaemonConfig(mixed=1, prefill=0, decode=0, model=current)
    configs = configs_of(config, tmp_path)
    current.unlink()
    current.symlink_to(tmp_path / "v2")
    (spec,) = configs.placement.instances
    later = configs.of(spec, 2, WorkerName(spec.name))
    assert later.model_dir == configs.settled(later).model_dir == str(tmp_path / "v1")
