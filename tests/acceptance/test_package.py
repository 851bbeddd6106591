"""The wheel works outside the checkout, with Django and nothing else beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
#: What Django itself needs; all that the new environment gets beside the wheel.
LENT = ["Django", "asgiref", "sqlparse", "typing_extensions"]

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


def run(*command: str | Path, cwd: Path, warnings: str = "error") -> str:
    """Run a command that has to succeed, without a word of the checkout around it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DJANGO_", "PYTHON", "TXMSG_"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "PYTHONWARNINGS": warnings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as an index would get it."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out]
    # Our warnings are errors; those of the tools that pack and install are theirs.
    run(*build, CHECKOUT, cwd=out, warnings="default")
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has Django and the wheel."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    purelib = sysconfig.get_path("purelib", vars={"base": str(home)})
    for name in LENT:
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {".."}:
            (Path(purelib) / top).symlink_to(distribution(name).locate_file(top))
    interpreter = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install"]
    quietly = ["--no-deps", "--no-index", "--quiet"]
    run(*pip, *quietly, wheel, cwd=home, warnings="default")
    return interpreter


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
    python: Path, tmp_path: Path
) -> None:
    run(python, "-m", "django", "startproject", "shop", ".", cwd=tmp_path)
    with (tmp_path / "shop" / "settings.py").open("a") as settings:
        settings.write('INSTALLED_APPS += ["django_txmsg"]\n')
        settings.write('TXMSG = {"SERVICE": "shop"}\n')
    manage = [python, tmp_path / "manage.py"]

    run(*manage, "check", "--fail-level", "WARNING", cwd=tmp_path)
    run(*manage, "makemigrations", "--check", "--dry-run", cwd=tmp_path)
    run(*manage, "migrate", "--verbosity", "0", cwd=tmp_path)
    output = run(*manage, "shell", "--no-imports", "-c", STORE_ONE, cwd=tmp_path)

    where, stored = output.splitlines()
    assert not Path(where).is_relative_to(CHECKOUT)
    assert stored == "stored 1"
