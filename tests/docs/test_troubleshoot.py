"""The page of symptoms quotes real messages of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import django_txmsg
from django_txmsg import errors
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text()
#: What others say: Django, SQLite, PostgreSQL.
OF_OTHERS = {
    "Unknown command: 'relay'",
    "database is locked",
    "no such table: django_txmsg_…",
    'relation "django_txmsg_…" does not exist',
    "too many connections",
}
#: What stands for a name of the reader's.
NAMES = re.compile(r"'default'|shop\.stage|…")

QUOTED = [
    quoted
    for row in PAGE.splitlines()
    if row.startswith("| ")
    for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[0])
]


@pytest.fixture(scope="module")
def said() -> str:
    """Return all texts of the package, with a line feed in place of each inserted
    value."""
    texts = []
    for path in Path(django_txmsg.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "\n"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\0".join(texts)


@pytest.mark.parametrize("quoted", QUOTED)
def test_symptom_quotes_a_real_message(quoted: str, said: str) -> None:
    if quoted in OF_OTHERS or hasattr(errors, quoted) or quoted == "message.body":
        return
    pattern = r"[^\0]*".join(map(re.escape, NAMES.split(quoted)))

    assert re.search(pattern, said), quoted


def test_there_are_symptoms_for_both() -> None:
    developers, _, operators = PAGE.partition("## While you operate")
    assert developers.count("\n| ") > 15
    assert operators.count("\n| ") > 15
