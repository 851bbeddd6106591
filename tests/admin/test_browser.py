"""An operator uses the pages in a real browser. The tests check what Django's test
client cannot check."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from selenium.webdriver.common.by import By

from django_txmsg import every, stages
from django_txmsg.dead_letters import bulk
from django_txmsg.models import BulkOperation, DeadLetter, OutboxMessage
from django_txmsg.testing import drain
from tests import factories
from tests.faults import ManageProcess
from tests.forgetting import forget_recurring
from tests.running import txmsg
from tests.trips import trips, waiting

from . import shop
from .browser import PHONE, WIDE, Browser, browser, missing

#: Once is enough: the database is no matter for what a browser shows.
pytestmark = [pytest.mark.sqlite, pytest.mark.timeout(300)]

#: The pages by the names of their pictures.
NAMES = {
    "/admin/django_txmsg/": "overview",
    "/admin/django_txmsg/outboxmessage/": "outbox",
    "/admin/django_txmsg/inboxmessage/?state=redelivering": "inbox",
    "/admin/django_txmsg/deadletter/": "groups",
    "/admin/django_txmsg/deadletter/?resolution=open": "dead-letters",
    "/admin/django_txmsg/deadletter/confirm/?kind=redeliver&stage=shipping.send": (
        "confirm"
    ),
    "/admin/django_txmsg/deadletter/affected/?stage=shipping.send": "affected",
    "/admin/django_txmsg/worker/": "workers",
    "/admin/django_txmsg/worker/running/": "running",
    "/admin/django_txmsg/stagestate/": "stages",
    "/admin/django_txmsg/bulkoperation/": "bulk-operations",
    "/admin/django_txmsg/alert/": "alerts",
    "/admin/django_txmsg/auditentry/": "audit",
    "/admin/django_txmsg/auditentry/may-i/": "may-i",
    "/admin/django_txmsg/auditentry/changes/": "changes",
}


#: What must be readable for weak eyes, and links that stand within a text.
READ = ".txmsg-badge, .txmsg-banner a:not(.button), .txmsg .bad"
IN_TEXT = ".txmsg p a:not(.button), .txmsg-updated a, .breadcrumbs a"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser that all tests of this file share."""
    absent = missing()
    if absent and os.environ.get("CI") == "true":
        pytest.fail(absent)
    if absent:
        pytest.skip(absent)
    with browser("") as started:
        yield started


@pytest.fixture
def walker(chromium: Browser, live_server: Any) -> Browser:
    """The browser, logged in as a user with all permissions."""
    user = User.objects.create_superuser("grace")
    client = Client()
    client.force_login(user)
    there = Browser(chromium.driver, live_server.url)
    there.look()
    there.open("/admin/login/")
    there.driver.add_cookie(
        {
            "name": settings.SESSION_COOKIE_NAME,
            "value": client.cookies[settings.SESSION_COOKIE_NAME].value,
            "path": "/",
        }
    )
    there.errors()
    return there


@pytest.fixture
def shop_stages() -> Iterator[None]:
    """Declare the shop's stages."""
    for stage in shop.STAGES:
        stages.register(stage)
    yield
    for stage in shop.STAGES:
        stages.unregister(stage.name)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The directory for screenshots: `TXMSG_SCREENSHOTS` if it is set, else a temporary
    one."""
    return Path(os.environ.get("TXMSG_SCREENSHOTS") or tmp_path)


def test_a_run_is_readable_in_light_dark_and_on_a_phone(
    walker: Browser, pictures: Path
) -> None:
    with txmsg(), trips():
        run = waiting()
        said = call_command(
            "txmsg", "flows", "go-back", str(run.run_id), "--to", "booked",
            stdout=StringIO(),
        )  # fmt: skip
        assert said is None
        drain()
        for dark, size, name in (
            (False, WIDE, "run"),
            (True, WIDE, "run-dark"),
            (False, PHONE, "run-phone"),
            (True, PHONE, "run-phone-dark"),
        ):
            walker.look(dark=dark, size=size)
            for path, shows in (
                ("?flow=acts.trip&step=approved", f"{name}s"),
                ("go-back/?flow=acts.trip&step=approved", f"{name}s-back"),
                (f"{run.pk}/change/", name),
            ):
                walker.open(f"/admin/django_txmsg/run/{path}")
                assert not walker.overflows(), (path, name)
                assert walker.errors() == []
                walker.photograph(pictures, shows)
            drawing = walker.find("svg.txmsg-sequence")
            letters = drawing.find_elements(By.CSS_SELECTOR, "text")
            assert min(one.size["height"] for one in letters) > 9
            assert drawing.find_elements(By.CSS_SELECTOR, ".left")
        walker.find("details:first-of-type summary").click()
        walker.driver.find_element(By.NAME, "value").send_keys("true")
        walker.driver.find_element(By.CSS_SELECTOR, "details[open] button").click()
        walker.until("Resumed run")
        drain()
        walker.open(f"/admin/django_txmsg/run/{run.pk}/change/")
        assert "answered" in walker.text
        waiting("A-2")
        walker.open("/admin/django_txmsg/run/?flow=acts.trip&step=approved")
        walker.find(".object-tools a").click()
        walker.until("Send 1 run back")
        walker.find(".txmsg-buttons button").click()
        walker.until("of 1 run,")
        bulk.finish(BulkOperation.objects.get())
        walker.until("done")


@pytest.mark.usefixtures("shop_stages")
def test_every_page_in_light_dark_and_at_phone_width(
    walker: Browser, pictures: Path, settings: Any
) -> None:
    settings.TXMSG = {**settings.TXMSG, "TENANT_HEADER": "tenant"}
    shop.open_shop()
    letter = shop.trouble()
    shop.audited()
    message = f"/admin/django_txmsg/outboxmessage/{letter.message_id}/"
    flow = OutboxMessage.objects.filter(destination="payments.charge").first()
    assert flow is not None
    looks = (("", False, WIDE), ("-dark", True, WIDE), ("-phone", False, PHONE))
    for path in (
        *NAMES,
        message,
        f"/admin/django_txmsg/outboxmessage/{flow.message_id}/",
    ):
        for suffix, dark, size in looks:
            walker.look(dark=dark, size=size)
            walker.open(path)
            heading = walker.find("#content h1, .txmsg-banner").text
            assert heading, path
            assert not walker.overflows(), f"{path} scrolls sideways{suffix}"
            assert walker.errors() == [], path
            assert walker.unreadable() == [], path
            for text in walker.driver.find_elements(By.CSS_SELECTOR, READ)[:40]:
                assert walker.contrast(text) >= 4.5, f"{path}{suffix}: {text.text}"
            for link in walker.driver.find_elements(By.CSS_SELECTOR, IN_TEXT):
                line = link.value_of_css_property("text-decoration-line")
                assert line == "underline", f"{path}: {link.text}"
            name = NAMES.get(path, "message" if path == message else "flow")
            walker.photograph(pictures, f"{name}{suffix}")


@pytest.mark.parametrize(
    "dark",
    [
        pytest.param(False, id="light"),
        pytest.param(True, id="dark", marks=pytest.mark.matrix),
    ],
)
def test_every_button_can_be_read(
    walker: Browser, pictures: Path, settings: Any, dark: bool
) -> None:
    settings.TXMSG = {**settings.TXMSG, "EDIT_DEAD_LETTERS": True}
    letter = shop.trouble(failed_orders=3)
    gone = factories.DeadLetterFactory(discarded=True)
    operation = factories.BulkOperationFactory()
    factories.StageStateFactory(stage="shipping.send")
    page = "/admin/django_txmsg/deadletter"
    walker.look(dark=dark)
    for path in (
        f"{page}/",
        f"{page}/confirm/?kind=discard",
        f"{page}/confirm/?kind=redeliver",
        f"{page}/confirm/?kind=restore",
        f"{page}/{letter.pk}/copy/",
        f"/admin/django_txmsg/outboxmessage/{letter.message_id}/",
        f"/admin/django_txmsg/outboxmessage/{gone.message_id}/",
        f"/admin/django_txmsg/bulkoperation/{operation.pk}/change/",
        "/admin/django_txmsg/stagestate/",
    ):
        walker.open(path)
        walker.find("#content h1")
        buttons = walker.driver.find_elements(
            By.CSS_SELECTOR, ".txmsg :is(button, .button, .txmsg-badge)"
        )
        assert buttons, path
        for button in buttons:
            if button.is_displayed() and button.is_enabled():
                assert walker.contrast(button) >= 4.5, f"{button.text!r} at {path}"
        if "discard" in path:
            name = "discard-dark" if dark else "discard"
            walker.photograph(pictures, name)


@pytest.mark.usefixtures("shop_stages")
def test_a_stage_can_be_paused_on_a_phone(walker: Browser) -> None:
    walker.look(size=PHONE)
    walker.open("/admin/django_txmsg/stagestate/")
    walker.find("#content h1")
    edges = walker.driver.execute_script(
        "return [...document.querySelectorAll('.act button')].map("
        "(one) => one.getBoundingClientRect().right)"
    )
    assert len(edges) >= len(shop.STAGES)
    assert all(edge <= PHONE[0] for edge in edges)
    assert walker.torn("th[scope=row] > a") == []
    walker.find(".act input[name=why]").send_keys("The oven is cold")
    walker.find(".act button").click()
    walker.until(": The oven is cold")
    walker.look()


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_each_label_of_a_recurring_message_stands_with_its_field(
    walker: Browser, pictures: Path, size: tuple[int, int]
) -> None:
    every("0 3 * * *", "reports.nightly", {})
    try:
        walker.look(size=size)
        walker.open("/admin/django_txmsg/schedule/")
        walker.find("label input")
        walker.photograph(pictures, f"schedule-{size[0]}")
        assert walker.torn("label") == []
        assert not walker.overflows()
    finally:
        forget_recurring("reports.nightly")
        walker.look()


def test_no_page_shows_the_side_bar_of_django_on_a_laptop(walker: Browser) -> None:
    for page in "outboxmessage", "stagestate", "schedule", "auditentry/changes":
        walker.open(f"/admin/django_txmsg/{page}/")
        walker.find("#content h1")
        bars = walker.driver.find_elements(By.ID, "nav-sidebar")
        assert [one.is_displayed() for one in bars] == [False], page


def test_long_words_fit_a_phone(walker: Browser, pictures: Path) -> None:
    word = "shop.integrations.carriers.OutOfStock" * 4
    letter = factories.DeadLetterFactory(exception=word, stage="s" * 200)
    factories.OutboxMessageFactory(destination="d" * 200)
    operation = factories.BulkOperationFactory(filter={"stage": "s" * 200})
    walker.look(size=PHONE)
    for path in (
        "",
        "deadletter/",
        "deadletter/confirm/?kind=discard",
        f"outboxmessage/{letter.message_id}/",
        f"bulkoperation/{operation.pk}/change/",
        "stagestate/",
    ):
        walker.open(f"/admin/django_txmsg/{path}")
        walker.find("#content h1")
        name = path.partition("/")[0] or "overview"
        walker.photograph(pictures, f"long-{name}")
        assert not walker.overflows(), path
    walker.look()


def test_the_overview_keeps_itself_up_to_date(walker: Browser) -> None:
    factories.WorkerFactory(kind="relay", stages=[])
    walker.open("/admin/django_txmsg/")
    walker.until("All is well.")
    walker.click("keep up to date")
    walker.until("live, stop")

    factories.DeadLetterFactory()

    walker.until("1 dead letter")
    assert walker.errors() == []


def test_time_of_a_renewal_is_in_the_zone_of_the_project(walker: Browser) -> None:
    factories.WorkerFactory(kind="relay", stages=[])
    command = walker.driver.execute_cdp_cmd
    command("Emulation.setTimezoneOverride", {"timezoneId": "Pacific/Kiritimati"})
    try:
        walker.open("/admin/django_txmsg/?live")
        walker.until("All is well.")
        factories.DeadLetterFactory()
        walker.until("1 dead letter")
        walker.until("As of ")
        shown = walker.find("[data-txmsg-updated]").text.removeprefix("As of ")
    finally:
        command("Emulation.setTimezoneOverride", {"timezoneId": ""})
    here = timezone.localtime()
    hours = {f"{here - dt.timedelta(minutes=one):%H:%M}" for one in range(5)}
    assert shown[:5] in hours


def test_a_page_says_when_it_is_not_renewed_any_more(
    walker: Browser, pictures: Path
) -> None:
    """The user is logged out, or the server is down. The page shows that its figures
    are old, and why."""
    walker.open("/admin/django_txmsg/?live")
    walker.until("As of ")
    name = settings.SESSION_COOKIE_NAME
    cookie = walker.driver.get_cookie(name)

    walker.driver.delete_cookie(name)
    walker.until("Not renewed since ")
    walker.until("you are logged out")
    walker.photograph(pictures, "not-renewed")
    walker.driver.add_cookie(cookie)
    walker.until("As of ")
    assert "Not renewed" not in walker.text

    command = walker.driver.execute_cdp_cmd
    command("Network.enable", {})
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    command("Network.emulateNetworkConditions", {"offline": True, **network})
    try:
        walker.until("the server does not answer")
    finally:
        command("Network.emulateNetworkConditions", {"offline": False, **network})
    walker.until("As of ")
    walker.errors()


def test_from_a_group_to_an_edited_copy(
    walker: Browser, pictures: Path, settings: Any
) -> None:
    settings.TXMSG = {**settings.TXMSG, "EDIT_DEAD_LETTERS": True}
    letter = shop.trouble(failed_orders=3)

    walker.open("/admin/django_txmsg/")
    walker.click("dead letters")
    walker.until("ReadTimeout")
    walker.click("requests.exceptions.ReadTimeout")
    walker.open(f"/admin/django_txmsg/outboxmessage/{letter.message_id}/")
    walker.until("Ada Lovelace")
    walker.click("Redeliver a copy")
    body = walker.find("textarea[name=body]")
    edited = body.get_property("value").replace("Ada Lovelace", "Ada King")
    assert "Ada King" in edited
    walker.driver.execute_script("arguments[0].value = arguments[1]", body, edited)
    walker.click("Show the difference")
    walker.until("Send the copy")
    assert "Ada King" in walker.find(".diff-added").text
    assert "Ada Lovelace" in walker.find(".diff-removed").text
    walker.photograph(pictures, "copy")
    walker.click("Send the copy")
    walker.until("A copy was stored")

    letter.refresh_from_db()
    copy = OutboxMessage.objects.get(message_id=letter.replaced_by)
    assert b"Ada King" in bytes(copy.body)
    assert copy.message_id != letter.message_id
    assert letter.resolution == "replaced"
    assert walker.errors() == []


def test_a_bulk_redelivery_of_2000_is_watched_to_its_end(
    walker: Browser, pictures: Path, manage: Callable[..., ManageProcess]
) -> None:
    factories.DeadLetterFactory.create_batch(2000, fingerprint=shop.NO_STOCK[2])

    walker.open("/admin/django_txmsg/deadletter/")
    walker.click("Redeliver 2,000")
    walker.until("Redeliver 2,000 messages?")
    walker.find("input[name=rate]").send_keys("800")
    walker.click("Redeliver 2,000 messages")
    walker.until("0 of 2,000")
    consumer = manage("consume", txmsg={"DISPATCH_ON_COMMIT": "off"})
    walker.until("Time left", deadline=60)
    walker.photograph(pictures, "bulk")
    walker.click("Pause")
    walker.until("paused")
    operation = BulkOperation.objects.get()
    assert operation.state == "paused"
    walker.click("Resume")
    walker.until("2,000 of 2,000 messages, 100 %", deadline=90)
    walker.until("done")

    assert OutboxMessage.objects.count() == 2000
    assert OutboxMessage.objects.values("message_id").distinct().count() == 2000
    assert not DeadLetter.objects.exclude(resolution="redelivered").exists()
    assert walker.errors() == []
    consumer.close()
