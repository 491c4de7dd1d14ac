"""The runbook, the alert rules and the dashboard against the code that they tell of."""

import inspect
import re

import pytest

from daemon import errors
from daemon.errors import ExitError, ServeError
from tests.daemon.queries import our_queries, panels, rules, selectors
from tests.list_metrics import MARK, RUNBOOK, families, sample_names, table

TEXT = RUNBOOK.read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n+(.*?)(?=\n#|\Z)", TEXT, re.MULTILINE | re.DOTALL))
KINDS = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ServeError | ExitError) and kind not in (ServeError, ExitError)
}


def test_every_alert_and_every_error_has_its_section_and_nothing_else_has() -> None:
    assert set(SECTIONS) == set(rules()) | set(KINDS)
    assert not [name for name, text in SECTIONS.items() if len(text.split()) < 8]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_an_error_s_section_opens_with_its_status_or_exit_code(name: str) -> None:
    kind = KINDS[name]
    if issubclass(kind, ServeError):
        code = f" `{kind.code}`" if kind.code else ""
        assert SECTIONS[name].startswith(f"{kind.status}{code}.")
    else:
        assert re.match(rf"{kind.exit_code}[.,]", SECTIONS[name])


def test_the_table_of_metrics_is_the_registry_s() -> None:
    """`python -m tests.list_metrics` writes it anew."""
    assert TEXT.split(MARK)[1] == table()


def test_every_metric_has_a_sentence_of_its_own() -> None:
    sentences = [family.documentation for family in families()]
    assert all(len(sentence.split()) > 1 for sentence in sentences)
    assert not [f.name for f in families() if "|" in f.documentation]


def test_every_metric_that_a_rule_or_a_panel_names_exists() -> None:
    known = {name for family in families() for name in sample_names(family)} | {"up"}
    asked = {selector.name for query in our_queries() for selector in selectors(query)}
    assert asked <= known
    assert all(list(selectors(query)) for query in our_queries())


def test_the_panels_fit_their_grid_and_ask_something() -> None:
    assert len(panels()) >= 15
    assert all(queries for queries in panels().values())


def test_severities_are_two() -> None:
    text = (RUNBOOK.parent / "daemon/dashboards/alerts.yml").read_text(encoding="utf-8")
    severities = re.findall(r"severity: (\w+)", text)
    assert len(severities) == len(rules())
    assert set(severities) == {"warning", "critical"}
