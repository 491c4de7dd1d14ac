"""Read the configuration again while the daemon runs, and apply what can be applied.

Some keys only matter at the next use and can change under way; all others name what was built at
the start, and are refused by name until the next start. A file that cannot be used changes
nothing.
"""

import logging
from collections.abc import Callable

import msgspec

from daemon.config import RELOADABLE, DaemonConfig
from daemon.errors import ConfigError

logger = logging.getLogger(__name__)

Hook = Callable[[DaemonConfig], None]


class Reloader:
    """Holds the configuration as it was read last, and who wants to know of a new one.

    Hooks are called with every reload, changed or not: files that the configuration names (keys,
    for example) may have changed though it has not. One may raise ConfigError and keep what it has.
    """

    def __init__(self, config: DaemonConfig, read: Callable[[], DaemonConfig]) -> None:
        self.config = config
        self._read = read
        self.on_reload: list[Hook] = [_set_log_level]

    def reload(self) -> None:
        try:
            wanted = self._read()
        except ConfigError as error:
            logger.error("not reloaded, the old configuration stays: %s", error)
            return
        before, self.config = self.config, adopted(self.config, wanted)
        applied = differences(before, self.config)
        refused = differences(self.config, wanted)
        for hook in self.on_reload:
            try:
                hook(self.config)
            except ConfigError as error:
                logger.error("not reloaded: %s", error)
        logger.info("configuration read again; changed: %s", ", ".join(applied) or "nothing")
        if refused:
            logger.warning("only a restart changes: %s", ", ".join(refused))


def adopted(running: DaemonConfig, wanted: DaemonConfig) -> DaemonConfig:
    """The running configuration with what may change under way as wanted."""
    changes = {key: getattr(wanted, key) for key in RELOADABLE}
    return msgspec.structs.replace(running, **changes)


def differences(one: DaemonConfig, other: DaemonConfig) -> list[str]:
    """The keys whose values differ, in the order of the configuration."""
    keys = DaemonConfig.__struct_fields__
    return [key for key in keys if getattr(one, key) != getattr(other, key)]


def _set_log_level(config: DaemonConfig) -> None:
    logging.getLogger().setLevel(config.log_level.upper())
