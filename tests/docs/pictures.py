"""Takes the pictures of the documentation: `python -m tests.docs.pictures`.

The example project runs, with its web server, relay and consumer. Customers order, some
payments fail, and an operator opens the pages. Each page's outline is stored beside its
picture, so that a test can tell when a page no longer matches the picture.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.acceptance.shop import environment, load_demo
from tests.admin.browser import PHONE, WIDE, Browser, browser
from tests.docs.outline import outline
from tests.docs.pages import ROOT

IMAGES = ROOT / "docs" / "images"
OUTLINES = IMAGES / "outlines.json"
ADMIN = "/admin/django_txmsg"
ITEMS = ("Bag of coffee", "Box of tea", "Pot of honey")

#: What a test cannot wait for: the orders are as if made in the course of a day.
A_DAY = """
import datetime as dt
from django.db.models import DateTimeField, F
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
numbers = sorted(set(OutboxMessage.objects.values_list("correlation_id", flat=True)))
dead = set(DeadLetter.objects.values_list("correlation_id", flat=True))
for place, number in enumerate(numbers):
    back = dt.timedelta(hours=22 * (place / len(numbers)) ** 1.6, minutes=place % 7)
    if number in dead:
        back = dt.timedelta(minutes=4 + 9 * (place % 11))
    ids = OutboxMessage.objects.filter(correlation_id=number).values("message_id")
    for rows in (
        Attempt.objects.filter(message_id__in=ids),
        *(
            model.objects.filter(correlation_id=number)
            for model in (DeadLetter, InboxMessage, OutboxMessage)
        ),
    ):
        instants = [
            field.name
            for field in rows.model._meta.get_fields()
            if isinstance(field, DateTimeField)
        ]
        rows.update(**{name: F(name) - back for name in instants})
"""
#: What it said of this machine, says something of the reader's.
ELSEWHERE = f"""
from django.db.models import F, Value
from django.db.models.functions import Replace
from django_txmsg.models import Attempt, DeadLetter
for model in (Attempt, DeadLetter):
    model.objects.update(
        traceback=Replace(F("traceback"), Value({str(ROOT)!r}), Value("/srv/shop"))
    )
"""
WRONG = """
from django.db import transaction
from django_txmsg import send_message
with transaction.atomic():
    for number in range(4):
        number = f"B-{number}"
        send_message("payments.charge", {"order": number},
                     headers={"correlation-id": number})
"""
PAUSED = """
from django_txmsg.models import StageState
StageState.objects.pause("orders.shipped", by="grace", why="moving the warehouse")
"""
FACTS = """
import json
from django_txmsg.models import DeadLetter, InboxMessage
letter = DeadLetter.objects.filter(exception__contains="bank").latest("created_at")
flow = InboxMessage.objects.filter(stage="shipping.ship").latest("processed_at")
print(json.dumps([letter.pk, str(letter.message_id), letter.fingerprint,
                  str(flow.message_id)]))
"""


def main() -> int:
    """Run the example project, and take every picture again."""
    demo = load_demo()
    with ExitStack() as stack:
        there = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = environment(
            DATABASE_URL=f"sqlite:///{there / 'shop.sqlite3'}",
            TXMSG_BROKER_URL="database://",
            DJANGO_SUPERUSER_PASSWORD="grace",
        )
        base, processes = _open_shop(demo, env, there, stack)
        _sell(demo, demo.Shop(base), env, processes)
        facts = json.loads(_shell(demo, env, FACTS))
        _photograph(stack.enter_context(browser(base)), *facts)
    return 0


def _open_shop(
    demo: Any, env: dict[str, str], there: Path, stack: ExitStack
) -> tuple[str, list[Any]]:
    demo.command(env, "migrate", "--verbosity", "0")
    demo.command(
        env, "createsuperuser", "--noinput", "--username", "grace",
        "--email", "grace@example.org",
    )  # fmt: skip
    port = demo.free_port()
    commands = {
        "web": ("runserver", "--noreload", f"127.0.0.1:{port}"),
        "relay": ("relay",),
        "consume": ("consume",),
    }
    processes = [
        stack.enter_context(demo.process(env, there, name, *arguments))
        for name, arguments in commands.items()
    ]
    return f"http://127.0.0.1:{port}", processes


def _sell(demo: Any, shop: Any, env: dict[str, str], processes: list[Any]) -> None:
    demo.wait(shop.answers, "the web server", processes)
    placed = [
        (shop.order(ITEMS[number % 3], 1 + number % 4, fails=number % 6 == 5), number)
        for number in range(54)
    ]
    _shell(demo, env, WRONG)
    for order, number in placed:
        demo.wait(
            lambda order=order, number=number: shop.over(order, number % 6 != 5),
            f"order {order}",
            processes,
        )
    last = ("--stage", "payments.charge", "--search", "B-3", "--json")
    demo.wait(
        lambda: json.loads(demo.command(env, "dead_letters", "list", *last)),
        "the wrong messages to die",
        processes,
    )
    _shell(demo, env, A_DAY)
    _shell(demo, env, ELSEWHERE)
    _shell(demo, env, PAUSED)
    groups = json.loads(demo.command(env, "dead_letters", "groups", "--json"))
    (wrong,) = (one for one in groups if one["exception"] == "amount: missing")
    demo.command(
        env, "dead_letters", "note", "--fingerprint", wrong["fingerprint"],
        "--text", "Sent by the old checkout, which is gone. Discard them.",
    )  # fmt: skip


def _shell(demo: Any, env: dict[str, str], code: str) -> str:
    said: str = demo.command(env, "shell", "-v", "0", "-c", code)
    return said


def _photograph(
    chromium: Browser, letter: int, message: str, fingerprint: str, flow: str
) -> None:
    outlines: dict[str, list[str]] = {}

    def take(name: str, path: str = "", then: Callable[[], None] | None = None) -> None:
        if path:
            chromium.open(ADMIN + path)
        chromium.find("#content h1, .txmsg-banner")
        if then is not None:
            then()
        outlines[name] = outline(chromium.driver.page_source)
        for dark in (False, True):
            chromium.look(dark=dark)
            chromium.photograph(IMAGES, f"{name}-dark" if dark else name)
        chromium.look()

    def edit() -> None:
        body = chromium.find("textarea[name=body]")
        text = body.get_property("value").replace('"fails": true', '"fails": false')
        chromium.driver.execute_script("arguments[0].value = arguments[1]", body, text)
        chromium.click("Show the difference")
        chromium.until("The difference")

    def work() -> None:
        chromium.find("input[name=rate]").send_keys("1")
        chromium.driver.execute_script(
            "document.querySelector('.txmsg-buttons button').click()"
        )
        chromium.until("Time left")

    chromium.look(size=WIDE)
    chromium.open("/admin/login/")
    chromium.find("input[name=username]").send_keys("grace")
    chromium.find("input[name=password]").send_keys("grace")
    chromium.find("input[type=submit]").click()
    group = f"/deadletter/confirm/?kind=redeliver&fingerprint={fingerprint}"
    take("overview", "/")
    chromium.look(size=PHONE)
    chromium.photograph(IMAGES, "overview-phone")
    chromium.look(size=WIDE)
    take("groups", "/deadletter/")
    take("message", f"/outboxmessage/{message}/")
    take("flow", f"/outboxmessage/{flow}/")
    take("stages", "/stagestate/")
    take("copy", f"/deadletter/{letter}/copy/", edit)
    take("discard", group.replace("redeliver", "discard"))
    take("confirm", group)
    take("bulk", "", work)
    OUTLINES.write_text(json.dumps(outlines, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
