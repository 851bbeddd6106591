"""The lists of outbox, inbox and workers."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_txmsg
from django_txmsg.admin import counting, filters
from django_txmsg.admin.base import ReadOnlyAdmin
from django_txmsg.models import AuditEntry, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.monitoring import Deed
from tests import factories

OUTBOX = "/admin/django_txmsg/outboxmessage/"
INBOX = "/admin/django_txmsg/inboxmessage/"
WORKERS = "/admin/django_txmsg/worker/"
DEAD = "/admin/django_txmsg/deadletter/"
STATE = {"resolution": "open"}


def found(client: Client, url: str, **query: str) -> list[str]:
    """Return the message ids that a list shows."""
    response = client.get(url, query)
    assert response.status_code == 200
    return [str(row.message_id) for row in response.context["cl"].result_list]


def test_processed_message_shows_an_error_only_if_an_attempt_failed(
    viewer: Client,
) -> None:
    waited = {"attempts": 1, "last_error": "over the rate of 60/m"}
    factories.InboxMessageFactory(**waited)
    factories.InboxMessageFactory(attempts=2, last_error="ValueError: no stock")

    page = viewer.get(INBOX).content.decode()

    assert "over the rate" not in page
    assert "no stock" in page
    factories.InboxMessageFactory(parked=True, **waited)
    assert "over the rate" in viewer.get(INBOX).content.decode()


def test_the_outbox_is_filtered_by_state(viewer: Client) -> None:
    pending = factories.OutboxMessageFactory()
    overdue = factories.OutboxMessageFactory(created_at=factories.ago(minutes=9))
    leased = factories.OutboxMessageFactory(
        lease_until=factories.ago(seconds=-60), lease_token=uuid.uuid4()
    )
    gone = factories.OutboxMessageFactory(dispatched=True)
    dead = factories.OutboxMessageFactory(dead=True)

    waiting = {str(one.message_id) for one in (pending, overdue, leased)}
    assert set(found(viewer, OUTBOX, state="pending")) == waiting
    assert found(viewer, OUTBOX, state="overdue") == [str(overdue.message_id)]
    assert found(viewer, OUTBOX, state="in flight") == [str(leased.message_id)]
    assert found(viewer, OUTBOX, state="dispatched") == [str(gone.message_id)]
    assert found(viewer, OUTBOX, state="dead") == [str(dead.message_id)]
    # No choice, and so no row: all rows would pass for what was asked for.
    assert found(viewer, OUTBOX, state="in-flight") == []
    assert found(viewer, OUTBOX, since="1d") == []
    page = viewer.get(OUTBOX).content.decode()
    assert "pending (3)" in page
    # No index finds these rows, so they are not counted.
    assert "overdue (" not in page
    assert "in flight (" not in page


def test_the_outbox_is_filtered_by_destination_and_age(viewer: Client) -> None:
    old = factories.OutboxMessageFactory(
        destination="mail.send", created_at=factories.ago(days=2)
    )
    new = factories.OutboxMessageFactory(destination="mail.send")
    factories.OutboxMessageFactory()

    both = {str(old.message_id), str(new.message_id)}
    page = viewer.get(OUTBOX).content.decode()
    assert "mail.send (2)" in page
    assert "orders.place (1)" in page
    assert set(found(viewer, OUTBOX, destination="mail.send")) == both
    since = factories.ago(days=1).isoformat()
    assert found(viewer, OUTBOX, destination="mail.send", since=since) == [
        str(new.message_id)
    ]


def test_short_ids_of_one_flow_differ(viewer: Client) -> None:
    """Two ids begin alike, because they belong to one flow, and also have the same last
    ten characters. Their short ids differ."""
    flow = "019e2f6c-0123-84a1-966a-"
    ids = {f"{flow}{own}" for own in ("b653ee1c3571", "0f53ee1c3571")}
    for message_id in ids:
        factories.OutboxMessageFactory(message_id=uuid.UUID(message_id))
    page = viewer.get(OUTBOX).content.decode()
    shown = re.findall(r'class="txmsg-id" title="([^"]+)">([^<]+)<', page)
    assert {full for full, _ in shown} == ids
    assert len({short for _, short in shown}) == 2


def test_messages_are_found_by_their_exact_ids(viewer: Client) -> None:
    row = factories.OutboxMessageFactory(key="customer-7", correlation_id="flow-1")
    factories.OutboxMessageFactory.create_batch(3)

    for text in (str(row.message_id), row.message_id.hex, "customer-7", "flow-1"):
        assert found(viewer, OUTBOX, q=text) == [str(row.message_id)], text
    assert found(viewer, OUTBOX, q="customer") == []

    seen = factories.InboxMessageFactory(correlation_id="flow-2")
    assert found(viewer, INBOX, q="flow-2") == [str(seen.message_id)]


def test_attempts_and_the_errors_last_line_are_shown(viewer: Client) -> None:
    factories.OutboxMessageFactory(attempts=3, last_error="one\ntwo: <b>broken</b>")

    page = viewer.get(OUTBOX).content.decode()

    assert "3 of 7" in page
    assert "two: &lt;b&gt;broken&lt;/b&gt;" in page


def test_the_inbox_is_filtered_by_state_and_stage(viewer: Client) -> None:
    done = factories.InboxMessageFactory(stage="mail.send", deliveries=3)
    parked = factories.InboxMessageFactory(parked=True)
    late = factories.InboxMessageFactory(parked=True, due_at=factories.ago(minutes=3))
    dead = factories.InboxMessageFactory(dead=True)

    assert found(viewer, INBOX, state="processed") == [str(done.message_id)]
    assert found(viewer, INBOX, stage="mail.send") == [str(done.message_id)]
    assert set(found(viewer, INBOX, state="redelivering")) == {
        str(parked.message_id),
        str(late.message_id),
    }
    assert found(viewer, INBOX, state="overdue") == [str(late.message_id)]
    assert found(viewer, INBOX, state="dead") == [str(dead.message_id)]
    assert "delivered 3 times" in viewer.get(INBOX).content.decode()


def test_a_message_that_waits_for_its_rate_is_not_redelivering(viewer: Client) -> None:
    row = factories.InboxMessageFactory(parked=True, slot=3, correlation_id="c")
    factories.InboxMessageFactory(
        parked=True, waits_for=row.message_id, correlation_id="c"
    )

    for url in (INBOX, f"/admin/django_txmsg/outboxmessage/{row.message_id}/"):
        page = viewer.get(url).content.decode()
        for state, shown in (
            ("waits for its rate", True), ("blocked", True), ("redelivering", False),
        ):  # fmt: skip
            assert (f'">{state}</span>' in page) == shown, (url, state)


def test_silent_workers_are_marked(viewer: Client) -> None:
    factories.WorkerFactory(host="here", service="warehouse")
    factories.WorkerFactory(host="gone", heartbeat_at=factories.ago(minutes=5))

    page = viewer.get(WORKERS).content.decode()

    assert ">alive<" in page
    assert ">silent<" in page
    assert "orders.place" in page
    assert "warehouse" in page


def test_list_without_workers_says_what_to_start(viewer: Client) -> None:
    assert "manage.py txmsg run" in viewer.get(WORKERS).content.decode()
    factories.WorkerFactory(kind="relay")
    for query in ("", "?kind__exact=consumer"):
        page = viewer.get(WORKERS + query).content.decode()
        assert "manage.py txmsg run" not in page


def test_filters_count_the_newest_and_say_so(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.OutboxMessageFactory.create_batch(8)
    factories.InboxMessageFactory.create_batch(2)
    monkeypatch.setattr(filters, "NEWEST", 5)

    assert "orders.place (5+)" in viewer.get(OUTBOX).content.decode()
    assert "orders.place (2)" in viewer.get(INBOX).content.decode()


def test_pages_are_counted_up_to_the_cap(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.OutboxMessageFactory.create_batch(8)
    monkeypatch.setattr(counting, "CAP", 5)

    response = viewer.get(OUTBOX)

    assert response.context["cl"].paginator.count == 5
    page = response.content.decode()
    assert "5+ outbox messages" in page
    assert "6 results" not in page
    factories.DeadLetterFactory(stage="mail.send")
    page = viewer.get("/admin/django_txmsg/deadletter/?stage=mail.send")
    assert "1 dead letter" in page.content.decode()


@pytest.mark.parametrize(
    ("url", "make"),
    [
        (OUTBOX, factories.OutboxMessageFactory),
        (INBOX, factories.InboxMessageFactory),
        (DEAD, factories.DeadLetterFactory),
    ],
)
def test_every_row_is_reached_however_many_there_are(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, url: str, make: Any
) -> None:
    made = sorted((row.pk for row in make.create_batch(13)), reverse=True)
    monkeypatch.setattr(counting, "CAP", 4)
    monkeypatch.setattr(ReadOnlyAdmin, "list_per_page", 2)
    reached: list[int] = []
    address = "?resolution=open" if url == DEAD else "?"
    while address:
        page = viewer.get(url + address)
        shown = page.context["cl"]
        for number in shown.paginator.page_range:
            listed = viewer.get(f"{url}{address}&p={number}").context["cl"]
            reached += [row.pk for row in listed.result_list]
        assert ('rel="next"' in page.content.decode()) == bool(shown.older)
        if "older=" in address:
            assert ">Newest<" in page.content.decode()
        address = shown.older

    assert reached == made
    assert viewer.get(f"{url}?older=nonsense").status_code == 302


def test_a_change_of_filters_begins_with_the_newest_again(viewer: Client) -> None:
    factories.DeadLetterFactory.create_batch(3)
    page = viewer.get(f"{DEAD}?older=2&resolution=open").content.decode()

    links = re.findall(r'href="(\?[^"]*)"', page)
    assert any("resolution=discarded" in link for link in links)
    assert not [link for link in links if "older=" in link and "kind=" not in link]


@pytest.mark.parametrize(
    ("url", "make", "column"),
    [
        (OUTBOX, factories.OutboxMessageFactory, "created_at"),
        (INBOX, factories.InboxMessageFactory, "last_received_at"),
        (DEAD, factories.DeadLetterFactory, "created_at"),
    ],
)
def test_lists_are_filtered_by_dates(
    viewer: Client, url: str, make: Any, column: str
) -> None:
    days = [timezone.make_aware(dt.datetime(2026, 3, day, 12)) for day in (1, 2, 3)]
    first, second, third = (make(**{column: day}).pk for day in days)

    def found(**query: str) -> set[int]:
        page = viewer.get(url, {**query, **({} if url != DEAD else STATE)})
        return {row.pk for row in page.context["cl"].result_list}

    assert found(since="2026-03-02") == {second, third}
    assert found(before=days[2].isoformat()) == {first, second}
    assert found(since="2026-03-02T12:00", before="2026-03-02T12:01") == {second}
    assert found(since="next tuesday") == set()
    assert found(since="0001-01-01T00:00+14:00") == set()
    assert found(since="0001-01-02", before="9999-12-30") == {first, second, third}


def test_the_rows_of_a_filtered_list_are_looked_for_once(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a filtered list searches the table only once. Without an index for the
    filter, each search reads most of a large table."""
    factories.OutboxMessageFactory.create_batch(8)
    monkeypatch.setattr(counting, "CAP", 5)
    with CaptureQueriesContext(connection) as asked:
        page = viewer.get(OUTBOX, {"since": "2026-01-01"})

    assert page.context["cl"].older
    searches = [one["sql"] for one in asked if '"created_at" >=' in one["sql"]]
    assert len([sql for sql in searches if '"id" IN' not in sql]) == 1


@pytest.mark.parametrize(
    ("url", "queries", "make"),
    [
        (OUTBOX, 11, factories.OutboxMessageFactory),
        (INBOX, 13, factories.InboxMessageFactory),
        (WORKERS, 7, factories.WorkerFactory),
    ],
)
def test_the_number_of_queries_is_fixed(
    viewer: Client,
    django_assert_num_queries: Callable[..., object],
    url: str,
    queries: int,
    make: type,
) -> None:
    make.create_batch(2)  # type: ignore[attr-defined]
    with django_assert_num_queries(queries):
        viewer.get(url)
    make.create_batch(40)  # type: ignore[attr-defined]
    with django_assert_num_queries(queries):
        viewer.get(url)


@pytest.mark.parametrize("url", [OUTBOX, INBOX, WORKERS])
def test_rows_cannot_be_added_edited_or_deleted(operator: Client, url: str) -> None:
    row = factories.OutboxMessageFactory()

    assert operator.get(f"{url}add/").status_code == 403
    assert operator.post(f"{OUTBOX}{row.pk}/delete/").status_code == 403
    operator.post(f"{OUTBOX}{row.pk}/change/", {"destination": "elsewhere"})
    row.refresh_from_db()
    assert row.destination == "orders.place"


def test_rows_lead_to_their_message(viewer: Client) -> None:
    for url, row in (
        (OUTBOX, factories.OutboxMessageFactory()),
        (INBOX, factories.InboxMessageFactory()),
    ):
        answer = viewer.get(f"{url}{row.pk}/change/")
        assert answer["Location"].endswith(f"/outboxmessage/{row.message_id}/")
        gone = viewer.get(f"{url}4711/change/", follow=True)
        assert "message 4711 here" in gone.content.decode()


@pytest.mark.parametrize("url", [OUTBOX, INBOX, WORKERS])
def test_lists_need_their_permission(somebody: Callable[..., Client], url: str) -> None:
    assert somebody("pause_stage").get(url).status_code == 403


def test_no_page_has_a_style_or_a_script_of_its_own() -> None:
    """No template has inline styles or scripts, because a strict
    Content-Security-Policy forbids them."""
    templates = Path(django_txmsg.__file__).parent / "templates"
    for page in templates.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"style=|<style|<script(?! src=)|\son\w+=", text), page


@pytest.mark.parametrize(
    ("place", "factory"),
    [
        ("outboxmessage/", factories.OutboxMessageFactory),
        ("inboxmessage/", factories.InboxMessageFactory),
        ("deadletter/?resolution=open", factories.DeadLetterFactory),
    ],
)
def test_the_first_column_of_a_list_links_to_the_message(
    viewer: Client, place: str, factory: Any
) -> None:
    """The link is in the first column, because on a phone the other columns are off the
    screen."""
    row = factory()

    page = viewer.get(f"/admin/django_txmsg/{place}").content.decode()

    first = re.search(r'<(?:td|th) class="field-.*?</t[dh]>', page, re.DOTALL)
    assert first is not None
    assert "<a href=" in first[0]
    assert re.search(f"{row.message_id}|/{row.pk}/", first[0])


def test_outbox_list_shows_a_messages_state_at_its_stages(
    viewer: Client,
) -> None:
    for kind in ("dead", "processed", "away"):
        row = factories.OutboxMessageFactory(destination=kind, dispatched=True)
        if kind == "dead":
            factories.DeadLetterFactory(message_id=row.message_id)
        if kind == "processed":
            factories.InboxMessageFactory(message_id=row.message_id)

    page = viewer.get("/admin/django_txmsg/outboxmessage/").content.decode()

    shown = re.findall(r'field-outcome">(.*?)</td>.*?field-place">(\w+)', page, re.S)
    assert {place: re.sub("<.*?>", "", html) for html, place in shown} == {
        "dead": "dead", "processed": "processed", "away": "-",
    }  # fmt: skip
    assert "refused or expired (0)" in page


@pytest.mark.parametrize("name", ["outboxmessage", "inboxmessage", "deadletter"])
def test_a_nul_in_the_address_is_no_error(admin_client: Client, name: str) -> None:
    """A request with a NUL in its query or form does not cause a server error, although
    PostgreSQL can neither store nor find a NUL."""
    for query in ("stage", "destination", "reason", "fingerprint", "q", "state"):
        url = f"/admin/django_txmsg/{name}/?{query}=%00x"
        assert admin_client.get(url).status_code < 500, url
    for query in ("stage", "search", "destination"):
        url = f"/admin/django_txmsg/deadletter/confirm/?kind=discard&{query}=%00"
        assert admin_client.get(url).status_code in (200, 302)
    for url, form in (
        ("stagestate/pause/", {"stage": "\x00", "why": "\x00"}),
        ("deadletter/note/", {"fingerprint": "\x00", "note": "\x00"}),
    ):
        answer = admin_client.post(f"/admin/django_txmsg/{url}", form)
        assert answer.status_code == 302


def test_the_keyboard_scrolls_a_list_without_links(admin_client: Client) -> None:
    AuditEntry.objects.record("grace", "Paused stage <b>.", deed=Deed.PAUSE)

    page = admin_client.get("/admin/django_txmsg/auditentry/").content.decode()

    assert '<div class="results" tabindex="0">' in page
    assert "Paused stage &lt;b&gt;." in page


@pytest.mark.postgresql
@pytest.mark.parametrize("table", ["outboxmessage", "inboxmessage"])
def test_a_list_looks_up_what_became_of_the_rows_that_it_shows(
    admin_client: Client, table: str
) -> None:
    """Each table has 5,000 rows. The list reads only the rows that it shows, and the
    rows of other tables that belong to the same messages."""
    factories.OutboxMessageFactory(dispatched=True)
    factories.InboxMessageFactory()
    factories.DeadLetterFactory()
    with connection.cursor() as cursor:
        for model in (OutboxMessage, InboxMessage, DeadLetter):
            name = model._meta.db_table
            columns = ", ".join(
                f'"{one.column}"'
                for one in model._meta.concrete_fields
                if one.column not in ("id", "message_id")
            )
            cursor.execute(
                f"INSERT INTO {name} (message_id, {columns}) SELECT gen_random_uuid(),"
                f" {columns} FROM {name}, generate_series(1, 5000)"
            )
            cursor.execute(f"ANALYZE {name}")
    with CaptureQueriesContext(connection) as asked:
        admin_client.get(f"/admin/django_txmsg/{table}/")
    begin = f'SELECT "django_txmsg_{table}"."id", '
    (sql,) = (one["sql"] for one in asked if one["sql"].startswith(begin))

    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {sql}")
        plan = "\n".join(line for (line,) in cursor.fetchall())

    for model in (OutboxMessage, InboxMessage, DeadLetter):
        assert f"Seq Scan on {model._meta.db_table}" not in plan
