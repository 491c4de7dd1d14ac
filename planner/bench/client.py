"""The HTTP side of the bench: find the model, try what the service takes, send one request.

Light on purpose: it often shares its cores with the service that it measures.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson

from planner.bench.bodies import ADDITIONS, completion_body, encode
from planner.bench.events import Answer, Piece, RequestFailed, error_message, read_answer
from planner.bench.options import PromptKind, ReplayOptions
from planner.errors import BenchError, ServerFailed

_CONNECT_S = 10.0
# Below the 5 s after which common servers close an idle connection: a request sent at that very
# moment would fail by no fault of the service.
_KEEP_ALIVE_S = 3.0
_MAX_ANSWER_BYTES = 64 * 2**20  # a thousand times a long answer's: this one has no end
_PROBE_NUMBER = 2**32 - 1  # no request of a run has it, so none is like it
_PROBE_PROMPT = 8
_PROBE_OUTPUT = 2


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


class Client:
    """One service, its model, and the fields that it takes. Made by `connected`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        options: ReplayOptions,
        *,
        model: str,
        additions: dict[str, Any],
    ) -> None:
        self.model = model
        self._session = session
        self._url = url
        self._options = options
        self._additions = additions

    def body(self, number: int, num_prompt: int, num_output: int) -> bytes:
        """What to send for request `number`."""
        body = completion_body(self._options, self.model, number, num_prompt, num_output)
        return encode(body | self._additions)

    async def ask(self, body: bytes) -> Answer:
        """Send one request, read its answer to the end.

        Raises:
            RequestFailed: for whatever reason there is no complete answer.
        """
        return read_answer(await self._stream(body))

    async def _stream(self, body: bytes) -> list[Piece]:
        pieces: list[Piece] = []
        with _named_failures(pieces):
            async with asyncio.timeout(self._options.timeout_s):
                async with self._post(body) as response:
                    await _check(response)
                    num_bytes = 0
                    while piece := await response.content.readany():
                        pieces.append((time.monotonic(), piece))
                        num_bytes += len(piece)
                        if num_bytes > _MAX_ANSWER_BYTES:
                            raise RequestFailed("endless", f"no end {_progress(pieces)}")
        return pieces

    def _post(self, body: bytes) -> Any:
        return self._session.post(
            f"{self._url}/completions", data=body, headers=_JSON, allow_redirects=False
        )


@asynccontextmanager
async def connected(url: str, options: ReplayOptions) -> AsyncIterator[Client]:
    """A client whose service has answered one small request.

    Raises:
        ServerFailed: it does not.
    """
    url = api_url(url)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers=options.headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
    ) as session:
        model = options.model or await _first_model(session, url)
        yield await _probed(session, url, options, model)


def api_url(given: str) -> str:
    """The API's root, from a service's address with or without `/v1`."""
    url = given.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"the URL must begin with http:// or https://, not {given!r}")
    if not _has_host_alone(url):
        raise BenchError(f"the URL must be such as http://127.0.0.1:8000, not {given!r}")
    return url if url.endswith("/v1") else f"{url}/v1"


def _has_host_alone(url: str) -> bool:
    """A host that can be looked up, perhaps a port and a path; no query."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        return bool(host) and parts.port != 0 and url.isprintable() and not set(url) & set(" ?#")
    except ValueError:  # no port, no address, no name
        return False


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with asyncio.timeout(_CONNECT_S), session.get(f"{url}/models") as response:
            content = await response.read()
            cards = msgspec.convert(orjson.loads(content), _Cards).data
    except TimeoutError as error:
        raise ServerFailed(f"{url}/models gives no answer within {_CONNECT_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(f"{url} cannot be reached: {_reason(error)}") from error
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise ServerFailed(
            f"{url}/models lists no models (HTTP {response.status}); name one with --model"
        ) from error
    if not cards:
        raise ServerFailed(f"{url}/models lists no model; name one with --model")
    return cards[0].id


async def _probed(
    session: aiohttp.ClientSession, url: str, options: ReplayOptions, model: str
) -> Client:
    """Strict services refuse fields that they do not know: those get the plain API."""
    refusal = ""
    for additions in ADDITIONS:
        client = Client(session, url, options, model=model, additions=additions)
        try:
            await client.ask(client.body(_PROBE_NUMBER, _PROBE_PROMPT, _PROBE_OUTPUT))
            return client
        except RequestFailed as failure:
            if failure.kind not in ("http_400", "http_422"):
                raise ServerFailed(f"{url} fails a small request: {failure}") from failure
            refusal = failure.message
    advice = "" if options.prompt is PromptKind.TEXT else " (does --prompt text help?)"
    raise ServerFailed(f"{url} refuses a small request: {refusal}{advice}")


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        told = error_message(await response.content.read(65_536))
        raise RequestFailed(f"http_{response.status}", f"HTTP {response.status}: {told}")
    if response.content_type != "text/event-stream":
        raise RequestFailed("not_a_stream", f"the answer is {response.content_type}, no stream")


@contextmanager
def _named_failures(pieces: list[Piece]) -> Iterator[None]:
    """Whatever the network does to one request, by a name of its own."""
    try:
        yield
    except TimeoutError as error:
        raise RequestFailed("timeout", f"no end in time, {_progress(pieces)}") from error
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed("connect", _reason(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise RequestFailed("disconnected", f"{_reason(error)}, {_progress(pieces)}") from error


def _progress(pieces: list[Piece]) -> str:
    return f"after {sum(len(piece) for _, piece in pieces)} bytes of answer"


def _reason(error: Exception) -> str:
    """Some of these errors have no words."""
    return " ".join(str(error).split()) or type(error).__name__


_JSON = {"Content-Type": "application/json"}
