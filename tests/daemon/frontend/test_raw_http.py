"""Bytes that nobody should send, on raw connections to the real server: it never fails.

Whatever comes, however it is cut: no status of 500 and more, no hanging, no exception in the log,
and the next good request is answered.
"""

import json
import os
from collections.abc import Iterator, Sequence

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO
from tests.daemon.frontend.raw_http import HEALTH, post
from tests.daemon.frontend.raw_service import LAST, RawService, statuses

BODY = json.dumps(HELLO | {"max_tokens": 2}).encode()
REQUEST = post(COMPLETIONS, BODY)
IN_CHUNKS = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    + b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in BODY)
    + b"0\r\n\r\n"
)

METHODS = (b"GET", b"POST", b"OPTIONS", b"HEAD", b"PUT", b"CONNECT", b"get", b"")
PATHS = (
    *(b"/health", b"/v1/models", COMPLETIONS.encode(), b"/openapi.json", b"*", b"//", b""),
    *(b"http://a/health", b"/" + b"x" * 9000, b"/\xff", b"/v1/models/%2e%2e", b"/%ff%00?a=%00"),
)
VERSIONS = (*[b"HTTP/1.1"] * 4, b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTCPCP/1", b"")
NAMES = (
    *(b"host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade"),
    *(b"X-Request-Id", b"Content-Type", b"Content-Encoding", b"Origin", b"\xff", b"", b" x"),
)
VALUES = (
    *(b"a", b"0", b"5", b"-1", b"99999999999999999999", b"1, 1", b"chunked", b"gzip, chunked"),
    *(b"close", b"keep-alive", b"upgrade", b"h2c", b"100-continue", b"application/json"),
    *(b"x" * 70_000, b"\0", b"\xff", b"a\nb: c", b"", b"identity"),
)
LINE_ENDS = (*[b"\r\n"] * 7, b"\n", b"\r", b"")
BODIES = (
    *(b"", BODY, b"{", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"f" * 20 + b"\r\n"),
    *(b"0\r\n\r\n", b"1;" + b"x" * 80_000, b"0\r\nx: " + b"y" * 80_000, b"-1\r\n", b"5\r\nhel"),
    *(REQUEST, HEALTH),
)
GOOD = (REQUEST, IN_CHUNKS, HEALTH, b"\r\n", b"\0" * 100)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Something like a request: each part right most of the time, or not at all."""

    def one_of(parts: Sequence[bytes]) -> bytes:
        return draw(st.sampled_from(parts))

    match draw(st.integers(0, 9)):
        case 0:
            return draw(st.binary(max_size=300))
        case 1 | 2:
            return one_of(GOOD)
    head = b" ".join((one_of(METHODS), one_of(PATHS), one_of(VERSIONS)))
    num_headers = draw(st.integers(0, 4))
    headers = [b"%b: %b" % (one_of(NAMES), one_of(VALUES)) for _ in range(num_headers)]
    end = one_of(LINE_ENDS)
    return end.join([head, b"host: a", *headers]) + end + end + one_of(BODIES)


@pytest.fixture(scope="module")
def raw(tokenizer: Tokenizer) -> Iterator[RawService]:
    with RawService(tokenizer).running() as service:
        yield service


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(requests(), min_size=1, max_size=4), st.data())
def test_no_bytes_make_the_server_fail_or_hang_E25(
    raw: RawService,
    caplog: pytest.LogCaptureFixture,
    parts: list[bytes],
    data: st.DataObject,
) -> None:
    sent = b"".join(parts)
    if data.draw(st.booleans()):
        sent = sent[: data.draw(st.integers(0, len(sent)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    received = raw.answers([*pieces, LAST])
    assert all(status < 500 for status in statuses(received)), received[:1000]
    assert raw.is_well()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("request_bytes", "answers"),
    [
        (REQUEST, [200, 200]),
        (IN_CHUNKS, [200, 200]),
        (HEALTH + REQUEST, [200, 200, 200]),
        (REQUEST + b"0\r\n\r\n", [200, 400]),
        (HEALTH + REQUEST + b"0\r\n\r\n", [200, 200, 400]),
    ],
)
def test_a_request_may_be_cut_anywhere_and_what_is_none_is_told_after_it_E25(
    raw: RawService, request_bytes: bytes, answers: list[int]
) -> None:
    for at in range(len(request_bytes)):
        cut = raw.answers([request_bytes[:at], request_bytes[at:] + LAST])
        assert statuses(cut) == answers, request_bytes[:at]


def test_a_request_may_come_byte_by_byte_E25(raw: RawService) -> None:
    for request_bytes in (REQUEST, IN_CHUNKS):
        pieces = [request_bytes[at : at + 1] for at in range(len(request_bytes))]
        assert statuses(raw.answers([*pieces, LAST])) == [200, 200]


def test_a_request_that_breaks_off_anywhere_ends_in_time_E25(raw: RawService) -> None:
    """All at once, as each waits for its deadline."""
    connections = [raw.connect() for _ in range(0, len(REQUEST), 4)]
    for index, connection in enumerate(connections):
        connection.sendall(REQUEST[: 4 * index])
    for index, connection in enumerate(connections):
        with connection:
            received = b""
            while data := connection.recv(65536):
                received += data
        assert statuses(received) == ([408] if index else [])
    assert raw.is_well()


def test_endless_heads_of_a_crowd_take_no_memory_E25(raw: RawService) -> None:
    process = psutil.Process(os.getpid())
    assert raw.is_well()
    before = process.memory_info().rss
    connections = [raw.connect() for _ in range(200)]
    for connection in connections:
        try:
            connection.sendall(HEALTH[:-2] + b"x: " + b"y" * 1_000_000)
        except ConnectionError:
            continue
    grown = process.memory_info().rss - before
    for connection in connections:
        connection.close()
    assert grown < 64 * 2**20
    assert raw.is_well()


def test_nothing_is_left_of_those_who_came(raw: RawService) -> None:
    for _ in range(100):
        assert raw.is_well()
        if raw.book.num_open <= 1:
            break
    else:
        raise AssertionError(f"{raw.book.num_open} connections are still counted")
