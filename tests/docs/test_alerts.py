"""The alerts of the how-to ask for metrics that a scrape has, by labels that it has."""

from __future__ import annotations

import re

import prometheus_client
import pytest

from django_txmsg import metrics
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
QUERIES = re.findall(r"^ +expr: (.+)$", PAGE, re.MULTILINE) + re.findall(
    r"^\| .+ \| `(.+)` \|$", PAGE, re.MULTILINE
)


@pytest.fixture
def offered() -> dict[str, set[str]]:
    """The series that a scrape can have, each with its labels."""
    registry = prometheus_client.CollectorRegistry()
    metrics.install(registry)
    found = {f"txmsg_{name}": {_label(name)} for name in metrics._TEXTS}
    for family in registry.collect():
        collector = registry._names_to_collectors[family.name]
        labels = set(collector._labelnames) | {"le"}
        for suffix in ("_total", "_bucket", "_count", "_sum"):
            found[family.name + suffix] = labels
    metrics.uninstall()
    return found


def _label(name: str) -> str:
    kinds = {"outbox": "destination", "queue": "destination", "worker": "worker"}
    return kinds.get(name.partition("_")[0], "stage")


def test_there_are_alerts_and_panels() -> None:
    assert len(QUERIES) >= 14


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_a_scrape_has(
    query: str, offered: dict[str, set[str]]
) -> None:
    series = set(re.findall(r"\btxmsg_\w+", query))

    assert series
    assert series <= offered.keys()
    for group in re.findall(r"\b(?:by|on) \(([^)]+)\)", query):
        asked = {label.strip() for label in group.split(",")}
        assert all(asked <= offered[name] for name in series), query
