"""Every list in the docs that repeats a list of the code is complete, and has no entry
more."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
from django.apps import apps
from django.contrib import admin

import django_txmsg
from django_txmsg import metrics
from django_txmsg.spark.cli import add_jobs
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
PACKAGE = Path(django_txmsg.__file__).parent
#: Calls whose first argument is the reason of a dead letter.
BURYING = {"DecodeError", "Dead", "because"}


def table(page: Path, heading: str) -> Iterator[list[str]]:
    """Return the cells of the rows of the first table below a heading."""
    _, _, below = page.read_text().partition(f"\n## {heading}\n")
    for row in below.partition("\n## ")[0].splitlines():
        if row.startswith("| "):
            yield re.split(r"(?<!\\)\|", row)[1:-1]


def calls() -> Iterator[tuple[str, str]]:
    """Find the calls in the package that have a text as their first argument. Return
    the function's name and the text of each."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    yield name, first.value


def test_every_reason_of_a_dead_letter_is_explained() -> None:
    cells = table(DOCS / "reference" / "errors.md", "Why a message is buried")
    listed = {code for code, *_ in cells for code in re.findall(r"`(\w+)`", code)}
    given = {text for name, text in calls() if name in BURYING}

    assert len(given) > 8
    assert given <= listed
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [code for code in listed if f'"{code}"' not in source] == []


def test_every_permission_is_explained() -> None:
    cells = table(DOCS / "how-to" / "operate.md", "Who may do what")
    listed = {code for code, *_ in cells for code in re.findall(r"`([\w.]+)`", code)}
    own, djangos, shown = set(), set(), set()
    for app, prefix in (("django_txmsg", ""), ("txmsg_spark", "txmsg_spark.")):
        for model in apps.get_app_config(app).get_models():
            name = model._meta.model_name
            own |= {prefix + code for code, _ in model._meta.permissions}
            djangos |= {f"{prefix}{w}_{name}" for w in model._meta.default_permissions}
            if model in admin.site._registry:
                shown.add(f"{prefix}view_{name}")

    assert own | shown <= listed
    assert listed <= own | djangos


def test_every_metric_is_named() -> None:
    page = "".join(
        (DOCS / "how-to" / name).read_text()
        for name in ("operate.md", "alerts.md", "grafana-dashboard.json")
    )
    registry = prometheus_client.CollectorRegistry()
    metrics.install(registry)
    counted = [family.name for family in registry.collect()]
    metrics.uninstall()

    assert len(counted) > 5
    assert [name for name in counted if name not in page] == []


def test_every_job_of_the_pipeline_is_described_with_its_options() -> None:
    rows = {
        cells[0].strip().strip("`"): "|".join(cells)
        for cells in table(DOCS / "reference" / "commands.md", "`pipeline JOB`")
    }
    common = "".join(row for name, row in rows.items() if name.startswith("--"))
    parser = argparse.ArgumentParser()
    add_jobs(parser)
    (jobs,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )

    assert set(jobs.choices) <= set(rows)
    absent = [
        f"{job} {option}"
        for job, options in jobs.choices.items()
        for action in options._actions
        for option in action.option_strings[-1:]
        if option != "--help" and option not in rows[job] + common
    ]
    assert absent == []
    choices = [
        (job, f"{action.option_strings[0]} {'|'.join(action.choices)}")
        for job, options in jobs.choices.items()
        for action in options._actions
        if action.choices and action.dest != "table"  # another table lists these
    ]
    assert [
        one for one in choices if one[1] not in rows[one[0]].replace("\\", "")
    ] == []
