"""Which test shows which case: read from the tests' names, written to CASES.md.

`python -m tests.list_cases` writes the file; a test holds it against the tests.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cases import CASES, EXCUSED

TESTS = Path(__file__).parent
LIST = TESTS / "CASES.md"
_IDS = re.compile(r"(?:_[A-F][0-9]+)+$")
_HEAD = """\
# Cases

What users of LLM servers report, as what must hold here instead, and the tests that show it. Made
from the tests' names by `python -m tests.list_cases`.

| case | what must hold | shown by |
| --- | --- | --- |
"""


def covering() -> dict[str, list[str]]:
    """Ids and the tests that bear them, as `path::name`."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in _function_names(path):
            if name.startswith("test_") and (ids := _IDS.search(name)):
                for case in ids[0].strip("_").split("_"):
                    found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{name}")
    return found


def rendered(tests_of: Mapping[str, list[str]]) -> str:
    """The file's text."""
    rows = [f"| {case} | {title} | {_shown_by(case, tests_of)} |" for case, title in CASES.items()]
    return _HEAD + "\n".join(rows) + "\n"


def _shown_by(case: str, tests_of: Mapping[str, list[str]]) -> str:
    if case in EXCUSED:
        return f"does not apply: {EXCUSED[case]}"
    return "<br>".join(f"`{test}`" for test in tests_of.get(case, ())) or "nothing yet"


def _function_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def main() -> int:
    """Write the list and say what is still open."""
    tests_of = covering()
    LIST.write_text(rendered(tests_of), encoding="utf-8")
    missing = [case for case in CASES if case not in tests_of and case not in EXCUSED]
    sys.stdout.write(f"{len(CASES)} cases, {len(EXCUSED)} do not apply, ")
    sys.stdout.write(f"without a test: {', '.join(missing) or 'none'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
