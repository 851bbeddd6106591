"""The confirmation page for dead letters, and its action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_txmsg.models import BulkOperation, InboxMessage, OutboxMessage
from tests import factories

URL = "/admin/django_txmsg/deadletter/confirm/"


def test_the_question_says_how_many_how_old_and_where(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(3, created_at=factories.ago(hours=5))
    factories.DeadLetterFactory(stage="mail.send", deaths=2)

    page = operator.get(URL, {"kind": "redeliver"}).content.decode()

    assert "Redeliver 4 messages?" in page
    assert "5 h" in page
    assert "mail.send" in page
    assert "goes into the outbox again" in page
    assert "1 failed again" in page
    assert OutboxMessage.objects.count() == 0


def test_letters_older_than_the_inbox_give_a_warning(operator: Client) -> None:
    factories.DeadLetterFactory(created_at=factories.ago(days=20))
    factories.DeadLetterFactory()

    page = operator.get(URL, {"kind": "redeliver"}).content.decode()

    assert "1 older than the inbox remembers" in page
    assert "after 14 days" in page
    page = operator.get(URL, {"kind": "discard"}).content.decode()
    assert "older than the inbox" not in page


def test_the_page_says_that_discarding_an_undo_in_doubt_confirms_it(
    operator: Client,
) -> None:
    factories.DeadLetterFactory(reason="undo_in_doubt")
    factories.DeadLetterFactory()

    page = operator.get(URL, {"kind": "discard"}).content.decode()

    assert "1 undo in doubt" in page
    page = operator.get(URL, {"kind": "redeliver"}).content.decode()
    assert "in doubt" not in page


def test_redelivered_letter_shows_its_resolution(operator: Client) -> None:
    letter = factories.DeadLetterFactory()
    factories.InboxMessageFactory(message_id=letter.message_id, dead=True, attempts=7)

    response = operator.post(
        URL, {"kind": "redeliver", "ids": str(letter.pk)}, follow=True
    )

    letter.refresh_from_db()
    assert letter.resolution == "redelivered"
    assert letter.resolved_by.startswith("user-")
    stored = OutboxMessage.objects.get()
    assert (stored.message_id, bytes(stored.body)) == (
        letter.message_id,
        bytes(letter.body),
    )
    assert not InboxMessage.objects.exists()
    assert "Redelivered 1 message." in response.content.decode()
    assert response.redirect_chain[0][0].endswith(f"/{letter.message_id}/")


def test_message_processed_meanwhile_is_skipped_and_reported(operator: Client) -> None:
    letters = factories.DeadLetterFactory.create_batch(3)
    factories.InboxMessageFactory(message_id=letters[0].message_id)

    response = operator.post(
        URL, {"kind": "redeliver", "stage": "orders.place"}, follow=True
    )

    page = response.content.decode()
    assert "Redelivered 2 messages. 1 skipped" in page
    assert "has processed message" in page
    letters[0].refresh_from_db()
    assert letters[0].resolution == "open"


def test_force_redelivers_processed_messages(operator: Client) -> None:
    letter = factories.DeadLetterFactory()
    factories.InboxMessageFactory(message_id=letter.message_id)

    operator.post(URL, {"kind": "redeliver", "ids": str(letter.pk), "force": "1"})

    assert not InboxMessage.objects.exists()
    assert OutboxMessage.objects.count() == 1
    assert "even if processed" in LogEntry.objects.get().change_message


def test_discard_and_restore(operator: Client) -> None:
    letter = factories.DeadLetterFactory()

    operator.post(URL, {"kind": "discard", "ids": str(letter.pk)})
    letter.refresh_from_db()
    assert letter.resolution == "discarded"

    operator.post(URL, {"kind": "restore", "ids": str(letter.pk)})
    letter.refresh_from_db()
    assert letter.resolution == "open"
    assert letter.resolved_at is None
    assert OutboxMessage.objects.count() == 0


def test_action_on_one_letter_leads_to_its_message(operator: Client) -> None:
    factories.DeadLetterFactory(discarded=True)
    letter = factories.DeadLetterFactory()
    factories.DeadLetterFactory(discarded=True)

    answer = operator.post(URL, {"kind": "discard", "stage": "orders.place"})

    assert str(letter.message_id) in answer.headers["Location"]


def test_every_action_is_logged_with_its_count_and_filter(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(2, stage="mail.send")

    operator.post(URL, {"kind": "discard", "stage": "mail.send"})

    entry = LogEntry.objects.get()
    assert entry.change_message == "Discard 2 dead letters; filter: stage mail.send."
    operation = BulkOperation.objects.get()
    assert entry.object_id == str(operation.pk)
    assert (operation.done, operation.state) == (2, "done")


def test_many_are_left_to_the_background(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(201)

    question = operator.get(URL, {"kind": "discard"}).content.decode()
    response = operator.post(URL, {"kind": "discard"})

    operation = BulkOperation.objects.get()
    assert "in the background" in question
    assert response["Location"].endswith(f"/bulkoperation/{operation.pk}/change/")
    assert (operation.state, operation.done, operation.total) == ("running", 0, 201)


def test_a_rate_is_left_to_the_background_too(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(2)

    operator.post(URL, {"kind": "redeliver", "rate": "1.5"})

    operation = BulkOperation.objects.get()
    assert (operation.rate, operation.state) == (1.5, "running")


@pytest.mark.parametrize(
    "query",
    [
        {"kind": "redeliver", "ids": "one"},
        {"kind": "redeliver", "before": "yesterday"},
        {"kind": "explode"},
        {"kind": "redeliver", "ids": "4711"},
        {"kind": "redeliver", "ids": "99999999999999999999"},
        {"kind": "redeliver", "ids": "-1,0"},
        {"kind": "redeliver", "ids": ",".join(map(str, range(1, 6000)))},
    ],
)
def test_impossible_action_redirects_back(
    operator: Client, query: dict[str, Any]
) -> None:
    response = operator.get(URL, query)

    assert response["Location"] == "/admin/django_txmsg/deadletter/"
    assert BulkOperation.objects.count() == 0


@pytest.mark.parametrize("rate", ["inf", "-inf", "nan", "1e-300", "1e300", "0", "x"])
def test_a_rate_that_no_batch_could_keep_is_refused(
    operator: Client, rate: str
) -> None:
    factories.DeadLetterFactory()

    response = operator.post(URL, {"kind": "redeliver", "rate": rate}, follow=True)

    assert "rate" in response.content.decode() or rate == "x"
    assert BulkOperation.objects.count() == 0


@pytest.mark.parametrize(
    ("kind", "permission"),
    [
        ("redeliver", "discard_deadletter"),
        ("discard", "redeliver_deadletter"),
        ("restore", "redeliver_deadletter"),
    ],
)
def test_each_action_needs_its_own_permission(
    somebody: Callable[..., Client], kind: str, permission: str
) -> None:
    letter = factories.DeadLetterFactory(discarded=kind == "restore")
    client = somebody("view_deadletter", permission)
    query = {"kind": kind, "ids": str(letter.pk)}

    assert client.get(URL, query).status_code == 403
    assert client.post(URL, query).status_code == 403
    letter.refresh_from_db()
    assert letter.resolution == ("discarded" if kind == "restore" else "open")


def test_the_reason_is_stored_and_logged_with_the_action(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(2)

    operator.post(URL, {"kind": "discard", "why": " a duplicate import "})

    operation = BulkOperation.objects.get()
    assert operation.why == "a duplicate import"
    entry = LogEntry.objects.get().change_message
    assert entry == "Discard 2 dead letters; filter: all; why: a duplicate import."
    page = operator.get(f"/admin/django_txmsg/bulkoperation/{operation.pk}/change/")
    assert "a duplicate import" in page.content.decode()


def test_the_question_names_the_error_in_words(operator: Client) -> None:
    for number in range(2):
        factories.DeadLetterFactory(
            fingerprint="c0ffee11c0ffee11", exception=f"OutOfStock: {number} left"
        )
    factories.DeadLetterFactory(exception="ReadTimeout: 10 s")

    one = {"kind": "discard", "fingerprint": "c0ffee11c0ffee11"}
    assert "OutOfStock: 1 left" in operator.get(URL, one).content.decode()
    assert "OutOfStock" not in operator.get(URL, {"kind": "discard"}).content.decode()


@pytest.mark.parametrize("method", ["get", "post"])
def test_operation_on_runs_is_not_an_operation_on_dead_letters(
    somebody: Callable[..., Client], method: str
) -> None:
    factories.DeadLetterFactory()
    client = somebody("view_deadletter", "go_back_run")

    answer = getattr(client, method)(URL, {"kind": "go-back"})

    assert (answer.status_code, BulkOperation.objects.count()) == (302, 0)
