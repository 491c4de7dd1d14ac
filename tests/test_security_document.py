"""SECURITY.md names a test for each promise; here is that these tests exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_NAME = re.compile(r"`(test_\w+)`")


def all_tests() -> set[str]:
    return {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_test_that_the_security_document_names_exists() -> None:
    named = set(_NAME.findall(TEXT))
    assert len(named) > 30
    assert not named - all_tests()


def test_every_promise_names_a_test_of_its_own() -> None:
    promises = TEXT.partition("## Promised\n")[2].partition("## Not promised")[0]
    paragraphs = [part for part in promises.split("\n\n") if part.strip()]
    assert len(paragraphs) > 8
    for paragraph in paragraphs:
        assert paragraph.strip().startswith("**")
        assert _NAME.search(paragraph), paragraph
