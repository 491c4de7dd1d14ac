"""The line that people are given to try the service with."""

import json
import shlex

from daemon.welcome import welcome


def words(*, has_keys: bool, model_id: str = "tiny") -> list[str]:
    _, line = welcome(model_id, "http://127.0.0.1:8000", has_keys=has_keys)
    return shlex.split(line)


def test_where_keys_are_asked_for_the_line_to_try_has_a_place_for_one() -> None:
    """It once was answered 401."""
    assert "Authorization: Bearer YOUR_KEY" in words(has_keys=True)
    assert not any("Authorization" in word for word in words(has_keys=False))


def test_the_line_asks_this_service_for_its_model() -> None:
    line = words(has_keys=False)
    assert line[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert '"model": "tiny"' in line[-1]


def test_a_model_may_be_called_what_a_shell_or_a_text_ends_at() -> None:
    name = 'it\'s "tiny"'
    assert json.loads(words(has_keys=False, model_id=name)[-1])["model"] == name
