"""The button on a message's page stops the message while its handler runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_txmsg import stages
from django_txmsg.models import AuditEntry, InboxMessage, StopRequest
from tests import factories

BUTTON = "Stop the message"


@pytest.fixture
def timed() -> Iterator[str]:
    """A stage whose messages can be stopped."""
    stages.stage("admin.timed", timeout=60.0)(lambda message: None)
    yield "admin.timed"
    stages.unregister("admin.timed")


def page_of(row: InboxMessage) -> str:
    return f"/admin/django_txmsg/outboxmessage/{row.message_id}/"


def test_a_message_that_runs_is_asked_to_stop(
    somebody: Callable[..., Client], timed: str
) -> None:
    row = factories.InboxMessageFactory(stage=timed, processed_at=None)
    client = somebody("view_inboxmessage", "stop_inboxmessage")
    assert BUTTON in client.get(page_of(row)).content.decode()

    form = {"why": "<b>wrong</b>"}
    page = client.post(f"{page_of(row)}stop/", form, follow=True).content.decode()

    assert f"Asked to stop message {row.message_id}" in page
    asked = StopRequest.objects.get()
    assert (asked.stage, asked.message_id) == (timed, row.message_id)
    assert asked.why.startswith("by user-")
    assert asked.why.endswith(": <b>wrong</b>")
    said = f"Asked to stop message {row.message_id}: <b>wrong</b>"
    assert AuditEntry.objects.get().text == said
    assert LogEntry.objects.get().change_message == said


def test_only_a_running_message_with_a_time_out_can_be_stopped(
    somebody: Callable[..., Client], timed: str
) -> None:
    client = somebody("view_inboxmessage", "stop_inboxmessage")
    for row in (
        factories.InboxMessageFactory(stage=timed),
        factories.InboxMessageFactory(stage="admin.untimed", processed_at=None),
    ):
        assert BUTTON not in client.get(page_of(row)).content.decode()
        page = client.post(f"{page_of(row)}stop/", follow=True).content.decode()
        assert "Not asked to stop: it has ended" in page
    assert not StopRequest.objects.exists()
    assert not AuditEntry.objects.exists()


def test_stopping_needs_its_permission(
    viewer: Client, operator: Client, timed: str
) -> None:
    row = factories.InboxMessageFactory(stage=timed, processed_at=None)
    for client in (viewer, operator):
        assert BUTTON not in client.get(page_of(row)).content.decode()
        assert client.post(f"{page_of(row)}stop/").status_code == 403
    assert not StopRequest.objects.exists()
