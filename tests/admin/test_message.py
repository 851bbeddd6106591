"""A message's own page."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from django_txmsg import conf, wire
from django_txmsg.admin import display
from django_txmsg.models import InboxMessage, OutboxMessage
from django_txmsg.rules.dead_letters import GONE_ON
from tests import factories

SCRIPT = "<script>alert('x')</script>"


def url(message_id: object) -> str:
    """Return the address of a message's page."""
    return f"/admin/django_txmsg/outboxmessage/{message_id}/"


def hide_names(destination: str, headers: dict[str, str], body: Any) -> Any:
    """A mask that hides names and the authorization."""
    if isinstance(body, dict):
        body = {**body, "name": "***"}
    return {**headers, "authorization": "***"}, body


def break_down(destination: str, headers: dict[str, str], body: Any) -> Any:
    """A mask that fails."""
    raise RuntimeError("no mask today")


def test_page_shows_facts_timeline_attempts_and_body(operator: Client) -> None:
    row = factories.OutboxMessageFactory(
        dispatched=True,
        key="customer-7",
        created_at=factories.ago(seconds=30),
        headers={"tenant": "north"},
    )
    factories.InboxMessageFactory(
        message_id=row.message_id,
        deliveries=2,
        first_received_at=factories.ago(seconds=9),
        last_received_at=factories.ago(seconds=7),
        processed_at=factories.ago(seconds=6),
    )
    factories.AttemptFactory(
        message_id=row.message_id, number=1, failed_at=factories.ago(seconds=8)
    )

    response = operator.get(url(row.message_id))

    page = response.content.decode()
    assert [event.what for event in response.context["events"]] == [
        "stored",
        "dispatched",
        "received",
        "attempt 1 failed",
        "received copy 2",
        "processed",
    ]
    assert "customer-7" in page
    assert "north" in page
    assert "ValueError: no stock" in page
    assert "&quot;order&quot;: 1" in page


@pytest.mark.parametrize("by", [GONE_ON, "linus"])
def test_revoked_message_is_not_offered_for_restoring(
    operator: Client, by: str
) -> None:
    letter = factories.DeadLetterFactory(discarded=True, resolved_by=by)
    row = factories.InboxMessageFactory(
        message_id=letter.message_id, stage=letter.stage, dead=True
    )
    before = operator.get(url(letter.message_id)).content.decode()
    InboxMessage.objects.filter(pk=row.pk).update(revoked_at=timezone.now())

    page = operator.get(url(letter.message_id)).content.decode()

    assert ("Restore…" in before) == (by != GONE_ON)
    assert "Restore…" not in page
    assert "It cannot be restored: its flow has gone on without it." in page
    assert "by revoked" not in page
    gone_on = "because its flow has gone on" in page
    assert gone_on == (by == GONE_ON)


def test_timeline_shows_the_time_between_steps(operator: Client) -> None:
    stored = factories.ago(minutes=10)
    row = factories.OutboxMessageFactory(
        created_at=stored, dispatched_at=factories.ago(minutes=8)
    )

    events = operator.get(url(row.message_id)).context["events"]

    assert [event.what for event in events] == ["stored", "dispatched"]
    assert round(events[1].gap.total_seconds()) == 120
    assert "2 min later" in operator.get(url(row.message_id)).content.decode()


def test_next_attempt_is_the_last_event_even_if_it_is_overdue(
    operator: Client,
) -> None:
    row = factories.InboxMessageFactory(
        parked=True,
        created_at=factories.ago(minutes=6),
        first_received_at=factories.ago(minutes=5),
        due_at=factories.ago(minutes=3),
    )
    factories.DeadLetterFactory(
        message_id=row.message_id,
        created_at=factories.ago(minutes=4),
        resolution="redelivered",
        resolved_at=factories.ago(minutes=2),
    )

    *_, resolved, attempt = operator.get(url(row.message_id)).context["events"]

    assert (resolved.what, attempt.what) == ("redelivered", "next attempt")
    assert attempt.gap is None


def test_outbox_row_says_in_words_what_became_of_it(viewer: Client) -> None:
    sent = factories.OutboxMessageFactory(
        dispatched=True, attempts=1, expires_at=factories.ago(minutes=2)
    )
    waits = factories.OutboxMessageFactory(expires_at=factories.ago(minutes=-5))
    gone = factories.OutboxMessageFactory(
        cancelled_at=timezone.now(),
        dead_at=timezone.now(),
        last_error="cancelled: by admin: a duplicate",
    )

    page = viewer.get(url(sent.message_id)).content.decode()
    assert "after 1 rejection<" in page
    assert re.search(r", expired <time[^>]*>2 min</time> ago", page)
    page = viewer.get(url(waits.message_id)).content.decode()
    assert re.search(r", expires <time[^>]*>in (5 min|4 min 59 s)</time>", page)
    page = viewer.get(url(gone.message_id)).content.decode()
    assert "by admin: a duplicate" in page
    assert "cancelled: by admin" not in page.partition("<h2>Raw")[0]
    assert "to broker" not in page


@pytest.mark.parametrize(
    ("replay_id", "origin"),
    [("march", "again, by march"), ("new/march", "by march"), ("", "")],
)
def test_only_a_message_that_keeps_its_id_is_stored_again(
    viewer: Client, replay_id: str, origin: str
) -> None:
    row = factories.OutboxMessageFactory(replay_id=replay_id)

    answer = viewer.get(url(row.message_id))

    assert (f"stored {origin}" in answer.content.decode()) == bool(origin)
    assert answer.context["events"][0].detail == origin
    listed = viewer.get("/admin/django_txmsg/outboxmessage/").content.decode()
    assert (display.badge("again") in listed) == ("again" in origin)


def test_a_message_expires_by_the_databases_clock(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = factories.OutboxMessageFactory(expires_at=factories.ago(minutes=-5))
    ahead = timezone.now() + dt.timedelta(hours=1)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    page = viewer.get(url(waits.message_id)).content.decode()
    assert re.search(r", expires <time[^>]*>in (5 min|4 min 5\d s)</time>", page)


def test_the_timeline_says_when_by_the_clock(viewer: Client) -> None:
    row = factories.OutboxMessageFactory(
        created_at=dt.datetime(2026, 3, 4, 5, 6, 7, 89_000, dt.timezone.utc)
    )

    with timezone.override("UTC"):
        page = viewer.get(url(row.message_id)).content.decode()

    assert "2026-03-04 05:06:07.089 UTC<" in page


def test_message_known_only_by_its_dead_letter_has_a_page(operator: Client) -> None:
    letter = factories.DeadLetterFactory(deaths=2)

    page = operator.get(url(letter.message_id)).content.decode()

    assert "failed again" in page
    assert "Redeliver…" in page
    assert "Discard…" in page
    assert "Redeliver a copy" not in page  # the setting is off


def test_texts_of_messages_are_escaped(operator: Client) -> None:
    letter = factories.DeadLetterFactory(
        destination=SCRIPT,
        stage=SCRIPT,
        correlation_id=SCRIPT,
        headers={"tenant": SCRIPT, SCRIPT: "x"},
        body=json.dumps({"name": SCRIPT}).encode(),
        exception=SCRIPT,
        traceback=SCRIPT,
        reason=SCRIPT,
        fingerprint=SCRIPT,
    )
    factories.OutboxMessageFactory(
        message_id=letter.message_id, destination=SCRIPT, key=SCRIPT, last_error=SCRIPT
    )
    factories.InboxMessageFactory(
        message_id=letter.message_id, stage=SCRIPT, service=SCRIPT, last_error=SCRIPT
    )
    factories.AttemptFactory(
        message_id=letter.message_id, stage=SCRIPT, exception=SCRIPT, worker=SCRIPT
    )
    factories.FailureNoteFactory(fingerprint=SCRIPT, note=SCRIPT)
    factories.WorkerFactory(host=SCRIPT, stages=[SCRIPT])
    factories.QueueMessageFactory(queue=SCRIPT)

    for address in (
        url(letter.message_id),
        "/admin/django_txmsg/",
        "/admin/django_txmsg/outboxmessage/",
        "/admin/django_txmsg/inboxmessage/",
        "/admin/django_txmsg/deadletter/",
        "/admin/django_txmsg/deadletter/?resolution=open",
        f"/admin/django_txmsg/deadletter/confirm/?kind=redeliver&ids={letter.pk}",
        "/admin/django_txmsg/worker/",
        "/admin/django_txmsg/stagestate/",
    ):
        page = operator.get(address).content.decode()
        assert "&lt;script&gt;alert" in page, address
        assert "<script>alert" not in page, address


def test_a_body_of_5_mb_is_cut_and_served_whole_on_demand(operator: Client) -> None:
    body = json.dumps(["x" * 100] * 50_000).encode()
    row = factories.OutboxMessageFactory(body=body)

    page = operator.get(url(row.message_id))
    whole = operator.get(f"{url(row.message_id)}body/outbox/{row.pk}/")

    assert len(page.content) < 120_000
    assert "Show all 5.2 MB" in page.content.decode()
    assert json.loads(whole.content) == ["x" * 100] * 50_000
    assert whole["Content-Type"] == "text/plain; charset=utf-8"
    assert whole["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in whole["Content-Security-Policy"]


def test_bytes_are_shown_in_hexadecimal(operator: Client) -> None:
    row = factories.OutboxMessageFactory(
        body=bytes(range(256)), content_type="application/octet-stream"
    )

    page = operator.get(url(row.message_id)).content.decode()

    assert "00000020  20 21 22" in page


def test_body_of_wrong_content_type_is_shown_raw(operator: Client) -> None:
    row = factories.OutboxMessageFactory(body=b"{broken")

    assert "{broken" in operator.get(url(row.message_id)).content.decode()


def test_body_nested_too_deeply_to_be_indented_is_shown_raw(operator: Client) -> None:
    body = b"[" * 600 + b"]" * 600
    row = factories.OutboxMessageFactory(body=body)

    assert body in operator.get(url(row.message_id)).content


def test_bodies_need_their_own_permission(viewer: Client) -> None:
    row = factories.OutboxMessageFactory(body=b'"secret-word"')

    page = viewer.get(url(row.message_id)).content.decode()

    assert "secret-word" not in page
    assert "Can view message bodies" in page
    whole = viewer.get(f"{url(row.message_id)}body/outbox/{row.pk}/")
    assert whole.status_code == 403


def test_the_mask_hides_personal_data(operator: Client, settings: Any) -> None:
    settings.TXMSG = {**settings.TXMSG, "MASK": f"{__name__}.hide_names"}
    row = factories.OutboxMessageFactory(
        body=b'{"name": "Ada", "order": 1}', headers={"authorization": "Bearer 123"}
    )

    page = operator.get(url(row.message_id)).content.decode()
    whole = operator.get(f"{url(row.message_id)}body/outbox/{row.pk}/")

    for shown in (page, whole.content.decode()):
        assert "Ada" not in shown
        assert "Bearer" not in shown
    assert "***" in page


def test_the_mask_is_applied_before_a_long_body_is_cut(
    operator: Client, settings: Any
) -> None:
    settings.TXMSG = {**settings.TXMSG, "MASK": f"{__name__}.hide_names"}
    body = json.dumps({"name": "Ada", "more": "x" * 100_000}).encode()
    row = factories.OutboxMessageFactory(body=body)

    page = operator.get(url(row.message_id)).content.decode()

    assert "Ada" not in page
    assert "Show all" in page


def test_a_mask_that_fails_hides_everything(operator: Client, settings: Any) -> None:
    settings.TXMSG = {**settings.TXMSG, "MASK": f"{__name__}.break_down"}
    row = factories.OutboxMessageFactory(
        body=b'"secret-word"', headers={"a": "hidden-1"}
    )

    page = operator.get(url(row.message_id)).content.decode()

    assert "secret-word" not in page
    assert "hidden-1" not in page
    assert "TXMSG[&quot;MASK&quot;] failed" in page


def test_the_flow_is_shown_as_a_tree(operator: Client) -> None:
    order = factories.OutboxMessageFactory(dispatched=True)
    factories.InboxMessageFactory(message_id=order.message_id, stage="orders.place")
    flow = str(order.message_id)
    payment = factories.OutboxMessageFactory(
        destination="payments.charge",
        correlation_id=flow,
        session_id=wire.session_id(
            conf.get().SERVICE, order.message_id, "orders.place"
        ),
    )
    factories.InboxMessageFactory(
        message_id=payment.message_id, stage="payments.charge", correlation_id=flow
    )
    parcel = factories.OutboxMessageFactory(
        destination="shipping.send",
        correlation_id=flow,
        session_id=wire.session_id(
            conf.get().SERVICE, payment.message_id, "payments.charge"
        ),
    )
    factories.OutboxMessageFactory(correlation_id="another flow")

    nodes = operator.get(url(payment.message_id)).context["flow"]

    assert [(node.message_id, node.depth) for node in nodes] == [
        (order.message_id, 0),
        (payment.message_id, 1),
        (parcel.message_id, 2),
    ]
    assert [node.current for node in nodes] == [False, True, False]


@pytest.mark.parametrize("lake", [None, "file:///var/lake"])
def test_a_message_that_is_gone_leads_back_with_a_word(
    operator: Client, settings: Any, lake: str | None
) -> None:
    settings.TXMSG = {**settings.TXMSG, "LAKE": lake}
    gone = uuid.uuid4()
    response = operator.get(url(gone), follow=True)

    assert response.redirect_chain[0][0] == "/admin/django_txmsg/"
    said = response.content.decode()
    assert "is not here" in said
    assert (f"manage.py pipeline show {gone}" in said) is (lake is not None)
    whole = operator.get(f"{url(uuid.uuid4())}body/outbox/1/")
    assert whole.status_code == 404
    assert operator.get(f"{url(uuid.uuid4())}body/elsewhere/1/").status_code == 404


def test_the_page_does_not_call_a_message_gone_that_the_user_may_not_see(
    somebody: Callable[..., Client],
) -> None:
    stored = factories.OutboxMessageFactory()

    response = somebody("view_deadletter").get(url(stored.message_id), follow=True)

    assert "or only in tables that you may not see" in response.content.decode()
    assert "never stored" not in response.content.decode()


def test_the_page_needs_a_permission(somebody: Callable[..., Client]) -> None:
    letter = factories.DeadLetterFactory()
    factories.OutboxMessageFactory(message_id=letter.message_id, key="only-outbox")

    assert somebody("view_worker").get(url(letter.message_id)).status_code == 403
    page = somebody("view_deadletter").get(url(letter.message_id)).content.decode()
    assert "only-outbox" not in page


def test_the_number_of_queries_is_fixed(
    operator: Client, django_assert_num_queries: Callable[..., object]
) -> None:
    letter = factories.DeadLetterFactory(correlation_id="flow")
    for count in (1, 30):
        factories.OutboxMessageFactory.create_batch(count, correlation_id="flow")
        factories.AttemptFactory.create_batch(count, message_id=letter.message_id)
        with django_assert_num_queries(12):
            operator.get(url(letter.message_id))


def hide(destination: str, headers: Any, body: Any) -> Any:
    return dict.fromkeys(headers, "***"), body


def test_the_mask_covers_headers_wherever_the_page_shows_them(
    operator: Client, settings: Any
) -> None:
    letter = factories.DeadLetterFactory()
    letter.headers["authorization"] = "Bearer s3cr3t"
    letter.save()
    row = factories.OutboxMessageFactory(key="s3cr3t")
    settings.TXMSG = {"SERVICE": "tests", "MASK": f"{__name__}.hide"}

    for one in (letter, row):
        page = operator.get(page_of(one)).content.decode()

        assert "***" in page
        assert "s3cr3t" not in page


def page_of(row: Any) -> str:
    return f"/admin/django_txmsg/outboxmessage/{row.message_id}/"


@pytest.mark.parametrize("masked", [True, False])
def test_a_large_body_is_not_loaded_to_show_its_beginning(
    operator: Client, settings: Any, masked: bool
) -> None:
    body = json.dumps({"lines": ["x" * 100] * 160_000}).encode()
    letter = factories.DeadLetterFactory(body=body)
    if masked:
        settings.TXMSG = {"SERVICE": "tests", "MASK": f"{__name__}.hide"}
    operator.get(page_of(factories.DeadLetterFactory()))  # everything is imported
    tracemalloc.start()
    try:
        page = operator.get(page_of(letter)).content.decode()
        whole = operator.get(f"{page_of(letter)}body/dead/{letter.pk}/")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 64 * 1024 * 1024
    assert ("too large to be masked" in page.lower()) == masked
    assert whole.status_code == (413 if masked else 200)
    assert (whole.content == body) == (not masked)


def test_groups_load_no_body(operator: Client) -> None:
    for number in range(20):
        factories.DeadLetterFactory(fingerprint=f"{number:016}", body=b"x" * 4_000_000)
    operator.get("/admin/django_txmsg/deadletter/")
    tracemalloc.start()
    try:
        operator.get("/admin/django_txmsg/deadletter/")
        call_command("dead_letters", "list", "--limit", "2", stdout=io.StringIO())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


@pytest.mark.parametrize(
    "body",
    [r'{"name": "\ud83d"}', r'"\ud83d"', r'{"args": [], "kwargs": {"\ud83d": 1}}'],
)
def test_half_of_a_surrogate_pair_is_shown_as_its_escape(
    operator: Client, settings: Any, body: str
) -> None:
    settings.TXMSG = {**settings.TXMSG, "EDIT_DEAD_LETTERS": True}
    letter = factories.DeadLetterFactory(body=body.encode())
    letter.headers[wire.TASK] = "shop.tasks.pay"
    letter.save()
    out = io.StringIO()
    call_command("dead_letters", "show", str(letter.pk), "--json", stdout=out)

    page = operator.get(page_of(letter)).content.decode()
    whole = operator.get(f"{page_of(letter)}body/dead/{letter.pk}/").content.decode()
    copy = f"/admin/django_txmsg/deadletter/{letter.pk}/copy/"
    edited = operator.get(copy).context["form"]["body"]
    operator.post(copy, {"headers": "", "body": edited + " ", "send": "1"})

    assert all(r"\ud83d" in text for text in (page, whole, out.getvalue()))
    out.getvalue().encode()
    (sent,) = OutboxMessage.objects.values_list("body", flat=True)
    assert json.loads(bytes(sent)) == json.loads(body)


@pytest.mark.django_db(databases=["default", "other"])
def test_buttons_change_the_message_that_the_page_shows(
    somebody: Callable[..., Client], settings: Any
) -> None:
    session = "django_txmsg.middleware.OutboxMiddleware"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, session]
    settings.TXMSG = {**settings.TXMSG, "HTTP": {"USING": "other"}}
    rights = ("view_outboxmessage", "cancel_outboxmessage", "reschedule_outboxmessage")
    client = somebody(*rights)
    row = factories.OutboxMessageFactory()
    other = factories.OutboxMessageFactory.build(message_id=row.message_id)
    other.save(using="other")
    due = other.due_at

    client.post(f"{page_of(row)}reschedule/", {"minutes": "5"})
    client.post(f"{page_of(row)}cancel/")

    row.refresh_from_db()
    other.refresh_from_db()
    assert (row.state, other.state) == ("cancelled", "pending")
    assert row.due_at > due + dt.timedelta(minutes=4)
    assert other.due_at == due


def test_message_that_the_relay_gave_up_and_that_was_redelivered_is_pending(
    somebody: Callable[..., Client],
) -> None:
    dead = factories.OutboxMessageFactory(dead=True)
    letter = factories.DeadLetterFactory(
        message_id=dead.message_id, stage="", redelivered=True
    )
    again = factories.OutboxMessageFactory(
        message_id=dead.message_id, replay_id=f"dead-letter-{letter.pk}-1"
    )
    client = somebody("view_outboxmessage", "view_deadletter", "cancel_outboxmessage")

    answer = client.get(page_of(dead))
    assert answer.context["state"] == "pending"
    assert "Cancel the message" in answer.content.decode()
    again.dispatched_at = again.created_at
    again.save()
    assert client.get(page_of(dead)).context["state"] == "dispatched"


def test_the_page_of_an_expired_message_does_not_blame_the_broker(
    operator: Client,
) -> None:
    letter = factories.DeadLetterFactory(stage="", reason="expired", attempts=1)

    page = operator.get(page_of(letter)).content.decode()

    assert "It expired before it was sent" in page
    assert "The broker did not accept it" not in page


def test_a_body_is_that_of_the_message_in_the_address(operator: Client) -> None:
    one, other = factories.DeadLetterFactory.create_batch(2)
    answer = operator.get(f"{page_of(one)}body/dead/{other.pk}/")
    assert answer.status_code == 404
