"""The page of recurring messages, and the command: ticks, pausing, permissions."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_txmsg import every, make_recurring
from django_txmsg.checks import stages
from django_txmsg.models import AuditEntry, Schedule
from django_txmsg.scheduling.timekeeper import Timekeeper
from tests.forgetting import forget_recurring

URL = "/admin/django_txmsg/schedule/"
OVERVIEW = "/admin/django_txmsg/"


@pytest.fixture(autouse=True)
def _recurring() -> Iterator[None]:
    every("0 3 * * *", "reports.nightly", {}, tz="Europe/Berlin")
    yield
    forget_recurring("reports.nightly")


@pytest.fixture
def operator(somebody: Callable[..., Client]) -> Client:
    """A user who may see and pause recurring messages."""
    return somebody("view_schedule", "pause_schedule")


def told(*arguments: str) -> str:
    out = StringIO()
    call_command("txmsg", "schedule", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
def test_schedule_lists_declared_and_removed_messages(operator: Client) -> None:
    Schedule.objects.create(service="tests", name="long.gone", timing="0 1 * * * UTC")
    Schedule.objects.create(service="elsewhere", name="of.others")

    page = operator.get(URL).content.decode()

    assert "0 3 * * *" in page
    assert "Europe/Berlin" in page
    assert "long.gone" in page
    assert "unknown here" in page
    assert "of.others" not in page
    assert (
        '<a href="/admin/django_txmsg/schedule/"' in operator.get(URL).content.decode()
    )


@pytest.mark.django_db
def test_each_button_is_called_by_the_name_of_its_message(admin_client: Client) -> None:
    made = {"name": "made", "expression": "0 1 * * *", "destination": "reports.made"}
    admin_client.post(f"{URL}make/", made)
    admin_client.post(f"{URL}pause/", {"name": "made"})

    page = admin_client.get(URL).content.decode()

    for label in ("Pause reports.nightly", "Resume made", "Remove made"):
        assert page.count(f'<button class="button" type="submit" aria-label="{label}"')


@pytest.mark.django_db
def test_body_of_many_nested_arrays_is_refused(admin_client: Client) -> None:
    made = {"name": "made", "expression": "0 1 * * *", "destination": "reports.made"}
    body = "[" * 100_000

    page = admin_client.post(f"{URL}make/", {**made, "body": body}, follow=True)

    assert "Nothing was changed: not valid JSON" in page.content.decode()


@pytest.mark.django_db
def test_row_of_a_made_message_shows_no_body(operator: Client) -> None:
    make_recurring("made", "0 1 * * *", "reports.made", "s3cr3t")
    row = Schedule.objects.get(name="made")

    page = operator.get(f"{URL}{row.pk}/change/").content.decode()

    assert "made" in page
    assert "s3cr3t" not in page


@pytest.mark.django_db
def test_the_page_is_not_offered_where_nothing_recurs(operator: Client) -> None:
    assert "Recurring</a>" in operator.get(OVERVIEW).content.decode()
    forget_recurring("reports.nightly")
    assert "Recurring</a>" not in operator.get(OVERVIEW).content.decode()
    assert "Nothing recurs here" in operator.get(URL).content.decode()


@pytest.mark.django_db
def test_recurring_message_is_paused_and_resumed(operator: Client) -> None:
    form = {"name": "reports.nightly", "why": "<b>moving</b>"}
    page = operator.post(f"{URL}pause/", form, follow=True).content.decode()

    row = Schedule.objects.get()
    assert row.paused_by.startswith("user-")
    assert "Paused recurring message reports.nightly: " in page
    assert "&lt;b&gt;moving&lt;/b&gt;" in page
    assert (
        "already" in operator.post(f"{URL}pause/", form, follow=True).content.decode()
    )

    operator.post(f"{URL}resume/", form)

    row.refresh_from_db()
    assert row.paused_at is None
    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        "Paused recurring message reports.nightly: <b>moving</b>",
        "Resumed recurring message reports.nightly.",
    ]


@pytest.mark.django_db
def test_pausing_needs_its_permission_and_a_name_that_is_known(
    somebody: Callable[..., Client], operator: Client
) -> None:
    viewer, form = somebody("view_schedule"), {"name": "reports.nightly"}

    assert viewer.post(f"{URL}pause/", form).status_code == 403
    assert viewer.post(f"{URL}resume/", form).status_code == 403
    assert ">Pause<" not in viewer.get(URL).content.decode()
    assert operator.get(f"{URL}pause/").status_code == 405
    assert somebody("view_worker").get(URL).status_code == 403
    said = operator.post(f"{URL}pause/", {"name": "reports.nigthly"}, follow=True)
    assert "no recurring message" in said.content.decode()
    assert not Schedule.objects.exists()


@pytest.mark.django_db(databases=["default", "other"])
def test_pausing_queries_only_the_database_of_the_message(operator: Client) -> None:
    every("0 4 * * *", "reports.elsewhere", {}, using="other")
    try:
        with CaptureQueriesContext(connections["other"]) as queries:
            told("pause", "reports.nightly")
            operator.post(f"{URL}resume/", {"name": "reports.nightly"})
        assert not queries.captured_queries
        told("pause", "reports.elsewhere")
    finally:
        forget_recurring("reports.elsewhere")

    assert Schedule.objects.get().paused_at is None
    assert Schedule.objects.using("other").get().paused_at is not None


@pytest.mark.django_db
def test_the_command_lists_pauses_and_resumes(
    caplog: pytest.LogCaptureFixture, django_capture_on_commit_callbacks: Any
) -> None:
    listed = told("list")
    assert "reports.nightly  0 3 * * * Europe/Berlin" in listed
    following = r"  next \d{4}-\d\d-\d\d \d\d:\d\d:\d\d C[SD]T  \(no relay"
    assert re.search(following, listed)
    caplog.set_level("INFO")
    with django_capture_on_commit_callbacks(execute=True):
        assert "Paused" in told("pause", "reports.nightly", "--why", "audit")
    assert Schedule.objects.get().paused_by.startswith("command: ")
    paused = "Paused recurring message reports.nightly: audit"
    assert [one.text for one in AuditEntry.objects.all()] == [paused]
    # Once, by the logger of the audit.
    assert [one.name for one in caplog.records if "reports.nightly" in one.message] == [
        "django_txmsg.audit"
    ]
    assert "already" in told("pause", "reports.nightly")
    assert ": audit" in told("list")
    found = json.loads(told("list", "--json"))["recurring"]
    assert [(one["name"], one["paused_why"]) for one in found] == [
        ("reports.nightly", "audit")
    ]
    assert "Resumed" in told("resume", "reports.nightly")
    with pytest.raises(CommandError, match="no recurring message 'other'"):
        told("pause", "other")
    forget_recurring("reports.nightly")
    Schedule.objects.all().delete()
    assert "Nothing recurs" in told("list")


@pytest.mark.django_db
def test_tick_without_stored_message_is_overdue(operator: Client) -> None:
    Timekeeper(["default"]).tick()
    assert "OVERDUE" not in told("list")
    Schedule.objects.update(last_tick=timezone.now() - dt.timedelta(days=2))

    assert "OVERDUE" in told("list")
    assert ">overdue<" in operator.get(URL).content.decode()


@pytest.mark.django_db
def test_start_of_a_made_message_is_not_called_its_last_tick(operator: Client) -> None:
    make_recurring("made", "0 1 * * *", "reports.made")
    Schedule.objects.update(last_tick=timezone.now() - dt.timedelta(days=2))

    assert re.search(r"made .*  last tick or start \d{4}-", told("list"))
    assert "<th>Last tick or start</th>" in operator.get(URL).content.decode()
    page = operator.get(OVERVIEW).content.decode()
    assert "no tick was stored for 2 d" in page
    assert "last tick" not in page


@pytest.mark.django_db
def test_declaration_that_no_relay_has_recorded_is_marked(operator: Client) -> None:
    def check(*, recorded: bool) -> None:
        mark = "no relay has recorded it"
        assert (mark in told("list")) is not recorded
        assert (mark in operator.get(URL).content.decode()) is not recorded
        [found] = json.loads(told("list", "--json"))["recurring"]
        assert found["recorded"] is recorded

    check(recorded=False)
    Timekeeper(["default"]).tick()
    check(recorded=True)
    forget_recurring("reports.nightly")
    every("0 4 * * *", "reports.nightly", {}, tz="Europe/Berlin")
    check(recorded=False)
    Timekeeper(["default"]).tick()
    check(recorded=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"broker": "nowhere"}, "its broker 'nowhere'"),
        ({"body": object()}, "JSON"),
        ({"headers": {"txmsg-id": "x"}}, "set by django_txmsg"),
        ({"key": ""}, "key must be"),
        ({"expires": 90}, "expires must be"),
        ({"using": "nowhere"}, "the router keeps the tables out of database 'nowhere'"),
    ],
)
def test_check_finds_recurring_message_that_cannot_be_stored(
    options: dict[str, Any], why: str
) -> None:
    every("0 3 * * *", "reports.bad", **options)
    try:
        (found,) = stages.check_schedule()
    finally:
        forget_recurring("reports.bad")

    assert found.id == "txmsg.E050"
    assert why in found.msg
    assert not list(stages.check_schedule())
