"""uvicorn's HTTP protocol with bounds: on a head's size and time, and on what is sent ahead.

What is not HTTP as it should be is answered by an error in the API's shape where an answer can
still be written, and the connection ends after the answers that are due. A timer per connection
runs only while a head is on its way. Bodies are the application's: it reads them as it has room
for them, by its own deadline. A client that ends its side of a connection has left: a farewell
and a half-closed connection look the same, and nobody should compute for the former.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from daemon.connection_book import ConnectionBook
from daemon.errors import (
    HeadTooLarge,
    MalformedHttp,
    RequestTooSlow,
    ServeError,
    TooManyConnections,
    UrlTooLong,
)
from daemon.frontend.json_response import error_response

MAX_HEAD_BYTES = 64 * 1024  # browsers' and proxies' cookies and tokens fit many times over
MAX_HEADERS = 128
MAX_URL_BYTES = 8 * 1024
MAX_AHEAD = 8  # requests sent before earlier ones are answered
MAX_AHEAD_BODY_BYTES = 64 * 1024
FRAMING_PER_BODY_BYTE = 8  # chunks of one byte need 5


class Guards(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client may take, in seconds, and who is told of refusals.

    `flush_s` is for reading what was sent before the connection was closed, `unread_s` for reading
    so much of it before that more can be sent.
    """

    head_s: float = 10.0
    linger_s: float = 2.0
    flush_s: float = 60.0
    unread_s: float = 120.0
    on_refused: Callable[[ServeError], None] = lambda _: None


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, guards: Guards, book: ConnectionBook, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.access_log = False  # it would tell paths and queries; the application logs requests
        self._guards = guards
        self._book = book
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_deaf = False  # nothing that still comes is read
        self._unsaid: ServeError | None = None  # why, to be said after the answers that are due
        self._running: RequestResponseCycle | None = None  # is being answered
        self._arriving: RequestResponseCycle | None = None  # its body is on its way
        self._num_fed = 0  # bytes of the message on its way ...
        self._num_body = 0  # ... and how many of them were its body
        self._has_begun = False  # a head is on its way
        self._plain_head: bytes | None = None  # to read again, without its wish to upgrade

    # ---- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._book.admit(self, self.client[0] if self.client else ""):
            self._arm()
        elif self._book.turn_away(self):
            self._refuse(TooManyConnections("Too many connections are open."))
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._book.release(self)
        self._disarm()
        self._disarm_unread()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        for cycle in (self._running, *(queued for queued, _ in self.pipeline)):
            _tell_it_has_left(cycle)  # uvicorn tells the latest only
        self.pipeline.clear()

    def leave(self) -> None:
        """The book gives this place to somebody else."""
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        """Whoever wants to send more has to wait, and not all who do have a bound of their own."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._guards.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_unread()

    def _disarm_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # ---- what arrives -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._book.wake(self)
        self._unset_keepalive_if_required()
        if self._arriving is None:
            self._arm()
        self._num_fed += len(data)
        try:
            self._feed(data)
            self._check_framing()
        except httptools.HttpParserError as error:
            reason = error.__context__  # what one of our callbacks raised
            self._refuse(reason if isinstance(reason, ServeError) else MalformedHttp("Bad HTTP."))
        except ServeError as error:
            self._refuse(error)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._arm()

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > MAX_URL_BYTES:
            raise UrlTooLong(f"The URL must have at most {MAX_URL_BYTES} bytes.")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving is not None:
            return  # a trailer; nobody here needs one
        if len(self.headers) >= MAX_HEADERS:
            raise HeadTooLarge(f"A request must have at most {MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        self._has_begun = False
        self._check_head()
        if self.parser.should_upgrade():
            self._plain_head = self._without_upgrade()
            return
        if len(self.pipeline) >= MAX_AHEAD:
            raise MalformedHttp("Too many requests were sent ahead.")
        super().on_headers_complete()
        self._arriving = self.cycle
        self.flow.resume_reading()  # uvicorn would not notice a client that leaves meanwhile

    def on_body(self, body: bytes) -> None:
        if self._plain_head is not None:
            return
        self._num_body += len(body)
        if self._is_ahead and len(self.cycle.body) + len(body) > MAX_AHEAD_BODY_BYTES:
            raise MalformedHttp("Too much was sent ahead.")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head is not None:
            return
        super().on_message_complete()
        self._arriving = None
        self._num_fed = self._num_body = 0

    # ---- what is answered -------------------------------------------------------------------

    def on_response_complete(self) -> None:
        answered = self._running
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
            return
        is_idle = self._running is answered
        if is_idle and self._unsaid is not None:
            self.transport.write(_rendered(self._unsaid))
        if answered is self._arriving or (is_idle and self._is_deaf):
            self._linger()
        elif is_idle:
            self._book.rest(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle

        async def to_its_end(*asgi: Any) -> None:
            await app(*asgi)
            if not (cycle.response_complete or cycle.disconnected):
                self._give_up(cycle)

        super()._start_asgi_task(cycle, to_its_end)

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """The application ends no answer to a client that does not read. uvicorn would close then,
        but wait for ever until what is on its way has been read."""
        _tell_it_has_left(cycle)
        self._close()

    # ---- refusing ---------------------------------------------------------------------------

    def _refuse(self, error: ServeError) -> None:
        """Read nothing more, say why after all that is due has been answered, and close."""
        self._is_deaf = True
        self._disarm()
        self._guards.on_refused(error)
        broken, self._arriving = self._arriving, None
        if broken is not None and broken is not self._running:
            self.pipeline.popleft()
        if self._is_answering and broken is not self._running:
            self._unsaid = error
            return
        if broken is None or not broken.response_started:
            self.transport.write(_rendered(error))
        _tell_it_has_left(broken)
        self._linger()

    def _linger(self) -> None:
        """End our side, and take in for a while what still comes.

        Closing with unread bytes would reset the connection, and the client might never see what
        was said last.
        """
        self._is_deaf = True
        self._disarm()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._timer = self.loop.call_later(self._guards.linger_s, self._close)

    def _close(self) -> None:
        """What is still to be sent is sent, but not waited for as long as the client likes."""
        self._disarm()
        self.transport.close()
        self._timer = self.loop.call_later(self._guards.flush_s, self.transport.abort)

    def _on_late_head(self) -> None:
        """Whoever has said nothing is not told anything either: it may be about to."""
        self._timer = None
        if self._has_begun or self._is_answering:
            self._refuse(RequestTooSlow("The request's head did not arrive in time."))
        else:
            self._close()

    # ---- the state of affairs ---------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _is_ahead(self) -> bool:
        """Whether the body on its way belongs to a request that waits for its turn."""
        return self._arriving is not None and self._arriving is not self._running

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._guards.head_s, self._on_late_head)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- checks -----------------------------------------------------------------------------

    def _check_head(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            raise _too_large()
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        codings = [value.strip().lower() for name, value in self.headers if name == _CODING]
        if version not in ("1.0", "1.1"):
            raise MalformedHttp("Only HTTP/1.0 and HTTP/1.1 are spoken here.")
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            raise MalformedHttp("A request needs one Host header.")
        if codings and (codings != [b"chunked"] or version == "1.0" or b"content-length" in names):
            raise MalformedHttp("The Transfer-Encoding cannot be read.")
        if self.parser.get_method() == b"CONNECT":
            raise MalformedHttp("This is no proxy.")

    def _check_framing(self) -> None:
        """All but the body itself is bounded, also what comes between its chunks and after them."""
        framing = self._num_fed - self._num_body
        if framing > MAX_HEAD_BYTES + FRAMING_PER_BODY_BYTE * self._num_body:
            raise _too_large() if self._arriving is None else MalformedHttp("Too much framing.")

    # ---- reading ----------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Nobody here speaks another protocol: a wish to upgrade to one is not heard.

        The parser takes what follows such a head for the other protocol. So the head is read
        again without the wish, and what follows is what it says.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._plain_head is None:
                raise MalformedHttp("Bad HTTP.") from upgrade
            head, self._plain_head = self._plain_head, None
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[upgrade.args[0] :])

    def _without_upgrade(self) -> bytes:
        kept = [(name, value) for name, value in self.headers if name not in _UPGRADING]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            kept.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in kept]
        head = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"%b %b HTTP/%b\r\n%b\r\n" % (*head, b"".join(lines))


_CODING = b"transfer-encoding"
_UPGRADING = (b"upgrade", b"connection", b"http2-settings")


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"The request's head must have at most {MAX_HEAD_BYTES} bytes.")


def _tell_it_has_left(cycle: RequestResponseCycle | None) -> None:
    """The application learns it as a disconnect; what it still sends goes nowhere."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()


def _rendered(error: ServeError) -> bytes:
    response = error_response(error, {"connection": "close"})
    lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
    return STATUS_LINE[error.status] + b"".join(lines) + b"\r\n" + bytes(response.body)
