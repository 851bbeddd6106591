"""The commands of README and quickstart succeed, and print what the pages show. They
run as shown, with only the wheel installed."""

from __future__ import annotations

import re
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.throwaway import Project
from tests.docs.typing import Typist
from tests.faults import wait_until

pytestmark = pytest.mark.timeout(300)

#: A user who has logged in reads the first line, and presses Redeliver.
PRESS = """
import re
from django.contrib.auth.models import User
from django.test import Client
client = Client(headers={"host": "localhost"})
client.force_login(User.objects.create_superuser("me"))
overview = client.get("/admin/django_txmsg/").content.decode()
print("1 dead letter</a>, the oldest " in overview)
address = "/admin/django_txmsg/deadletter/confirm/"
asked = client.get(address, {"kind": "redeliver", "ids": 2}).content.decode()
fields = re.findall("type=.hidden. name=.(.+?). value=.(.*?).>", asked)
answer = client.post(address, dict(fields), follow=True).content.decode()
print("Redelivered 1 message" in answer)
"""
LOOK = """
from django.contrib.auth.models import User
from django.test import Client
client = Client(headers={"host": "localhost"})
client.force_login(User.objects.get())
print("All is well." in client.get("/admin/django_txmsg/").content.decode())
"""


class Browser:
    """A browser at the page of `orders.py`."""

    def __init__(self, typist: Typist) -> None:
        jar = urllib.request.HTTPCookieProcessor()
        self._open = urllib.request.build_opener(
            jar, urllib.request.ProxyHandler({})
        ).open
        self._typist = typist

    def load(self, form: bytes | None = None) -> str:
        address = f"http://127.0.0.1:{self._typist.port}/"
        with self._open(address, form, timeout=30) as response:
            return str(response.read().decode())

    def order(self) -> str:
        """Submit the form, and return the next page."""
        inputs = re.findall(r'name="(\w+)" value="(\w+)"', self.load())
        return self.load(urllib.parse.urlencode(inputs).encode())

    def load_until(self, text: str) -> None:
        """Load the page repeatedly until it shows a text."""
        wait_until(
            lambda: text in self.load(),
            deadline=60,
            message=lambda: self._typist.said("python orders.py txmsg run"),
        )


def test_the_readme_ends_in_an_order_that_is_paid(
    fresh_python: Path, tmp_path: Path
) -> None:
    with Typist(tmp_path, fresh_python.parent) as typist:
        typist.follow(ROOT / "README.md")
        browser, run = Browser(typist), "python orders.py txmsg run"

        assert "<p>Order 1: " in browser.order()
        browser.load_until("<p>Order 1: paid")
        wait_until(typist.keeps_its_promises, deadline=60)
        typist.run("python orders.py check --fail-level WARNING")
        typist.interrupt(run)
        assert "No relay is running" in typist.run("python orders.py message_status")
        # Stopped, ordered again, started: nothing is lost, nothing is charged twice.
        assert "<p>Order 2: new" in browser.order()
        typist.start(run)
        browser.load_until("<p>Order 2: paid")
        assert typist.said(run).count("payments.charge: processed in") == 1


@pytest.mark.matrix
def test_quickstart_prints_what_it_shows(fresh_python: Path, tmp_path: Path) -> None:
    with Typist(tmp_path, fresh_python.parent) as typist:
        page, reloading = (
            ROOT / "docs" / "quickstart.md",
            "python manage.py txmsg run --reload",
        )
        typist.follow(page, until="## Part 3")
        wait_until(lambda: typist.keeps_its_promises(reloading), deadline=60)
        shown = typist.run("python manage.py dead_letters show 1")
        assert "txmsg-id" in shown
        assert '"order": "A-2"' in shown
        assert "in charge\n" in shown
        # The limit is raised: the process starts again, and the button mends the rest.
        stages = tmp_path / "shop" / "stages.py"
        stages.write_text(stages.read_text().replace("5000", "50000"))
        wait_until(lambda: typist.said(reloading).count("Running: ") == 2, deadline=60)
        assert typist.run(f"python manage.py shell -v 0 -c '{PRESS}'") == "True\nTrue\n"
        wait_until(
            lambda: "All is well." in typist.run("python manage.py message_status"),
            deadline=60,
            message=lambda: typist.said(reloading),
        )
        assert typist.run(f"python manage.py shell -v 0 -c '{LOOK}'") == "True\n"
        typist.interrupt(reloading)
        typist.follow(page, since="## Part 3")

        browser = Browser(typist)
        browser.order()
        browser.load_until("<p>Order 1: paid")
        assert len(typist.typed) >= 20
        typist.run("python manage.py check --fail-level WARNING")


@pytest.mark.matrix
def test_the_page_on_installation_works_as_typed(
    fresh_python: Path, tmp_path: Path
) -> None:
    """The commands of the page on installation succeed in a project that already
    exists."""
    page, run = ROOT / "docs" / "how-to" / "install.md", "python manage.py txmsg run"
    Project(tmp_path).follow(page)
    with Typist(tmp_path, fresh_python.parent) as typist:
        said = typist.follow(page)

        # What the page has added is not proposed again; this project is on SQLite.
        assert re.findall(r"^\d\. (.+)", said["python manage.py txmsg init"], re.M) == [
            "Let SQLite's writers wait for each other, in settings.py",
            "Make the tables, and try what you have",
            "Run it beside your web server",
        ]
        assert (
            "Everything that was tried works." in said["python manage.py txmsg doctor"]
        )
        place = "from shop.orders import place; place(7)"
        typist.run(f"python manage.py shell -v 0 -c '{place}'")
        wait_until(lambda: "Charging order 7" in typist.said(run), deadline=60)
        apps = "from django.apps import apps; print(apps.get_app_config"
        name = typist.run(
            f"""python manage.py shell -v 0 -c '{apps}("django_txmsg").verbose_name)'"""
        )
        assert f"under *{name.strip()}*" in page.read_text()
        typist.interrupt(run)


def test_readme_and_quickstart_show_the_same_file() -> None:
    shown = [
        [block.code for block in blocks(page) if "# orders.py" in block.code]
        for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    ]
    assert shown[0] == shown[1] != []
