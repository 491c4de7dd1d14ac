"""Take over the listening socket that the service manager opened for us, where it did.

systemd passes descriptors from 3 on and says how many, and for which process, in the environment.
What is passed is looked at before it is used: any other program may have set the same variables.
"""

import os
import socket
from collections.abc import MutableMapping

from daemon.errors import ConfigError

FIRST = 3
NAME = "http"
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited(environment: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The HTTP listener among what was passed to this process; None where nothing was.

    The variables are taken out of the environment, and the descriptors kept from children.

    Raises:
        ConfigError: what was passed is not one listening TCP socket.
    """
    pid, count, names = (environment.pop(variable, "") for variable in _VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) == 0:
        return None
    descriptors = range(FIRST, FIRST + int(count))
    for descriptor in descriptors:
        _keep_from_children(descriptor)
    found = dict(zip(names.split(":"), descriptors, strict=False))
    if len(descriptors) > 1 and NAME not in found:
        raise ConfigError(
            f"{len(descriptors)} sockets were passed and none is named {NAME}: "
            f"set FileDescriptorName={NAME} in the socket unit"
        )
    return _adopt(found.get(NAME, FIRST))


def _keep_from_children(descriptor: int) -> None:
    try:
        os.set_inheritable(descriptor, False)
    except OSError as error:
        raise ConfigError(f"descriptor {descriptor} was passed, but is not open") from error


def _adopt(descriptor: int) -> socket.socket:
    """The descriptor as a socket of whatever family it is."""
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"descriptor {descriptor} was passed, but is no socket") from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
    is_tcp = is_tcp and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ConfigError(
            f"descriptor {descriptor} was passed, but is not a listening TCP socket: "
            "use ListenStream= with an address and a port, and Accept=no"
        )
    return listener
