"""The example's Dockerfile names files and extras that exist, and its commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def test_what_is_copied_and_installed_exists() -> None:
    copied = [
        name
        for line in re.findall(r"^COPY (.+)$", TEXT, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    extras = re.findall(r"\.\[(.+?)\]", TEXT)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text()

    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert [one for one in extras if f"\n{one} = [" not in project] == []


@pytest.mark.matrix
def test_its_commands_run_on_the_database_of_its_volume(tmp_path: Path) -> None:
    """The container runs `migrate` and `check` before its web server starts. Both
    succeed with a new database in the volume."""
    (program,) = re.findall(r"^ENTRYPOINT (.+)$", TEXT, re.MULTILINE)
    (url,) = re.findall(r"^ENV DATABASE_URL=(\S+)", TEXT, re.MULTILINE)
    manage = [sys.executable, *json.loads(program)[1:]]
    here = {
        "DATABASE_URL": url.replace("/data", str(tmp_path)),
        "DJANGO_SETTINGS_MODULE": "project.settings",  # not the one of these tests
        "PYTHONPATH": str(ROOT),
    }

    for command in ("migrate", "check"):
        subprocess.run(
            [*manage, command], cwd=ROOT, env=os.environ | here, check=True, timeout=120
        )

    assert (tmp_path / "shop.sqlite3").exists()
