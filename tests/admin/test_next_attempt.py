"""Pages show when a message's next attempt is due, and whether it is overdue."""

from __future__ import annotations

import re

from django.test import Client

from tests import factories

INBOX, OUTBOX = (
    "/admin/django_txmsg/inboxmessage/",
    "/admin/django_txmsg/outboxmessage/",
)


def test_waiting_message_shows_its_due_time(viewer: Client) -> None:
    factories.OutboxMessageFactory(created_at=factories.ago(minutes=30))
    factories.OutboxMessageFactory(due_at=factories.ago(hours=-2))

    page = viewer.get(OUTBOX).content.decode()

    assert 'txmsg-bad">overdue</span>' in page
    assert re.search(r">30 min( \d+ s)?</time> ago", page)
    assert ">in 2 h<" in page or ">in 1 h 59 min<" in page


def test_a_redelivery_is_overdue_unless_its_stage_is_paused(viewer: Client) -> None:
    late = factories.ago(minutes=20)
    row = factories.InboxMessageFactory(parked=True, due_at=late)
    held = factories.InboxMessageFactory(stage="mail.send", parked=True, due_at=late)
    factories.StageStateFactory(stage="mail.send")

    page = viewer.get(INBOX).content.decode()

    assert page.count('txmsg-bad">overdue</span>') == 1
    assert "when resumed" in page
    shown = viewer.get(f"{OUTBOX}{row.message_id}/").content.decode()
    assert "was due" in shown
    shown = viewer.get(f"{OUTBOX}{held.message_id}/").content.decode()
    assert "next when the stage is resumed" in shown


def test_discarded_message_is_not_shown_as_dead(viewer: Client) -> None:
    letter = factories.DeadLetterFactory(discarded=True)
    factories.InboxMessageFactory(message_id=letter.message_id, dead=True)

    for address in (INBOX, f"{OUTBOX}{letter.message_id}/"):
        page = viewer.get(address).content.decode()
        assert 'txmsg-quiet">discarded</span>' in page, address
        assert 'txmsg-bad">dead</span>' not in page, address


def test_bulk_operation_without_consumer_warns(viewer: Client) -> None:
    operation = factories.BulkOperationFactory()
    address = f"/admin/django_txmsg/bulkoperation/{operation.pk}/change/"

    assert "No consumer is running." in viewer.get(address).content.decode()
    factories.WorkerFactory()
    assert "No consumer is running." not in viewer.get(address).content.decode()
