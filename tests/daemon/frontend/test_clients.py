import asyncio
import json
import logging
import socket
from typing import Any

import httpx
import pytest

from daemon.generation import Delta
from ipc.vocabulary import FinishReason
from tests.daemon.frontend.http_calls import COMPLETIONS, HELLO, LIMITS, answer, chunks
from tests.daemon.frontend.http_service import Service


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_deltas", [0, 1])
async def test_a_client_that_leaves_aborts_its_request_F14(
    service: Service, stream: bool, num_deltas: int
) -> None:
    never = asyncio.Event()
    service.submitter.script = lambda _: [*([[Delta(0, "a", (1,))]] * num_deltas), never]
    connection = await send_request(service, HELLO | {"stream": stream})
    await service.submitter.submitted.wait()
    if stream and num_deltas:
        await asyncio.get_running_loop().sock_recv(connection, 10)
    connection.close()
    await service.submitter.last.left.wait()
    assert service.submitter.last.is_aborted


async def test_a_client_that_stops_reading_aborts_its_request(service: Service) -> None:
    service.submitter.script = lambda _: [[Delta(0, "x" * 1_000_000, (1,))] for _ in range(50)]
    connection = await send_request(service, HELLO | {"stream": True})
    await service.submitter.submitted.wait()
    await service.submitter.last.left.wait()
    assert service.submitter.last.is_aborted
    connection.close()


async def test_a_slow_engine_is_no_stalled_client(
    service: Service, http: httpx.AsyncClient
) -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(2.5 * LIMITS.stall_s, late.set)
    end = Delta(0, "b", (2,), None, FinishReason.LENGTH)
    service.submitter.script = lambda _: [[Delta(0, "a", (1,))], late, [end]]
    assert len(await chunks(http, COMPLETIONS, HELLO)) == 2


async def test_a_finished_request_is_not_aborted_A3(
    service: Service, http: httpx.AsyncClient
) -> None:
    await chunks(http, COMPLETIONS, HELLO)
    assert not service.submitter.last.is_aborted


async def test_a_client_that_leaves_amid_its_body_disturbs_nobody(
    service: Service, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connection = await send_request(service, HELLO, announced_bytes=1000)
    connection.close()
    await answer(http, COMPLETIONS, HELLO)
    assert len(service.submitter.generations) == 1
    assert not [record for record in caplog.records if record.exc_info]


async def send_request(
    service: Service, body: dict[str, Any], *, announced_bytes: int | None = None
) -> socket.socket:
    """A raw connection that has sent its request and read nothing."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", service.port))
    content = json.dumps(body).encode()
    length = announced_bytes or len(content)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + content)
    return connection
