"""Step plans from a leader to its followers, in order, and what followers report back.

One ROUTER at the leader, a DEALER per follower, on an address that is fresh with every life of
the instance; between nodes, with CURVE keys. A message is `[kind, JSON]`, written and read by
msgspec itself, since it is on the path of every step; plans are numbered without gaps, so a lost
one is seen. Either side sees at once when the other's process ends (between nodes, a follower
does). What has come is kept until it is asked for.
"""

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import msgspec
import zmq

from gpu_workers.step_plan import PullResult, StepPlan, StepResult
from ipc.curve import CurveKeys, call_with, listen_with, new_keys
from ipc.vocabulary import WorkerName

RECONNECT_MS = 10
FAREWELL_MS = 500  # how long a closing leader's last words may take to leave
# Between nodes, the loss of a peer may come without a word: it is asked for signs of life.
HEARTBEAT_MS, SILENCE_MS = 1000, 5000
UNENCRYPTED = "plans cross nodes encrypted or not at all"

_encode = msgspec.json.Encoder().encode
_decode_plan = msgspec.json.Decoder(StepPlan).decode
_decode_result = msgspec.json.Decoder(StepResult).decode
_decode_pull = msgspec.json.Decoder(PullResult).decode


class GroupBroken(Exception):
    """Ranks of an instance have lost each other: all of them are to end."""


class Kind(bytes, Enum):
    """What a message is."""

    PLAN = b"P"
    DISMISSAL = b"D"
    JOINED = b"J"
    STEP = b"S"
    PULL = b"U"


class Waiting:
    """Waits for any of several sockets to become readable."""

    def __init__(self, waitables: Iterable[zmq.Socket[bytes] | socket.socket]) -> None:
        self._poller = zmq.Poller()
        for waitable in waitables:
            self._poller.register(waitable, zmq.POLLIN)

    def __call__(self, timeout_s: float | None) -> bool:
        """False when none was in that time (None: for ever)."""
        return bool(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))


class LeaderBus:
    """The leader's end.

    Args:
        endpoint: where to listen.
        followers: everyone who is to hear.
        keys: of a bus between nodes, which is not opened without.
    """

    def __init__(
        self, endpoint: str, followers: Iterable[WorkerName], keys: CurveKeys | None = None
    ) -> None:
        assert keys or not endpoint.startswith("tcp:"), UNENCRYPTED
        self._followers = {str(name).encode() for name in followers}
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Between nodes anybody may knock, and who is turned away looks like one who is lost: there
        # the daemons say whose process has ended.
        self._losses = [] if keys else [_watch_losses(self._socket)]
        self._waiting = Waiting(self.waitables)
        if keys:
            listen_with(self._socket, keys)
            _expect_signs_of_life(self._socket)
        self._bind(endpoint)
        self._joined: set[bytes] = set()
        self._results: dict[int, StepResult] = {}
        self._pulls: list[PullResult] = []

    @property
    def waitables(self) -> list[zmq.Socket[bytes]]:
        """To be polled: readable when `drain` has something to do."""
        return [self._socket, *self._losses]

    def gather(self, timeout_s: float) -> None:
        """Wait until every follower has joined. Raises GroupBroken when one does not."""
        deadline_s = time.monotonic() + timeout_s
        while missing := self._followers - self._joined:
            if not self._wait(deadline_s):
                names = ", ".join(sorted(name.decode() for name in missing))
                raise GroupBroken(f"{names} did not join within {timeout_s:g} s")

    def send(self, plan: StepPlan) -> None:
        """To every follower; never waits."""
        self._send(Kind.PLAN, _encode(plan))

    def dismiss(self) -> None:
        """The last message: followers end."""
        self._send(Kind.DISMISSAL, b"")

    def has_result(self, step_id: int) -> bool:
        """Whether it has come; looks only at what was drained before."""
        return step_id in self._results

    def result(self, step_id: int, timeout_s: float) -> StepResult:
        """Wait for what the drawing follower says of a step. Raises GroupBroken."""
        deadline_s = time.monotonic() + timeout_s
        while step_id not in self._results:
            if not self._wait(deadline_s):
                raise GroupBroken(f"no result of step {step_id} within {timeout_s:g} s")
        return self._results.pop(step_id)

    def take_pulls(self) -> list[PullResult]:
        """Ends of pulls on followers, of all that was drained."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def drain(self) -> None:
        """Take in all that has come. Raises GroupBroken when a follower is gone, or says what no
        follower says."""
        while self._socket.poll(0):
            sender, *frames = self._socket.recv_multipart()
            with _understanding(sender.decode(errors="replace")):
                self._take(sender, *_two(frames))
        if any(losses.poll(0) for losses in self._losses):
            raise GroupBroken("a follower has ended")

    def close(self) -> None:
        self._socket.close(FAREWELL_MS)
        for losses in self._losses:
            losses.close(0)
        self._context.term()

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise GroupBroken(f"cannot listen on {endpoint}: {error}") from error

    def _wait(self, deadline_s: float) -> bool:
        """Take in what comes; False at the deadline."""
        if not self._waiting(max(0.0, deadline_s - time.monotonic())):
            return False
        self.drain()
        return True

    def _take(self, sender: bytes, kind: bytes, payload: bytes) -> None:
        if kind == Kind.JOINED:
            self._joined.add(sender)
        elif kind == Kind.STEP:
            result = _decode_result(payload)
            self._results[result.step_id] = result
        elif kind == Kind.PULL:
            self._pulls.append(_decode_pull(payload))
        else:
            raise ValueError(f"no follower says {kind[:20]!r}")

    def _send(self, kind: Kind, payload: bytes) -> None:
        try:
            for name in self._followers:
                self._socket.send_multipart([name, kind.value, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise GroupBroken(f"{name.decode()} cannot be reached: {error}") from error


class FollowerBus:
    """A follower's end; joins at once.

    Args:
        leader_key: the public one of a bus between nodes; whoever knows it may follow.
    """

    def __init__(self, endpoint: str, name: WorkerName, leader_key: str = "") -> None:
        assert leader_key or not endpoint.startswith("tcp:"), UNENCRYPTED
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(name).encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)  # the leader may bind later
        self._losses = _watch_losses(self._socket)
        if leader_key:
            call_with(self._socket, leader_key, new_keys())
            _expect_signs_of_life(self._socket)
        self._socket.connect(endpoint)
        self._last_step_id = 0
        self.is_dismissed = False
        self._send(Kind.JOINED, b"")

    @property
    def waitables(self) -> list[zmq.Socket[bytes]]:
        """To be polled: readable when `receive` has something to give or to raise."""
        return [self._socket, self._losses]

    def receive(self) -> list[StepPlan]:
        """All plans that have come, in order; never waits.

        Raises:
            GroupBroken: a plan is missing or garbage, or the leader has ended without dismissing
                us.
        """
        is_lost = bool(self._losses.poll(0))  # looked at first: last words are read even so
        plans = []
        while self._socket.poll(0):
            with _understanding("the leader"):
                kind, payload = _two(self._socket.recv_multipart())
                if kind == Kind.DISMISSAL:
                    self.is_dismissed = True
                elif kind == Kind.PLAN:
                    plans.append(self._next(_decode_plan(payload)))
                else:
                    raise ValueError(f"no leader says {kind[:20]!r}")
        if is_lost and not self.is_dismissed:
            raise GroupBroken("the leader has ended")
        return plans

    def report(self, result: StepResult | PullResult) -> None:
        kind = Kind.STEP if isinstance(result, StepResult) else Kind.PULL
        self._send(kind, _encode(result))

    def close(self) -> None:
        self._socket.close(0)
        self._losses.close(0)
        self._context.term()

    def _next(self, plan: StepPlan) -> StepPlan:
        if plan.step_id != self._last_step_id + 1:
            raise GroupBroken(f"step {plan.step_id} came where {self._last_step_id + 1} was due")
        self._last_step_id = plan.step_id
        return plan

    def _send(self, kind: Kind, payload: bytes) -> None:
        self._socket.send_multipart([kind.value, payload])


@contextmanager
def _understanding(whom: str) -> Iterator[None]:
    """Raises GroupBroken when what comes from there is not of this protocol."""
    try:
        yield
    except (ValueError, msgspec.DecodeError) as error:
        raise GroupBroken(f"what came from {whom} cannot be understood: {error}") from error


def _two(frames: Sequence[bytes]) -> Sequence[bytes]:
    if len(frames) != 2:
        raise ValueError(f"{len(frames)} frames where [kind, JSON] was due")
    return frames


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # What is under way is bounded by the steps in flight; a plan must never be dropped.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _expect_signs_of_life(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def _watch_losses(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that is readable once a connection of the given one has ended."""
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
