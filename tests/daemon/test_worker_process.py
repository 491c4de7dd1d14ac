"""What a worker's process is started with."""

import logging

import psutil
import pytest

from daemon.worker_process import WorkerProcess
from ipc import journal
from ipc.vocabulary import WorkerName
from tests.daemon.stage import MakeStage


@pytest.mark.parametrize("level", ["DEBUG", "WARNING"])
async def test_a_worker_logs_what_the_daemon_logs_when_it_is_started(
    make_stage: MakeStage, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    """Also after the level was changed under way."""
    stage = await make_stage()
    config = stage.configs.of(stage.ward.spec, 1, WorkerName("mixed-0"))
    with caplog.at_level(logging.getLevelNamesMapping()[level]):
        process = await WorkerProcess.start(config)
    try:
        environment = psutil.Process(process.pid).environ()
        assert environment[journal.LOG_LEVEL] == level
    finally:
        process.kill()
        await process.ended()
        process.close()
