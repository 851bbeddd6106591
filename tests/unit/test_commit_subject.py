"""The hook for commit messages accepts only imperatives with a scope."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[2] / "scripts" / "commit_subject.py"


def judged(subject: str, folder: Path) -> int:
    message = folder / "message"
    message.write_text(f"{subject}\n\nWhy it is so.\n")
    return subprocess.run(
        [sys.executable, HOOK, message], capture_output=True
    ).returncode


@pytest.mark.parametrize(
    "subject",
    [
        "relay: stop claiming after stop()",
        "docs: split the pipeline's page",
        'Revert "relay: stop claiming after stop()"',
        "sending: embed the id",
    ],
)
def test_an_imperative_with_a_scope_is_accepted(subject: str, tmp_path: Path) -> None:
    assert judged(subject, tmp_path) == 0


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "A shorter line",
        "relay: the lanes take turns",
        "relay: stopped claiming",
        f"relay: {'stop ' * 20}",
    ],
)
def test_anything_else_is_refused(subject: str, tmp_path: Path) -> None:
    assert judged(subject, tmp_path) == 1
