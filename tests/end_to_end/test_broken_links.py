"""A worker whose way from the daemon has lost something, or brings garbage: it ends by itself."""

from pathlib import Path

import pytest
import zmq.asyncio

from daemon.worker_process import WorkerProcess
from ipc import codec
from ipc.codec import Kind
from ipc.messages import Audit, Ready, Stats, WorkerConfig
from ipc.vocabulary import DType, Parallelism, Role, WorkerName

EPOCH = 5
LOST_ONE = codec.encode(Audit(2), Kind.COMMAND, EPOCH, 2)
GARBAGE = [b"what is this"]


def config_of(model: Path, endpoint: str) -> WorkerConfig:
    return WorkerConfig(
        name=WorkerName("decode-0"),
        epoch=EPOCH,
        role=Role.DECODE,
        parallelism=Parallelism(),
        endpoint=endpoint,
        model_dir=str(model),
        dtype=DType.FP32,
        kv_bytes=1 << 20,
        block_size=16,
        max_context_tokens=64,
        prefill_tokens=64,
        max_batch=16,
    )


@pytest.mark.parametrize(
    ("frames", "reason"),
    [(LOST_ONE, "message 2 came where 1 was due"), (GARBAGE, "1 frames where")],
    ids=["a message was lost", "garbage"],
)
async def test_a_worker_whose_link_breaks_ends_with_one_clear_line(
    tiny_llama: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    frames: list[bytes],
    reason: str,
) -> None:
    context = zmq.asyncio.Context()
    link: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
    link.bind(f"ipc://{tmp_path}/link")
    process = await WorkerProcess.start(config_of(tiny_llama, f"ipc://{tmp_path}/link"))
    try:
        worker = await until_event(link, Ready)
        await link.send_multipart([worker, *codec.encode(Audit(1), Kind.COMMAND, EPOCH, 0)])
        await until_event(link, Stats, beat=1)
        await link.send_multipart([worker, *frames])
        assert await process.ended() == "exit code 76"
    finally:
        process.kill()
        await process.ended()
        process.close()
        link.close(0)
        context.term()
    said = capfd.readouterr().err
    assert f"decode-0/0.0 ends: its link to the daemon broke: {reason}" in said
    assert "Traceback" not in said


async def until_event(link: zmq.asyncio.Socket, kind: type, **fields: object) -> bytes:
    """Read until such an event has come; who sent it."""
    while True:
        name, header, payload = await link.recv_multipart()
        event = codec.read_event(Kind(header[1]), payload)
        if isinstance(event, kind) and all(getattr(event, f) == v for f, v in fields.items()):
            return bytes(name)
