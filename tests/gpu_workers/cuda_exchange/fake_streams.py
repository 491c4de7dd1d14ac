"""Streams and events of the played CUDA runtime: what is asked is done later, in order.

Nothing begins before it was asked, by the played clock of the host.
"""

import ctypes
import mmap
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Allocation:
    memory: mmap.mmap | None  # none of ours: it was there before
    address: int
    num_bytes: int
    device: int
    descriptor: int | None = None
    num_opens: int = 0


@dataclass
class Event:
    num_asked: int = 0
    num_done: int = 0
    at_s: float = 0.0
    stream: "Stream | None" = None


@dataclass
class Stream:
    device: int
    clock_s: float = 0.0
    todo: deque[tuple[str, Any]] = field(default_factory=deque)


@dataclass
class Copy:
    target: int
    source: int
    num_bytes: int
    bytes_per_s: float
    asked_s: float = 0.0
    extra_s: float = 0.0


def advance(stream: Stream) -> None:
    """Do one thing that the stream was asked, here or on the stream that this one waits for."""
    what, about = stream.todo[0]
    if what == "wait":
        event, number = about
        if event.num_done < number:
            advance(event.stream)
            return
        stream.clock_s = max(stream.clock_s, event.at_s)
    elif what == "record":
        event, event.num_done, asked_s = about
        event.at_s = stream.clock_s = max(stream.clock_s, asked_s)
    elif what == "fill":
        ctypes.memset(about.target, about.source, about.num_bytes)
    else:
        ctypes.memmove(about.target, about.source, about.num_bytes)
        began_s = max(stream.clock_s, about.asked_s)
        stream.clock_s = began_s + about.extra_s + about.num_bytes / about.bytes_per_s
    stream.todo.popleft()
