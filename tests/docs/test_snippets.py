"""Every Python block of the documentation is run. test_projects.py runs those of the
how-to pages, and this file runs all others."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.test import TestCase, override_settings

from django_txmsg import conf, stages
from django_txmsg.envelope import message_type as message_types
from django_txmsg.scheduling import timetable
from tests.app.models import Order
from tests.docs.pages import HOW_TO, PAGES, ROOT, blocks
from tests.forgetting import forget_recurring

SHOWING = [
    page
    for page in PAGES
    if page not in HOW_TO
    and any(b.language == "python" and b.runs for b in blocks(page))
]


@pytest.fixture
def _shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide the application that the pages import. After the test, remove the stages,
    the upgraders and the recurring messages that the page has declared."""
    known = {stage.name for stage in stages.all_stages()}
    models = ModuleType("shop.models")
    models.Order = Order  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.models", models)
    monkeypatch.setattr(message_types, "_upgraders", dict(message_types._upgraders))
    yield
    for stage in stages.all_stages():
        if stage.name not in known:
            stages.unregister(stage.name)
    for one in timetable.recurring():
        forget_recurring(one.name)


@pytest.mark.usefixtures("_shop")
# The pages' own test cases roll back.
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("page", SHOWING, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stages want a module, and pages go on where their last block ended.
    module = ModuleType("shop.page")
    monkeypatch.setitem(sys.modules, "shop.page", module)
    namespace: dict[str, Any] = module.__dict__
    cases: list[type[unittest.TestCase]] = []

    class Page(TestCase):
        databases = frozenset({"default", "other"})

        def test_it(self) -> None:
            for block in blocks(page):
                if block.language == "python" and block.runs:
                    # Errors point at the line of the page.
                    code = "\n" * (block.line - 1) + block.code
                    exec(compile(code, str(page), "exec"), namespace)
                    _settings_are_sound(namespace.pop("TXMSG", None))
                    cases.extend(_test_cases(namespace))

    _run(Page)
    for case in cases:
        _run(case)


def _settings_are_sound(txmsg: dict[str, Any] | None) -> None:
    if txmsg is not None:
        with override_settings(TXMSG=txmsg):
            assert conf.problems() == []


def _test_cases(namespace: dict[str, Any]) -> list[type[unittest.TestCase]]:
    """Remove a block's test cases from the namespace, and return them."""
    names = [
        name
        for name, value in namespace.items()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == "shop.page"
    ]
    return [namespace.pop(name) for name in names]


def _run(case: type[unittest.TestCase]) -> None:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    assert suite.countTestCases()
    result = unittest.TestResult()
    suite.run(result)
    assert not result.errors + result.failures, "".join(
        said for _, said in result.errors + result.failures
    )


def test_most_pages_with_code_are_run() -> None:
    assert len(SHOWING) + len(HOW_TO) >= 25


def test_python_that_cannot_be_run_here_is_python() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and not block.runs:
                # Errors point at the line of the page.
                compile("\n" * (block.line - 1) + block.code, str(page), "exec")
