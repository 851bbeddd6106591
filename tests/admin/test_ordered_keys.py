"""Messages that wait at ordered stages, in the commands and in the admin."""

from __future__ import annotations

import datetime as dt
import io
import json
import uuid
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from django_txmsg import health, stages
from django_txmsg.models import DeadLetter, InboxMessage
from django_txmsg.monitoring import alarms
from django_txmsg.monitoring import status as monitoring
from tests import factories
from tests.running import declared

PARKED = {"due_at": timezone.now(), "headers": {}, "body": b""}


@pytest.fixture
def letter(operator: Client) -> DeadLetter:
    """A dead letter. Two messages of its key have waited behind it for an hour."""
    found: DeadLetter = factories.DeadLetterFactory(
        stage="tests.in_order", headers={"txmsg-key": "k"}
    )
    factories.InboxMessageFactory(
        message_id=found.message_id,
        stage=found.stage,
        processed_at=None,
        dead_at=timezone.now(),
    )
    before = found.message_id
    for number in range(2):
        row = factories.InboxMessageFactory(
            stage=found.stage, processed_at=None, headers={}, body=b"null",
            due_at=timezone.now() + dt.timedelta(minutes=1),
        )  # fmt: skip
        InboxMessage.objects.filter(pk=row.pk).update(
            key="k", waits_for=before, waits_since=factories.ago(seconds=3600),
            after_at=factories.ago(seconds=7200 - number),
        )  # fmt: skip
        before = row.message_id
    return found


def printed(name: str, *arguments: str) -> str:
    """Return the output of a command."""
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=out)
    return out.getvalue()


def status(*arguments: str) -> str:
    """Return the output of message_status, which exits with 1."""
    out = io.StringIO()
    with pytest.raises(SystemExit, match="1"):
        call_command("message_status", *arguments, stdout=out)
    return out.getvalue()


def page(of: DeadLetter, operator: Client) -> str:
    """Return the message's own page."""
    return operator.get(url(of.message_id)).content.decode()


def url(message_id: object) -> str:
    return f"/admin/django_txmsg/outboxmessage/{message_id}/"


def test_dead_letter_shows_how_many_wait_behind_it(
    letter: DeadLetter, operator: Client
) -> None:
    told = "2 wait behind this one. If you redeliver it, it runs, and then they do"
    assert told in printed("dead_letters", "show", str(letter.pk))
    assert told in page(letter, operator)


def test_blocked_keys_are_listed_with_the_reason(
    letter: DeadLetter, operator: Client
) -> None:
    listed = printed("order", "list")
    assert f"key k: 2 waiting for {letter.message_id}, which is dead" in listed
    (one,) = json.loads(printed("order", "list", "--json"))
    assert (one["stage"], one["count"]) == ("tests.in_order", 2)
    told = status()
    assert "2 blocked behind others" in told
    assert "2 messages of key 'k' wait at stage tests.in_order" in told
    (one,) = json.loads(status("--json"))["held_keys"]
    assert (one["key"], one["count"], one["why"]) == ("k", 2, "which is dead")
    overview = operator.get("/admin/django_txmsg/").content.decode()
    assert "2 messages of key &#x27;k&#x27; wait" in overview
    rows = operator.get("/admin/django_txmsg/inboxmessage/?state=blocked")
    assert rows.content.decode().count("of its key") == 2
    assert f'after <a href="{url(letter.message_id)}">' in rows.content.decode()


def test_page_of_a_blocked_message_says_what_it_waits_for(
    letter: DeadLetter, operator: Client
) -> None:
    blocked = InboxMessage.objects.filter(waits_for__isnull=False).order_by("after_at")
    before = letter.message_id
    for row, why in zip(blocked, ("is dead", "waits too"), strict=True):
        shown = operator.get(url(row.message_id))
        text = shown.content.decode()
        link = f'<a href="{url(before)}"><code>{before}</code></a>'
        assert f", waits for {link}, which {why}" in text
        assert "next attempt" not in [one.what for one in shown.context["events"]]
        before = row.message_id


def test_page_of_a_skipped_message_says_that_it_runs_late(operator: Client) -> None:
    skips: stages.Order = "skip"
    with declared(lambda message: None, "tests.skipping", ordered=skips):
        letter = factories.DeadLetterFactory(
            stage="tests.skipping", headers={"txmsg-key": "k"}
        )
        assert "it runs after them" in page(letter, operator)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({}, "is being processed, or whose worker has died"),
        (PARKED, "waits for its redelivery"),
        ({**PARKED, "lease_token": uuid.uuid4()}, "is being processed, or whose"),
        ({"processed_at": timezone.now()}, "is processed"),
        (None, "has not arrived"),
    ],
)
def test_state_of_a_predecessor_is_shown(
    letter: DeadLetter, what: dict[str, Any] | None, why: str
) -> None:
    rows = InboxMessage.objects.filter(message_id=letter.message_id)
    if what is None:
        rows.delete()
    else:
        rows.update(**{"dead_at": None, **what})
    assert why in printed("order", "list")


def test_keys_of_a_paused_stage_raise_no_alarm(
    letter: DeadLetter, operator: Client
) -> None:
    assert health.look()["ordered"]["held_keys"] == 1
    factories.StageStateFactory(stage=letter.stage)

    ordered = health.look()["ordered"]
    assert ordered == {"waiting": 2, "held_keys": 0, "full_stages": 0}
    picture = monitoring.read()
    assert picture.stages[letter.stage].line.count == 2
    assert "order" not in {alarm.kind for alarm in alarms.of(picture)}
    assert f"key k: 2 waiting for {letter.message_id}" in printed("order", "list")


def test_list_names_a_predecessor_that_its_relay_gave_up(letter: DeadLetter) -> None:
    InboxMessage.objects.filter(message_id=letter.message_id).delete()
    factories.OutboxMessageFactory(
        message_id=letter.message_id, dead_at=timezone.now(), last_error="rejected"
    )
    assert "which its relay has given up" in printed("order", "list")


def test_messages_that_wait_in_a_circle_are_reported(letter: DeadLetter) -> None:
    rows = InboxMessage.objects.filter(waits_for__isnull=False).order_by("after_at")
    InboxMessage.objects.filter(pk=rows[0].pk).update(waits_for=rows[1].message_id)
    assert "in a circle" in printed("order", "list")


def test_commands_report_that_no_message_waits(operator: Client) -> None:
    assert "No message waits" in printed("order", "list")
    assert str(uuid.UUID(int=0)) not in printed("message_status")
