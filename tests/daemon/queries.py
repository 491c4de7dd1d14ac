"""What queries ask for: the series that they select, read from PromQL without carrying it out."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from prometheus_client.samples import Sample

DASHBOARDS = Path(__file__).parents[2] / "daemon" / "dashboards"
_SELECTOR = re.compile(r"\b((?:vllm:|distserve_|process_|up\b)[a-z0-9_:]*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"')


class Selector(NamedTuple):
    """A metric's name and what its labels must be."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def selects(self, sample: Sample) -> bool:
        return sample.name == self.name and all(
            _matches(sample.labels.get(label, ""), how, value)
            for label, how, value in self.matchers
        )


def _matches(value: str, how: str, wanted: str) -> bool:
    if how == "=~":
        return re.fullmatch(wanted, value) is not None
    return (value == wanted) is (how == "=")


def selectors(query: str) -> Iterator[Selector]:
    for name, labels in _SELECTOR.findall(query):
        yield Selector(name, tuple(_MATCHER.findall(labels)))


def rules() -> dict[str, str]:
    """Alerts and their expressions."""
    body = yaml.safe_load((DASHBOARDS / "alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule["expr"] for group in body["groups"] for rule in group["rules"]}


def panels() -> dict[str, list[str]]:
    """Titles of the dashboard's panels and their queries."""
    body = json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))
    return {p["title"]: [target["expr"] for target in p["targets"]] for p in body["panels"]}


def our_queries() -> list[str]:
    return [*rules().values(), *(query for asked in panels().values() for query in asked)]
