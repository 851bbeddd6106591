"""The wheel works outside the checkout, with only its own dependencies and those of
Django."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.acceptance import plugged
from tests.acceptance.wheel import CHECKOUT, LENT, environment, run

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


def test_an_index_shows_the_readme_with_links_that_lead_somewhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        shown = archive.read(metadata).decode()

    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    for link in links:
        _, ours, path = link.partition("/django_txmsg/blob/main/")
        assert not ours or (CHECKOUT / path.partition("#")[0]).exists(), link


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


def test_pytest_finds_the_plugin_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """pytest finds the plugin by its entry point, in an environment with pytest and
    pytest-django."""
    testing = ["iniconfig", "packaging", "pluggy", "Pygments", "pytest"]
    stomp = ["docopt-ng", "stomp.py", "websocket-client"]
    lent = [*LENT, *testing, "pytest-django", *stomp]
    lent += ["exceptiongroup", "tomli"] * (sys.version_info < (3, 11))
    python = environment(tmp_path / "environment", wheel, lent)
    project = tmp_path / "project"
    plugged.write(
        project, test_shop=plugged.TEST_SHOP, test_brokers=plugged.TEST_BROKERS
    )

    said = run(python, "-m", "pytest", "-p", "no:cacheprovider", cwd=project)

    assert "14 passed" in said
