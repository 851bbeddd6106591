"""README and quickstart, executed literally with only the wheel installed, print what
they show, and succeed."""

from __future__ import annotations

import re
import signal
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
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


def order(typist: Typist) -> None:
    """Open the page in the browser, press its button, and load it until the order has
    been paid."""
    jar = urllib.request.HTTPCookieProcessor()
    browser = urllib.request.build_opener(jar, urllib.request.ProxyHandler({}))
    address = f"http://127.0.0.1:{typist.port}/"

    def page() -> str:
        with browser.open(address, timeout=30) as response:
            return str(response.read().decode())

    inputs = re.findall(r'name="(\w+)" value="(\w+)"', page())
    browser.open(address, urllib.parse.urlencode(inputs).encode(), timeout=30).close()
    wait_until(
        lambda: "<p>Order 1: paid" in page(),
        deadline=60,
        message=lambda: typist.said("python orders.py txmsg run"),
    )
    wait_until(typist.keeps_its_promises, deadline=60)


def test_the_readme_ends_in_an_order_that_is_paid(
    fresh_python: Path, tmp_path: Path
) -> None:
    with Typist(tmp_path, fresh_python.parent) as typist:
        typist.follow(ROOT / "README.md")

        order(typist)
        assert len(typist.running) == 2
        typist.run("python orders.py check --fail-level WARNING")
        # Ctrl-C ends it in good order.
        run = typist.running["python orders.py txmsg run"]
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 0
        assert "No relay is running" in typist.run("python orders.py message_status")


@pytest.mark.matrix
def test_quickstart_prints_what_it_shows(fresh_python: Path, tmp_path: Path) -> None:
    with Typist(tmp_path, fresh_python.parent) as typist:
        page, reloading = (
            ROOT / "docs" / "quickstart.md",
            "python manage.py txmsg run --reload",
        )
        typist.follow(page, until="## Part 3")
        # Otherwise the code of part 3 could run before the message's last attempt.
        wait_until(lambda: typist.keeps_its_promises(reloading), deadline=60)
        typist.follow(page, since="## Part 3")

        order(typist)
        assert len(typist.typed) >= 20
        typist.run("python manage.py check --fail-level WARNING")
        typist.restart(reloading)
        # What the page lets fail is repaired as it says.
        assert "9000 is more than" in typist.run("python manage.py dead_letters list")
        typist.run("python manage.py dead_letters redeliver --all")
        wait_until(
            lambda: "All is well." in typist.run("python manage.py message_status"),
            deadline=60,
            message=lambda: typist.run("python manage.py message_status"),
        )
        assert typist.run(f"python manage.py shell -v 0 -c '{LOOK}'") == "True\n"


def test_readme_and_quickstart_show_the_same_file() -> None:
    shown = [
        [block.code for block in blocks(page) if "# orders.py" in block.code]
        for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    ]
    assert shown[0] == shown[1] != []
