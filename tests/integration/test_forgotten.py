"""If a set-up step was forgotten, the error says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

from django_txmsg import send_message
from django_txmsg.errors import TransactionRequired
from tests.running import declared

SETTINGS = """
SECRET_KEY = "for tests only"
USE_TZ = True
INSTALLED_APPS = {apps}
DATABASES = {{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{name}"}}
}}
"""
SERVED = """
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
settings.MIDDLEWARE = ["django_txmsg.middleware.OutboxMiddleware"]
WSGIHandler()
"""
HANDLER = """
from django_txmsg import stage

@stage("orders.place")
def place(message):
    pass
"""
EVERYTHING = ["django.contrib.contenttypes", "django.contrib.auth", "django_txmsg"]


def django(tmp_path: Path, apps: list[str], *command: str) -> str:
    """Run a command of a project with these apps. Return its output, even if the
    command fails."""
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
def test_without_tables_a_command_asks_for_migrate(
    tmp_path: Path, command: list[str]
) -> None:
    text = django(tmp_path, EVERYTHING, *command)

    assert "not in database 'default'. Run manage.py migrate." in text
    assert "Traceback" not in text


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "code",
    [
        "from django_txmsg import send_message",
        "from django_txmsg.models import DeadLetter",
        "import django_txmsg.middleware",
        "import django_txmsg.urls",
    ],
)
def test_an_import_without_the_app_asks_for_installed_apps(
    tmp_path: Path, code: str
) -> None:
    text = django(tmp_path, EVERYTHING[:-1], "shell", "-c", code)

    assert text.splitlines()[-1].endswith(': Add "django_txmsg" to INSTALLED_APPS.')


@pytest.mark.sqlite
def test_middleware_without_the_app_asks_for_installed_apps(tmp_path: Path) -> None:
    with (tmp_path / "served.py").open("w") as file:
        file.write(SERVED)

    text = django(tmp_path, EVERYTHING[:-1], "shell", "-c", "import served")

    assert text.splitlines()[-1].endswith(': Add "django_txmsg" to INSTALLED_APPS.')


def test_a_send_outside_a_transaction_names_the_middleware() -> None:
    with pytest.raises(TransactionRequired) as raised:
        send_message("orders.place", {})

    assert "add django_txmsg.middleware.OutboxMiddleware to MIDDLEWARE" in str(
        raised.value
    )


@pytest.mark.sqlite
@pytest.mark.parametrize("name", ["stage", "handlers"])
def test_check_names_a_module_of_stages_that_is_not_imported(
    name: str, tmp_path: Path
) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    module = shop / f"{name}.py"
    module.write_text(HANDLER)

    text = django(tmp_path, [*EVERYTHING, "shop"], "check")

    assert f"The stages in shop.{name} are not found" in text
    assert f"Rename the module `{name}` to `stages`." in text

    (shop / "stages.py").touch()
    text = django(tmp_path, [*EVERYTHING, "shop"], "check")
    assert f"The stages in shop.{name} are not found" in text
    assert "Import it in shop.stages." in text

    (shop / "stages.py").write_text(f"from . import {name}\n")
    assert "no issues" in django(tmp_path, [*EVERYTHING, "shop"], "check")

    (shop / "stages.py").unlink()
    module.write_text("# The theatre's.\n@stage('left')\ndef enter(): pass\n")
    assert "no issues" in django(tmp_path, [*EVERYTHING, "shop"], "check")


@pytest.mark.sqlite
def test_check_names_a_module_in_a_package_that_is_not_imported(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    for folder in ("stages", "work", "tests", "inner"):
        (shop / folder).mkdir(parents=True)
        (shop / folder / "__init__.py").touch()
        (shop / folder / "orders.py").write_text(HANDLER)
    (shop / "__init__.py").touch()

    text = django(tmp_path, [*EVERYTHING, "shop", "shop.inner"], "check")

    for name in ("stages", "work", "inner"):
        assert text.count(f"The stages in shop.{name}.orders are not found") == 1
    assert text.count("are not found") == 3
    assert text.count("Import it in shop.stages.") == 2


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("mistake", "line", "said"),
    [
        (
            HANDLER.replace('place")', 'place", retries=3)'),
            '@stage("orders.place", retries=3)',
            "Write redelivery=RedeliveryPolicy(max_redeliveries=3).",
        ),
        pytest.param(
            "import shop.orders", "import anvil", "No module named 'anvil'",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "def place(:", "def place(:", "SyntaxError: invalid syntax",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["a stage", "an import", "syntax"],
)  # fmt: skip
def test_a_mistake_in_a_module_of_stages_is_reported_in_a_few_lines(
    mistake: str, line: str, said: str, tmp_path: Path
) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "orders.py").write_text("import anvil")
    (shop / "stages.py").write_text(mistake)

    told = django(tmp_path, [*EVERYTHING, "shop"], "check")

    assert line in told
    assert said in told
    assert len(told.splitlines()) <= 8
    assert "Traceback" not in told


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("command", "whole"),
    [("check --traceback", True), ("runserver --noreload", False)],
)
def test_traceback_of_a_mistake_in_a_module_of_stages(
    command: str, whole: bool, tmp_path: Path
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "stages.py").write_text("import anvil")

    told = django(tmp_path, [*EVERYTHING, "shop"], *command.split())

    assert ("Traceback (most recent call last)" in told) is whole
    assert "No module named 'anvil'\n" in told


@pytest.mark.sqlite
@pytest.mark.django_db
def test_status_names_the_commands_of_processes_that_do_not_run() -> None:
    with declared(print, "mails.confirm"):
        said = StringIO()
        call_command("message_status", stdout=said)

    assert "No consumer is running." in said.getvalue()
    assert "start manage.py consume" in said.getvalue()
    assert "No relay is running." in said.getvalue()
    assert "start manage.py relay" in said.getvalue()


@pytest.mark.sqlite
def test_consume_without_stages_says_where_to_declare_them(tmp_path: Path) -> None:
    django(tmp_path, EVERYTHING, "migrate")

    text = django(tmp_path, EVERYTHING, "consume", "--once")

    assert "Consuming: control messages only." in text
    assert "No stage is declared" in text
    assert "(APP/stages.py)" in text
