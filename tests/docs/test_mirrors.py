"""Every list in the docs that repeats a list of the code is complete, and has no entry
more."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
from django.apps import apps
from django.contrib import admin

import django_txmsg
from django_txmsg import metrics
from django_txmsg.spark.cli import add_jobs
from django_txmsg.spark.models import PipelineAlert
from tests.docs.pages import ROOT
from tests.factories import DeadLetterFactory, OutboxMessageFactory, WorkerFactory

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


METRICS = DOCS / "reference" / "metrics.md"
_NAME = re.compile(r"`(\w+)`")


def labels(cell: str) -> tuple[str, ...]:
    """Return the labels in a cell, without the values in parentheses."""
    return tuple(_NAME.findall(re.sub(r"\(.*?\)", "", cell)))


def test_every_event_that_a_process_counts_is_described() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics.install(registry)
    kinds = {family.name: family.type for family in registry.collect()}
    metrics.uninstall()
    rows = list(table(METRICS, "From each process"))[1:]
    described = {
        (_NAME.findall(name)[0], kind.strip(), labels(cell))
        for name, kind, cell, _ in rows
    }
    events = {(f"txmsg_{one.name}", one.labels) for one in metrics._EVENTS}

    assert len(events) > 5
    assert described == {(name, kinds[name], given) for name, given in events}


@pytest.mark.django_db
def test_every_gauge_is_described_with_its_labels() -> None:
    PipelineAlert.objects.create(service="shop", name="lag")
    OutboxMessageFactory()
    WorkerFactory()
    DeadLetterFactory()
    rows = list(table(METRICS, "From the database"))[1:]
    described = {_NAME.findall(name)[0]: labels(cell) for name, cell, _ in rows}

    assert set(described) == {f"txmsg_{name}" for name in metrics.TEXTS}
    families = list(metrics.Collector().collect())
    given = {one.name: tuple(one.samples[0].labels) for one in families}
    assert len(given) > 15
    assert {name: described[name] for name in given} == given


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
