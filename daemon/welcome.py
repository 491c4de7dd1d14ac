"""What people are told once the service can serve: where, and a line to try it with."""

from collections.abc import Iterator


def welcome(model_id: str, url: str, *, has_keys: bool) -> Iterator[str]:
    """`has_keys`: nobody may come without one."""
    body = f'{{"model": "{model_id}", "stream": true, "messages": '
    body += '[{"role": "user", "content": "Why is the sky blue?"}]}'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_keys else ""
    json = "-H 'Content-Type: application/json'"
    yield f"ready: {model_id} on {url}. Try:"
    yield f"curl -N {url}/v1/chat/completions{key} {json} -d '{body}'"
