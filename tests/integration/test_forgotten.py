"""What somebody forgets to set up is said in the words of what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = """
SECRET_KEY = "for tests only"
USE_TZ = True
INSTALLED_APPS = {apps}
DATABASES = {{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{name}"}}
}}
"""
EVERYTHING = ["django.contrib.contenttypes", "django.contrib.auth", "django_txmsg"]


def django(tmp_path: Path, apps: list[str], *command: str) -> str:
    """Return what a command of a project with these settings says, well or ill."""
    name = tmp_path / "db.sqlite3"
    (tmp_path / "forgetful.py").write_text(SETTINGS.format(apps=apps, name=name))
    here = {
        "DJANGO_SETTINGS_MODULE": "forgetful",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "django", *command],
        env=os.environ | here, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "command",
    [
        ["relay"], ["relay", "--once"], ["consume", "--once"], ["message_status"],
        ["dead_letters", "list"], ["prune_messages"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_migrate(tmp_path: Path, command: list[str]) -> None:
    text = django(tmp_path, EVERYTHING, *command)

    assert "not in database 'default'. Run manage.py migrate." in text
    assert "Traceback" not in text


@pytest.mark.sqlite
def test_installed_apps(tmp_path: Path) -> None:
    code = "from django_txmsg import send_message"

    text = django(tmp_path, EVERYTHING[:-1], "shell", "-c", code)

    assert 'Add "django_txmsg" to INSTALLED_APPS' in text


@pytest.mark.sqlite
def test_a_module_named_stages(tmp_path: Path) -> None:
    django(tmp_path, EVERYTHING, "migrate")

    text = django(tmp_path, EVERYTHING, "consume", "--once")

    assert "Consuming: control messages only." in text
    assert "No stage is declared" in text
    assert "(APP/stages.py)" in text
