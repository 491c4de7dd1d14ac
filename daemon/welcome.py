"""What people are told once the service can serve: where, and a line to try it with."""

import json
import shlex
from collections.abc import Iterator


def welcome(model_id: str, url: str, *, has_keys: bool) -> Iterator[str]:
    """`has_keys`: nobody may come without one."""
    question = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps({"model": model_id, "stream": True, "messages": [question]})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_keys else ""
    kind = "-H 'Content-Type: application/json'"
    yield f"ready: {model_id} on {url}. Try:"
    yield f"curl -N {url}/v1/chat/completions{key} {kind} -d {shlex.quote(body)}"
