"""The wheel works outside the checkout, with Django and nothing else beside it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.acceptance.wheel import CHECKOUT, run

STORE_ONE = """
from django.db import transaction
from django_txmsg import send_message
from django_txmsg.models import OutboxMessage
with transaction.atomic():
    send_message("orders.place", {"number": 1})
import django_txmsg
print(django_txmsg.__file__)
print("stored", OutboxMessage.objects.count())
"""


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert inside == {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "django_txmsg").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(
    "pattern",
    [
        "django_txmsg/migrations/0001_initial.py",
        "django_txmsg/py.typed",
        "django_txmsg/static/django_txmsg/",
        "django_txmsg/templates/admin/django_txmsg/",
    ],
)
def test_the_wheel_holds_more_than_modules(wheel: Path, pattern: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.startswith(pattern) for name in archive.namelist())


def test_a_new_project_checks_migrates_and_stores_a_message(
    fresh_python: Path, tmp_path: Path
) -> None:
    run(fresh_python, "-m", "django", "startproject", "shop", ".", cwd=tmp_path)
    with (tmp_path / "shop" / "settings.py").open("a") as settings:
        settings.write('INSTALLED_APPS += ["django_txmsg"]\n')
        settings.write('TXMSG = {"SERVICE": "shop"}\n')
    manage = [fresh_python, tmp_path / "manage.py"]

    run(*manage, "check", "--fail-level", "WARNING", cwd=tmp_path)
    run(*manage, "makemigrations", "--check", "--dry-run", cwd=tmp_path)
    run(*manage, "migrate", "--verbosity", "0", cwd=tmp_path)
    output = run(*manage, "shell", "--no-imports", "-c", STORE_ONE, cwd=tmp_path)

    where, stored = output.splitlines()
    assert not Path(where).is_relative_to(CHECKOUT)
    assert stored == "stored 1"
