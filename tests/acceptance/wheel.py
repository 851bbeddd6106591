"""The wheel in a new environment, as a user installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
#: What the wheel and Django need; all that the new environment gets beside the wheel.
LENT = ["Django", "cronsim", "asgiref", "sqlparse", "typing_extensions"]


def run(*command: str | Path, cwd: Path, warnings: str = "error") -> str:
    """Run a command in an environment that does not contain the checkout, and check
    that it succeeds."""
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


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it would be uploaded: built from the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out]
    # Our warnings are errors; those of the tools that pack and install are theirs.
    run(*build, CHECKOUT, cwd=out, warnings="default")
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has Django and the wheel."""
    return environment(tmp_path_factory.mktemp("environment"), wheel, LENT)


def environment(home: Path, wheel: Path, lent: Sequence[str]) -> Path:
    """Create an environment, and install the wheel there. For each package in `lent`,
    the new environment contains a link to the package that is installed in the
    environment of the tests. Return the path of the new environment's interpreter."""
    venv.create(home, symlinks=True)
    purelib = sysconfig.get_path("purelib", vars={"base": str(home)})
    for name in lent:
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (Path(purelib) / top).symlink_to(distribution(name).locate_file(top))
    interpreter = home / "bin" / "python"
    admin = home / "bin" / "django-admin"
    admin.write_text(
        f"#!{interpreter}\n"
        "from django.core.management import execute_from_command_line\n"
        "execute_from_command_line()\n"
    )
    admin.chmod(0o755)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install"]
    quietly = ["--no-deps", "--no-index", "--quiet"]
    run(*pip, *quietly, wheel, cwd=home, warnings="default")
    return interpreter
