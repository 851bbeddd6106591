"""The quickstart, followed by the letter in a new project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

pytestmark = pytest.mark.timeout(300)


def run(*command: str, cwd: Path) -> str:
    """Run a command that has to succeed, without this suite's settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DJANGO_", "TXMSG_"))
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_orders_are_confirmed(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    settings, models, store, store_many, stages, _ = (
        block.code for block in blocks(page) if block.language == "python"
    )
    run("-m", "django", "startproject", "project", ".", cwd=tmp_path)
    run("manage.py", "startapp", "shop", cwd=tmp_path)
    with (tmp_path / "project" / "settings.py").open("a") as file:
        file.write(settings)
    (tmp_path / "shop" / "models.py").write_text(models)
    (tmp_path / "shop" / "stages.py").write_text(stages)

    run("manage.py", "check", "--fail-level", "WARNING", cwd=tmp_path)
    run("manage.py", "makemigrations", "shop", cwd=tmp_path)
    run("manage.py", "migrate", cwd=tmp_path)
    run("manage.py", "shell", "-c", store + store_many, cwd=tmp_path)
    relayed = run("manage.py", "relay", "--once", cwd=tmp_path)
    consumed = run("manage.py", "consume", "--once", cwd=tmp_path)
    ask = (
        "from shop.models import Order\n"
        "from django_txmsg.models import InboxMessage, OutboxMessage\n"
        "print(Order.objects.get().note)\n"
        "print(InboxMessage.objects.filter(processed_at=None).count())\n"
        "print(OutboxMessage.objects.filter(destination='mails.remind').count())\n"
    )
    note, waiting, reminders = run(
        "manage.py", "shell", "-c", ask, cwd=tmp_path
    ).splitlines()[-3:]

    assert note == "confirmed at attempt 1"
    # Orders are not there: their messages wait for another attempt.
    assert (waiting, reminders) == ("3", "1")
    assert "Dispatched" in relayed
    assert "Handled" in consumed
