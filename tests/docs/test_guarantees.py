"""Each promise on the page of guarantees names a function. The function exists in the
named file, and is short."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

SCREEN = 40
PAGE = (ROOT / "docs/explanation/guarantees.md").read_text()
TABLE = PAGE.partition("## What keeps it")[2]
ROWS = re.findall(r"^\| ([^|]+?) \| `([\w.]+)` in `([\w/]+\.py)`", TABLE, re.M)


@pytest.mark.parametrize(("promise", "name", "path"), ROWS)
def test_the_named_function_exists_and_fits_on_a_screen(
    promise: str, name: str, path: str
) -> None:
    tree = ast.parse((ROOT / "django_txmsg" / path).read_text())
    found: ast.AST = tree
    for part in name.split("."):
        [found] = [
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
    assert isinstance(found, ast.FunctionDef)
    assert found.end_lineno is not None
    assert found.end_lineno - found.lineno < SCREEN


def test_each_promise_names_its_function() -> None:
    promised = PAGE.partition("## Promised")[2].partition("## Not promised")[0]
    titles = re.findall(r"^\*\*(.+?)[.,]?\*\*", promised, re.M)
    assert {one.rstrip(".") for one in titles} == {one for one, _, _ in ROWS}
