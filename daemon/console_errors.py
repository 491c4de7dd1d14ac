"""How a console command ends when it does not end well: one sentence, and one exit code.

The codes, documented once: 0 done, 1 failed, 3 no daemon, 4 not permitted, 5 too late, 6 refused by
the node's state, 64 usage, 78 keys that cannot be used, 130 interrupted.
"""

from daemon.admin_protocol import FailureCode
from daemon.errors import ExitError, Unreachable

INTERRUPTED = 130
USAGE = 64
_EXIT_CODES = {
    FailureCode.BAD_REQUEST: 1,
    FailureCode.INTERNAL: 1,
    FailureCode.NOT_PERMITTED: 4,
    FailureCode.TIMEOUT: 5,
    FailureCode.REFUSED: 6,
}


class CommandFailed(ExitError):
    """The daemon did not do what it was asked; the code says why."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = _EXIT_CODES[code]


class UsageError(ExitError):
    """The command line says nothing that can be done."""

    exit_code = USAGE


class NotDone(ExitError):
    """It was looked at and found wrong, or the operator said no."""

    exit_code = 1


def code_of(error: ExitError) -> str:
    """The word for scripts."""
    match error:
        case CommandFailed():
            return error.code.value
        case Unreachable():
            return "unreachable"
        case UsageError():
            return "usage"
        case _:
            return "failed"
