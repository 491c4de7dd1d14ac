"""What the prompt offers at each place of a line."""

from daemon.console_completion import candidates
from daemon.console_parser import build

LIVE = {"instance": ["prefill-0", "decode-0"], "request": ["17", "18"]}


def offered(line: str) -> list[str]:
    return candidates(build(), line.split(" "), lambda kind: LIVE.get(kind, []))


def test_verbs_are_offered_first() -> None:
    assert {"status", "requests", "drain", "shutdown"} <= set(offered(""))
    assert offered("sta") == ["status"]
    assert offered("re") == ["requests", "restart"]


def test_actions_follow_their_verb() -> None:
    assert offered("requests ") == ["list", "show", "abort"]
    assert offered("scale a") == ["add"]


def test_live_names_stand_where_one_is_due() -> None:
    assert offered("restart ") == ["prefill-0", "decode-0"]
    assert offered("scale remove d") == ["decode-0"]
    assert offered("requests show 1") == ["17", "18"]
    assert offered("drain ") == ["node", "prefill-0", "decode-0"]
    assert offered("restart decode-0 ") == []


def test_options_are_offered_once_and_their_values_after_them() -> None:
    assert "--deadline" in offered("drain --")
    assert "--deadline" not in offered("drain --deadline 5 --")
    assert offered("drain --deadline ") == []
    assert offered("requests list --state f") == ["finished", "failed"]
    assert offered("drain --dry-run ") == ["node", "prefill-0", "decode-0"]


def test_a_line_that_is_none_offers_nothing() -> None:
    assert offered("nonsense x ") == []
    assert offered("log-level d") == ["debug"]
