"""README and quickstart, typed to the letter where nothing but the wheel is installed,
print what they say, and end well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.typing import Typist
from tests.faults import wait_until

pytestmark = pytest.mark.timeout(300)

#: What somebody sees who has logged in.
LOOK = """
from django.contrib.auth.models import User
from django.test import Client
client = Client(headers={"host": "localhost"})
client.force_login(User.objects.create_superuser("me"))
print("All is well." in client.get("/admin/django_txmsg/").content.decode())
"""


def test_the_readme_prints_what_it_says(fresh_python: Path, tmp_path: Path) -> None:
    with Typist(tmp_path, fresh_python.parent) as typist:
        typist.follow(ROOT / "README.md")

        assert len(typist.typed) >= 5
        typist.run("python manage.py check --fail-level WARNING")
        assert "No relay is running" in typist.run("python manage.py message_status")


def test_the_quickstart_ends_without_an_alarm(
    fresh_python: Path, tmp_path: Path
) -> None:
    with Typist(tmp_path, fresh_python.parent) as typist:
        typist.follow(ROOT / "docs" / "quickstart.md")

        assert len(typist.typed) >= 12
        assert {one.split()[-1] for one in typist.running} == {"consume", "relay"}
        typist.run("python manage.py check --fail-level WARNING")
        wait_until(
            lambda: "All is well." in typist.run("python manage.py message_status"),
            deadline=60,
            message=lambda: typist.run("python manage.py message_status"),
        )
        assert typist.run(f"python manage.py shell -v 0 -c '{LOOK}'") == "True\n"
