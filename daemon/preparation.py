"""What a daemon has before it can be put together, and how its end is read.

The model's text side, a run directory of its own, and of everything that its tasks ended with the
one error that was meant.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.chat_template import ChatTemplate
from daemon.config import DaemonConfig, model_context
from daemon.errors import AlreadyRunning, ConfigError, ExitError
from daemon.frontend.served_model import ServedModel
from daemon.text import Tokenizer
from ipc.run_dir import RunDir, RunDirBusy, RunDirUnusable, default_run_dir, owned


def load_model(config: DaemonConfig) -> ServedModel:
    """The model's text side. Raises ConfigError."""
    max_context = model_context(config)
    return ServedModel(
        id=config.model_id,
        tokenizer=Tokenizer.from_directory(config.model_dir),
        chat_template=ChatTemplate.from_directory(config.model_dir),
        max_context=max_context,
        created=int(time.time()),
    )


@contextmanager
def own_run_dir(config: DaemonConfig) -> Iterator[RunDir]:
    """Ours for as long as it is held. Raises AlreadyRunning, or ConfigError."""
    path = Path(config.run_dir) if config.run_dir else default_run_dir()
    try:
        with owned(path) as run_dir:
            yield run_dir
    except RunDirBusy as error:
        raise AlreadyRunning(str(error)) from error
    except RunDirUnusable as error:
        raise ConfigError(str(error)) from error


def first_exit_error(group: BaseExceptionGroup) -> BaseException:
    """What a part of the daemon ended it with, if it was on purpose; else the whole group."""
    found: BaseException = group.subgroup(ExitError) or group
    while isinstance(found, BaseExceptionGroup) and found is not group:
        found = found.exceptions[0]
    return found
