"""The link of one incarnation without sockets: numbered frames both ways, checked at each end.

The sending and reading ends do what `ipc.sockets` does; between them lie two queues of frames, into
which a test may reach.
"""

from collections import deque

from ipc import codec
from ipc.codec import Kind, Numbering
from ipc.messages import Command, Event, Tokens

Frames = list[bytes]
Mailbox = deque[Frames]


class Wire:
    """`down` holds commands on their way to the leader, `up` its events on theirs."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.down: Mailbox = deque()
        self.up: Mailbox = deque()
        self._commands_sent, self._commands_received = Numbering(), Numbering()
        self._events_sent, self._events_received = Numbering(), Numbering()

    def post(self, command: Command) -> None:
        """As the daemon sends."""
        number = self._commands_sent.take()
        self.down.append(codec.encode(command, Kind.COMMAND, self.epoch, number))

    def take_commands(self) -> list[Command]:
        """As a worker receives. Raises WireError."""
        commands: list[Command] = []
        while self.down:
            frames = self.down.popleft()
            header = codec.read_header(frames)
            self._commands_received.check(header.number)
            if header.epoch == self.epoch:
                commands.append(codec.read_command(frames[1]))
        return commands

    def tell(self, event: Event | Tokens) -> None:
        """As a worker sends."""
        kind = Kind.TOKENS if isinstance(event, Tokens) else Kind.EVENT
        self.up.append(codec.encode(event, kind, self.epoch, self._events_sent.take()))

    def take_event(self) -> Event | Tokens:
        """As the daemon receives. Raises WireError."""
        frames = self.up.popleft()
        header = codec.read_header(frames)
        self._events_received.check(header.number)
        return codec.read_event(header.kind, frames[1])
