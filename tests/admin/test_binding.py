"""A confirmed action changes exactly the rows that the confirmation showed. If the
action cannot be logged, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection
from django.test import Client

from django_txmsg.models import (
    AuditEntry,
    BulkOperation,
    DeadLetter,
    FailureNote,
    OutboxMessage,
    QueueMessage,
    QueueSubscription,
    StageState,
)
from django_txmsg.models.monitoring import Deed
from tests import factories
from tests.factories import ago

DEAD = "/admin/django_txmsg/deadletter/"
URL = f"{DEAD}confirm/"


def asked(client: Client, **query: Any) -> dict[str, Any]:
    """Request the confirmation page, and return the data of its form."""
    context = client.get(URL, query).context
    return {"kind": context["kind"], "shown": context["shown"], **query}


def open_letters() -> int:
    return DeadLetter.objects.filter(resolution="open").count()


@pytest.mark.parametrize("kind", ["discard", "redeliver"])
def test_letter_that_dies_after_the_question_is_untouched(
    operator: Client, kind: str
) -> None:
    before = factories.DeadLetterFactory(stage="", created_at=ago(minutes=1))
    form = asked(operator, kind=kind)
    after = factories.DeadLetterFactory.create_batch(
        150, stage="", fingerprint="b" * 16
    )

    operator.post(URL, form)

    before.refresh_from_db()
    assert (
        before.resolution == {"discard": "discarded", "redeliver": "redelivered"}[kind]
    )
    assert open_letters() == len(after)
    assert BulkOperation.objects.get().total == 1


def test_letter_that_died_again_asks_for_confirmation_again(
    operator: Client,
) -> None:
    first, _ = factories.DeadLetterFactory.create_batch(2, created_at=ago(minutes=1))
    form = asked(operator, kind="discard")
    # It was redelivered and has died again: the same row, one death older.
    DeadLetter.objects.filter(pk=first.pk).update(created_at=ago(seconds=-1), deaths=2)

    page = operator.post(URL, form).content.decode()

    assert "1 of the 2 that you were shown have changed since" in page
    assert "Discard 2 messages?" in page or "Discard 1 message?" in page
    assert open_letters() == 2
    assert not BulkOperation.objects.exists()
    assert not AuditEntry.objects.exists()


def test_letter_resolved_meanwhile_asks_for_confirmation_again(
    operator: Client,
) -> None:
    letters = factories.DeadLetterFactory.create_batch(3, created_at=ago(minutes=1))
    form = asked(operator, kind="discard")
    operator.post(URL, {"kind": "discard", "ids": str(letters[0].pk)})

    page = operator.post(URL, form).content.decode()
    assert "Discard 2 messages?" in page
    assert open_letters() == 2
    operator.post(URL, asked(operator, kind="discard"))
    assert open_letters() == 0


@pytest.mark.parametrize("gone", [0, 1])
def test_letter_restored_meanwhile_asks_for_confirmation_again(
    operator: Client, gone: int
) -> None:
    letters = factories.DeadLetterFactory.create_batch(2, created_at=ago(minutes=1))
    restored = factories.DeadLetterFactory(created_at=ago(minutes=1), discarded=True)
    factories.DeadLetterFactory(created_at=ago(minutes=1))
    form = asked(operator, kind="discard")
    for one in letters[:gone]:
        operator.post(URL, {"kind": "redeliver", "ids": str(one.pk)})
    operator.post(URL, {"kind": "restore", "ids": str(restored.pk)})

    page = operator.post(URL, form).content.decode()

    assert "others match now than the 3 that you were shown" in page
    assert f"Discard {4 - gone} messages?" in page
    assert open_letters() == 4 - gone


def test_page_of_a_discard_restores_what_that_operation_discarded(
    operator: Client,
) -> None:
    mine, others = factories.DeadLetterFactory.create_batch(2)
    for one in (mine, others):
        operator.post(URL, {"kind": "discard", "ids": str(one.pk)})
    first = BulkOperation.objects.earliest("pk")
    page = operator.get(f"/admin/django_txmsg/bulkoperation/{first.pk}/change/")
    query = f"kind=restore&operation={first.pk}"
    assert query.replace("&", "&amp;") in page.content.decode()

    operator.post(f"{URL}?{query}", asked(operator, kind="restore", operation=first.pk))

    resolutions = DeadLetter.objects.order_by("pk").values_list("resolution", flat=True)
    assert list(resolutions) == ["open", "discarded"]


@pytest.mark.django_db
def test_a_dry_runs_token_binds_the_command() -> None:
    factories.DeadLetterFactory.create_batch(2, created_at=ago(minutes=1))
    out = StringIO()
    call_command("dead_letters", "discard", "--all", "--dry-run", stdout=out)
    token = out.getvalue().split("--shown ")[1].strip()
    factories.DeadLetterFactory(stage="other")

    call_command("dead_letters", "discard", "--all", "--shown", token, stdout=out)

    assert "Discarded 2 messages." in out.getvalue()
    assert DeadLetter.objects.get(resolution="open").stage == "other"
    with pytest.raises(CommandError, match="2 of the 2"):
        call_command("dead_letters", "discard", "--all", "--shown", token, stdout=out)
    with pytest.raises(CommandError, match="Not a token of --dry-run"):
        call_command("dead_letters", "discard", "--all", "--shown", "x", stdout=out)


@pytest.fixture
def no_log() -> Iterator[None]:
    """Make writing to Django's admin log fail."""

    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "django_admin_log" in sql and sql.startswith("INSERT"):
            raise DatabaseError("the disk is full")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        yield


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("no_log")
def test_no_action_runs_if_it_cannot_be_logged(
    somebody: Callable[..., Client],
) -> None:
    client = somebody(
        "view_deadletter", "view_outboxmessage", "view_stagestate",
        "discard_deadletter", "redeliver_deadletter", "pause_stage",
        "cancel_outboxmessage",
    )  # fmt: skip
    client.raise_request_exception = False
    letter = factories.DeadLetterFactory()
    row = factories.OutboxMessageFactory()
    for address, form in (
        (URL, {"kind": "discard", "ids": str(letter.pk)}),
        (f"{DEAD}note/", {"fingerprint": letter.fingerprint, "note": "x"}),
        ("/admin/django_txmsg/stagestate/pause/", {"stage": "orders.place"}),
        (f"/admin/django_txmsg/outboxmessage/{row.message_id}/cancel/", {}),
    ):
        assert client.post(address, form).status_code == 500, address

    assert open_letters() == 1
    assert not BulkOperation.objects.exists()
    assert not FailureNote.objects.exists()
    assert not StageState.objects.exclude(paused_at=None).exists()
    assert OutboxMessage.objects.get().state == "pending"
    assert not AuditEntry.objects.exists()


def test_pages_and_commands_leave_the_same_trace(operator: Client) -> None:
    letters = factories.DeadLetterFactory.create_batch(2)
    error = letters[0].fingerprint
    row = factories.OutboxMessageFactory()
    QueueSubscription.objects.create(topic="topic:news", subscriber="shop.gone")
    factories.QueueMessageFactory(queue="topic:news|shop.gone")
    queue = QueueMessage.objects.get()
    operator.post(URL, {"kind": "discard", "ids": str(letters[0].pk), "why": "old"})
    factories.StageStateFactory(paused_at=None)
    operator.post("/admin/django_txmsg/stagestate/pause/", {"stage": "orders.place"})
    run: list[tuple[str, ...]] = [
        ("dead_letters", "discard", "--all", "--why", "old"),
        (
            "dead_letters",
            "mute",
            "--fingerprint",
            letters[0].fingerprint,
            "--text",
            "x",
        ),
        ("txmsg", "cancel", str(row.message_id), "--why", "paid"),
        ("subscriptions", "remove", "topic:news", "shop.gone"),
    ]
    for words in run:
        call_command(*words, stdout=StringIO())

    texts = list(AuditEntry.objects.order_by("pk").values_list("text", flat=True))

    assert texts[:2] == [
        "Discard 1 dead letter; filter: 1 selected; why: old.",
        "Paused stage orders.place.",
    ]
    assert texts[2] == "Discard 1 dead letter; filter: all; why: old."
    assert texts[3] == f"Muted failures {error}: x"
    assert texts[4] == f"Cancelled message {row.message_id}: paid"
    assert texts[5].startswith("Remove the subscription shop.gone to topic:news")
    assert queue is not None
    by = AuditEntry.objects.order_by("pk").values_list("by", flat=True)
    assert [one.startswith("command: ") for one in by] == [False] * 2 + [True] * 4
    assert LogEntry.objects.count() == 2


def test_the_audit_is_a_page_that_finds_and_changes_nothing(
    somebody: Callable[..., Client],
) -> None:
    AuditEntry.objects.record("grace", "Paused stage orders.place.", deed=Deed.PAUSE)
    AuditEntry.objects.record(
        "command: root", "Discard 3 dead letters.", deed=Deed.DISCARD
    )
    client = somebody("view_auditentry")
    audit = "/admin/django_txmsg/auditentry/"

    assert "Audit</a>" in client.get(audit).content.decode()
    found = client.get(audit, {"q": "paused"}).content.decode()
    assert ("Paused stage" in found, "Discard 3" in found) == (True, False)
    found = client.get(audit, {"q": "command: "}).content.decode()
    assert ("Paused stage" in found, "Discard 3" in found) == (False, True)
    assert client.get(f"{audit}add/").status_code == 403


def test_note_does_not_overwrite_an_unseen_newer_note(
    operator: Client,
) -> None:
    letter = factories.DeadLetterFactory()
    [group] = operator.get(DEAD).context["groups"]
    stale = {"fingerprint": letter.fingerprint, "note": "muted", "muted": "1"}
    stale["seen"] = group["note"].version if group["note"] else ""
    fresh = {**stale, "note": "DO NOT REDELIVER: it charges twice"}
    operator.post(f"{DEAD}note/", fresh)

    page = operator.post(f"{DEAD}note/", stale, follow=True).content.decode()

    assert "has written a note on this error in the meantime" in page
    assert FailureNote.objects.get().note == fresh["note"]
    [group] = operator.get(DEAD).context["groups"]
    operator.post(f"{DEAD}note/", {**stale, "seen": group["note"].version})
    assert FailureNote.objects.get().note == "muted"


def test_a_note_needs_an_existing_error(operator: Client) -> None:
    operator.post(f"{DEAD}note/", {"fingerprint": "nonsense", "note": "x"})
    assert not FailureNote.objects.exists()


def test_user_who_may_start_a_bulk_operation_may_see_it(
    somebody: Callable[..., Client],
) -> None:
    client = somebody("view_deadletter", "redeliver_deadletter")
    factories.DeadLetterFactory.create_batch(201)

    answer = client.post(URL, {"kind": "redeliver"}, follow=True)

    assert answer.status_code == 200
    assert "Bulk operations" in client.get(DEAD).content.decode()
    nobody = somebody("view_deadletter")
    assert "Bulk operations" not in nobody.get(DEAD).content.decode()


def test_action_is_refused_to_a_user_who_may_not_see_its_page(
    somebody: Callable[..., Client],
) -> None:
    letter = factories.DeadLetterFactory()
    row = factories.OutboxMessageFactory()
    client = somebody("redeliver_deadletter", "cancel_outboxmessage")

    assert client.get(URL, {"kind": "redeliver"}).status_code == 403
    form = {"kind": "redeliver", "ids": str(letter.pk)}
    assert client.post(URL, form).status_code == 403
    cancel = f"/admin/django_txmsg/outboxmessage/{row.message_id}/cancel/"
    assert client.post(cancel).status_code == 403
    assert OutboxMessage.objects.get().state == "pending"
    assert open_letters() == 1


def test_letter_that_is_discarded_after_the_question_has_not_died(
    operator: Client,
) -> None:
    factories.DeadLetterFactory(discarded=True, created_at=ago(minutes=1))
    form = asked(operator, kind="restore")
    factories.DeadLetterFactory(discarded=True)

    page = operator.post(URL, form, follow=True).content.decode()

    assert "since you opened this page" not in page
    assert open_letters() == 1
