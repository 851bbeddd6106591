"""The page *What changed* shows versions, actions of operators and new errors on one
time line."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib import admin
from django.db import OperationalError, connections
from django.test import Client, override_settings
from django.urls import path

from django_txmsg.admin import changes
from django_txmsg.admin.audit import AuditAdmin
from django_txmsg.models import AuditEntry, Worker
from django_txmsg.models.monitoring import Deed
from django_txmsg.monitoring.presence import Presence
from tests import factories
from tests.running import declared, txmsg

pytestmark = pytest.mark.django_db(databases=["default", "other"])

PAGE = "/admin/django_txmsg/auditentry/changes/"


def begin(version: str, *, minutes: float = 0, service: str = "shop") -> None:
    """Record that a process of this version began `minutes` ago."""
    with txmsg(VERSION=version, SERVICE=service):
        Presence("consumer", "default", ["mail.send"]).beat(0)
    newest = AuditEntry.objects.order_by("-pk")[:1].values_list("pk", flat=True)
    AuditEntry.objects.filter(pk__in=list(newest)).update(
        at=factories.ago(minutes=minutes)
    )


def act(deed: Deed, text: str, *, using: str = "default", **ago: float) -> None:
    entries = AuditEntry.objects.db_manager(using)
    entries.record("grace", text, deed=deed)
    entries.filter(text=text).update(at=factories.ago(**ago))


def die(error: str, *, using: str = "default", **ago: float) -> None:
    """Store a dead letter with this error, buried some time ago."""
    factories.DeadLetterFactory.build(
        exception=f"{error}: x",
        fingerprint=error.lower(),
        created_at=factories.ago(**ago),
    ).save(using=using)


def elsewhere() -> Any:
    """Declare a stage in the other database for the duration of the block."""
    return declared(lambda message: None, "elsewhere", using="other")


def shown(client: Client) -> list[str]:
    """Return the texts of the changes on the page, in their order."""
    page = client.get(PAGE).content.decode()
    return [
        " ".join(html.unescape(re.sub(r"<[^>]*>", " ", one)).split())
        for one in re.findall(r'<li class="txmsg-\w+">(.*?)</li>', page, re.DOTALL)
    ]


def test_every_change_has_its_time_and_an_error_the_version_before_it(
    admin_client: Client,
) -> None:
    die("Before", minutes=91)
    begin("4f2a", minutes=90)
    die("OutOfStock", minutes=89, seconds=20)
    act(Deed.PAUSE, "Paused stage mail.send: too many.", minutes=80)
    die("Late", minutes=29)

    late, paused, new, version, before = shown(admin_client)

    assert "First death: Late: x orders.place 29 min" in late
    assert "after: Version" not in late  # it began more than an hour after
    assert "Paused stage mail.send: too many. grace" in paused
    assert "First death: OutOfStock: x" in new
    assert "40 s after: Version 4f2a began on" in new
    assert "Version 4f2a began on" in version
    assert "service: shop" in version
    assert "after: Version" not in before


def test_the_nearest_version_is_named() -> None:
    begin("1", minutes=50)
    begin("2", minutes=40)
    begin("3", minutes=10)
    die("OutOfStock", minutes=39)
    found = changes.read("default", ("version", "action", "error"))

    changes.explain(found)

    (error,) = [one for one in found if one.kind == changes.ERROR]
    assert "Version 2 began" in error.after


def test_an_error_is_new_only_if_no_dead_letter_of_it_is_older(
    admin_client: Client,
) -> None:
    die("Known", hours=30)
    factories.DeadLetterFactory(
        discarded=True, fingerprint="resolved", created_at=factories.ago(hours=25)
    )
    for minutes in (5, 60, 20):
        die("Known", minutes=minutes)
        die("Resolved", minutes=minutes)
        die("New", minutes=minutes)

    (only,) = shown(admin_client)

    assert "First death: New: x orders.place 1 h ago" in only


def test_a_redelivered_message_that_died_again_is_no_first_death(
    admin_client: Client,
) -> None:
    factories.DeadLetterFactory(deaths=2)

    (only,) = shown(admin_client)

    assert "Died again: ValueError: no stock" in only


def test_a_version_is_recorded_when_it_replaces_another() -> None:
    for version in ("1", "1", "2", "2", "1", ""):
        begin(version)
    begin("1", service="mail")

    found = AuditEntry.objects.order_by("pk").values_list("by", "text")

    assert [(by, text.partition(" on ")[0]) for by, text in found] == [
        ("service: shop", "Version 1 began"),
        ("service: shop", "Version 2 began"),
        ("service: shop", "Version 1 began"),
        ("service: mail", "Version 1 began"),
    ]


@pytest.mark.django_db(transaction=True)
def test_processes_that_start_at_once_record_their_version_once() -> None:
    together = threading.Barrier(6)

    def start() -> None:
        try:
            presence = Presence("consumer", "default", ["mail.send"])
            together.wait(30)
            presence.beat(0)
        finally:
            connections["default"].close()

    with txmsg(VERSION="4f2a"), ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: start(), range(6)))

    assert Worker.objects.count() == 6
    assert AuditEntry.objects.filter(deed=Deed.DEPLOY).count() == 1


def test_a_process_whose_row_was_deleted_does_not_begin_again() -> None:
    with txmsg(VERSION="1", SERVICE="shop"):
        old = Presence("consumer", "default", ["mail.send"])
        old.beat(0)
        begin("2")
        Worker.objects.all().delete()
        old.beat(0)

    assert AuditEntry.objects.filter(deed=Deed.DEPLOY).count() == 2


def test_a_version_that_begins_as_another_is_a_version_of_its_own() -> None:
    begin("1.10")
    begin("1.1")

    assert AuditEntry.objects.filter(deed=Deed.DEPLOY).count() == 2


def test_actions_on_single_messages_and_older_changes_are_left_out(
    admin_client: Client,
) -> None:
    act(Deed.CANCEL, "Cancelled message 7.", minutes=5)
    act(Deed.EXPORT, "Exported 3 dead letters.", minutes=5)
    act(Deed.PAUSE, "Paused long ago.", hours=24.1)
    act(Deed.LIMIT, "Stage mail.send has a rate of 9/m.", hours=23.9)

    (only,) = shown(admin_client)

    assert "Stage mail.send has a rate of 9/m." in only


@pytest.mark.parametrize(
    ("permission", "sees"),
    [
        ("view_worker", "Version 4f2a"),
        ("view_auditentry", "Paused stage mail.send."),
        ("view_deadletter", "OutOfStock"),
    ],
)
def test_each_permission_shows_its_own_changes(
    somebody: Callable[..., Client], permission: str, sees: str
) -> None:
    begin("4f2a", minutes=3)
    act(Deed.PAUSE, "Paused stage mail.send.", minutes=2)
    die("OutOfStock", minutes=1)

    client = somebody(permission)
    (only,) = shown(client)

    assert sees in only
    assert "after: Version" not in only
    overview = client.get("/admin/django_txmsg/").content.decode()
    assert f'href="{PAGE}"' in overview


def test_without_a_permission_there_is_neither_page_nor_link(
    somebody: Callable[..., Client],
) -> None:
    client = somebody("view_outboxmessage")

    assert client.get(PAGE).status_code == 403
    page = client.get("/admin/django_txmsg/outboxmessage/").content.decode()
    assert PAGE not in page


def test_texts_are_escaped(admin_client: Client) -> None:
    evil = "<script>alert(1)</script>"
    begin(evil)
    act(Deed.PAUSE, evil, minutes=1)
    factories.DeadLetterFactory(exception=evil, stage=evil, fingerprint='"><b>')

    page = admin_client.get(PAGE).content.decode()

    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") >= 6
    assert "fingerprint=%22%3E%3Cb%3E" in page


def test_on_a_site_without_dead_letters_an_error_has_no_link(
    admin_client: Client,
) -> None:
    site = admin.AdminSite()
    site.register(AuditEntry, AuditAdmin)
    die("New", minutes=1)
    with override_settings(ROOT_URLCONF=(path("admin/", site.urls),)):
        page = admin_client.get(PAGE).content.decode()

    assert "First death: New: x</b>" in page


def test_every_database_is_read_and_named(admin_client: Client) -> None:
    die("Here", minutes=1)
    die("There", using="other", minutes=2)
    act(Deed.PAUSE, "Paused there.", using="other", minutes=3)
    with elsewhere():
        here, there, paused = shown(admin_client)

    assert "Here" in here
    assert "in database default" in here
    assert "There" in there
    assert "in database other" in there
    assert "Paused there." in paused


def test_a_database_that_does_not_answer_is_named(admin_client: Client) -> None:
    def refuse(*_: Any) -> None:
        raise OperationalError("it is away")

    die("Here", minutes=1)
    with elsewhere(), connections["other"].execute_wrapper(refuse):
        page = admin_client.get(PAGE).content.decode()

    assert "Database other does not answer. Its changes are not shown." in page
    assert "First death: Here" in page


def test_many_errors_and_dead_letters_take_the_same_statements_and_are_limited(
    admin_client: Client, django_assert_max_num_queries: Any
) -> None:
    for number in range(changes.MOST + 5):
        die(f"E{number}", minutes=number + 1)
        die(f"E{number}", minutes=number + 1)
    admin_client.get(PAGE)

    with django_assert_max_num_queries(15):
        found = shown(admin_client)

    assert len(found) == changes.MOST
    assert "E0:" in found[0]
    page = admin_client.get(PAGE).content.decode()
    assert "New errors: the newest 100 of each database are shown." in page


def test_the_page_says_when_no_version_is_recorded(admin_client: Client) -> None:
    said = "is not set here, so this service records no version."
    assert said in admin_client.get(PAGE).content.decode()
    with txmsg(VERSION="4f2a"):
        assert said not in admin_client.get(PAGE).content.decode()


def test_marks_are_where_their_times_are(admin_client: Client) -> None:
    die("Old", hours=23, minutes=59)
    die("Half", hours=12)
    die("New", seconds=1)

    page = admin_client.get(PAGE).content.decode()

    marks = [int(one) for one in re.findall(r'<rect x="(\d+)"', page)]
    assert marks == [956, 478, 1]
