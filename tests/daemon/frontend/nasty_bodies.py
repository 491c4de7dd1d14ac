"""Bodies that cost the most for their size: each kind up to a given number of bytes."""

from collections.abc import Mapping

from daemon.frontend.json_shape import MAX_PARTS, MAX_VALUES

CHAT_KINDS = ("messages", "parts", "kwargs", "kwargs deep", "most messages", "most kwargs")


def nasty_bodies(num_bytes: int) -> Mapping[str, bytes]:
    """By kind. Some are requests, if too long for any model; others only look like one."""

    def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
        return head + unit * ((num_bytes - len(head) - len(tail)) // len(unit)) + tail

    text, ids = b'{"prompt":"', b'{"prompt":['
    other = b'{"prompt":"a","other":['
    messages = b'{"messages":['
    hi = b'{"role":"user","content":"a"}'
    part = b'{"type":"text","text":"a"}'
    kwargs = messages + hi + b'],"chat_template_kwargs":{"a":'
    keys = b",".join(b'"k%07d":1' % i for i in range((num_bytes - 30) // 13))
    return {
        "letters": filled(text, b"a", b'"}'),
        "spaces in text": filled(text, b" ", b'"}'),
        "words": filled(text, b"wo rd, ", b'"}'),
        "brackets in text": filled(text, b"[{", b'"}'),
        "commas in text": filled(text, b",", b'"}'),
        "escapes": filled(text, b"\\u00e9", b'"}'),
        "emoji escaped": filled(text, b"\\ud83d\\ude00", b'"}'),
        "half emoji": filled(text, b"\\ud83d", b'"}'),
        "backslashes": filled(text, b"\\\\", b'"}'),
        "quotes": filled(text, b'\\"', b'"}'),
        "emoji": filled(text, "🎉".encode(), b'"}'),
        "no utf-8": filled(text, b"\xff", b'"}'),
        "nulls": filled(text, b"\\u0000", b'"}'),
        "one text of 64": filled(b'{"prompt":["a","', b"a", b'"]}'),
        "short ids": filled(ids, b"1,", b"1]}"),
        "long ids": filled(ids, b"48000,", b"1]}"),
        "lists of ids": filled(ids, b"[1],", b"[1]]}"),
        "64 lists of ids": b'{"prompt":[' + b",".join([_ids(num_bytes // 64 - 2)] * 64) + b"]}",
        "texts": filled(ids, b'"a",', b'"a"]}'),
        "empty texts": filled(ids, b'"",', b'""]}'),
        "floats": filled(other, b"1.5e-7,", b"1]}"),
        "long floats": filled(other, b"0." + b"123456789" * 6 + b",", b"1]}"),
        "one number": filled(b'{"prompt":"a","other":', b"1", b"}"),
        "empty lists": filled(other, b"[],", b"[]]}"),
        "empty objects": filled(other, b"{},", b"{}]}"),
        "small objects": filled(other, b'{"a":1},', b"{}]}"),
        "many keys": b'{"prompt":"a","other":{' + keys + b"}}",
        "same key": filled(b'{"prompt":"a",', b'"n":1,', b'"n":1}'),
        "stop strings": filled(b'{"prompt":"a","stop":[', b'"a",', b'"a"]}'),
        "blanks": filled(b'{"prompt":"a"', b" ", b"}"),
        "deep": filled(b"", b"[", b""),
        "deep objects": filled(b"", b'{"a":', b""),
        "deep and closed": b'{"prompt":"a","other":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        "messages": filled(messages, hi + b",", hi + b"]}"),
        "parts": filled(b'{"messages":[{"role":"user","content":[', part + b",", part + b"]}]}"),
        "kwargs": filled(kwargs + b"[", b"[],", b"[]]}}"),
        "kwargs deep": kwargs + b"[" * 900 + b"]" * 900 + b"}}",
        **_within_limits(num_bytes),
        "nothing": b"",
        "zeros": filled(b"", b"\0", b""),
    }


def _within_limits(num_bytes: int) -> dict[str, bytes]:
    """As much of each as is decoded at all."""
    num_values = min(MAX_VALUES - 70, num_bytes // 8)
    num_lists = min(MAX_PARTS - 10, num_bytes // 20)
    keys = b",".join(b'"k%07d":1' % i for i in range(num_lists - 2))
    objects = b",".join([b'{"a":1,"b":2}'] * (num_lists // 3 - 2))
    hi = b'{"role":"user","content":"a"}'
    kwargs = b'{"messages":[' + hi + b'],"chat_template_kwargs":{"a":['
    return {
        "most ids": b'{"prompt":[' + b"480," * num_values + b"1]}",
        "most ids in 64": b'{"prompt":[' + b",".join([_ids(num_values // 11)] * 64) + b"]}",
        "most floats": b'{"prompt":"a","b":[' + b"1.5e-7," * num_values + b"1]}",
        "most texts": b'{"prompt":[' + b'"ab",' * num_values + b'"a"]}',
        "most lists": b'{"prompt":[' + b"[]," * (num_lists - 2) + b"[]]}",
        "most lists of ids": b'{"prompt":[' + b"[12,34,56]," * (num_lists - 2) + b"[1]]}",
        "most keys": b'{"prompt":"a","b":{' + keys + b"}}",
        "most objects": b'{"prompt":"a","b":[' + objects + b"]}",
        "most messages": b'{"messages":[' + b",".join([hi] * (num_lists // 3 - 2)) + b"]}",
        "most kwargs": kwargs + objects + b"]}}",
    }


def _ids(num_bytes: int) -> bytes:
    return b"[" + b"48000," * (num_bytes // 6) + b"1]"
