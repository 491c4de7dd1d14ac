"""One frame of `top`: the node, how the targets are met, instances, and who takes longest."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.text import Text

from daemon.admin_commands import Command, GetRequests, GetSlo, GetStatus
from daemon.admin_protocol import Answer
from daemon.console_views import tables

SHOWN_REQUESTS = 10


def frame(ask: Callable[[Command], Answer]) -> Sequence[RenderableType]:
    """As the daemon is now. Raises what `ask` does."""
    return [
        *tables("status", ask(GetStatus())),
        Text(""),
        *tables("slo", ask(GetSlo())),
        Text(""),
        *tables("requests list", ask(GetRequests(slowest=SHOWN_REQUESTS))),
    ]
