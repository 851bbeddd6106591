"""The alerts in the how-to use only metrics and labels that a scrape can contain."""

from __future__ import annotations

import json
import re

import prometheus_client
import promql_parser
import pytest
from django.core.management import call_command

from django_txmsg import metrics
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
DASHBOARD = json.loads(
    (ROOT / "docs" / "how-to" / "grafana-dashboard.json").read_text()
)
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = re.findall(r"^ +expr: (.+)$", PAGE, re.MULTILINE) + re.findall(
    r"^\| .+ \| `(.+)` \|$", PAGE, re.MULTILINE
)
QUERIES += [target["expr"].replace("$__rate_interval", "5m") for target in TARGETS]


@pytest.fixture
def offered() -> dict[str, set[str]]:
    """Return the names of the series that a scrape can contain, each with its
    labels."""
    registry = prometheus_client.CollectorRegistry()
    metrics.install(registry)
    found = {f"txmsg_{name}": _labels(name) for name in metrics.TEXTS}
    for family in registry.collect():
        collector = registry._names_to_collectors[family.name]
        labels = set(collector._labelnames) | {"le"}
        for suffix in ("_total", "_bucket", "_count", "_sum"):
            found[family.name + suffix] = labels
    metrics.uninstall()
    return found


def _labels(name: str) -> set[str]:
    kinds = {
        "outbox": {"destination", "database"},
        "queue": {"destination", "database"},
        "worker": {"worker"},
        "workers": {"kind", "service"},
        "outage": {"kind", "name"},
        "database": {"database"},
        "flow": {"flow", "service", "database"},
        "deadline": {"service", "database"},
        "recurring": {"name", "database"},
        "pipeline": {"alert", "service"},
    }
    return kinds.get(name.partition("_")[0], {"stage", "database"})


def test_the_command_exports_the_rules_of_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call_command("txmsg", "alerts", "export")
    comment, _, rules = capsys.readouterr().out.partition("\n")

    assert comment.startswith("# ")
    assert f"```yaml\n{rules}```" in PAGE


def test_there_are_alerts_and_panels() -> None:
    assert len(QUERIES) >= 14 + len(TARGETS)
    assert len(TARGETS) >= 14


def test_no_panel_lies_on_another() -> None:
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"])
def test_a_legend_names_labels_that_its_query_keeps(target: dict[str, str]) -> None:
    kept = re.search(r"\bby \(([^)]+)\)", target["expr"])
    names = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))

    assert names <= set(re.split(r",\s*", kept[1]) if kept else [])


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_uses_metrics_that_a_scrape_offers(
    query: str, offered: dict[str, set[str]]
) -> None:
    promql_parser.parse(query)
    series = set(re.findall(r"\btxmsg_\w+", query))

    assert series
    assert series <= offered.keys()
    groups = r"\b(?:by|on) \(([^)]+)\)(?=.*?\b(txmsg_\w+))"
    for group, name in re.findall(groups, query):
        asked = {label.strip() for label in group.split(",")}
        assert asked <= offered[name], query


@pytest.mark.parametrize("query", QUERIES)
def test_a_gauge_of_the_shared_database_is_not_added_up(query: str) -> None:
    """Each scraped process reports it."""
    once = r"(max( by \([^)]+\))? ?\(|absent\(|unless on \(stage\) )$"
    for gauge in re.finditer(rf"\btxmsg_({'|'.join(metrics.TEXTS)})\b", query):
        assert re.search(once, query[: gauge.start()]), query
