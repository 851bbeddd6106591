"""The operator's buttons with a real `manage.py consume`: each click has its effect."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_txmsg.models import DeadLetter, InboxMessage, Worker
from tests import running
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until

from .hooks import FRAGILE, SOUND

ADMIN = "/admin/django_txmsg/"
SETTINGS = {
    "REDELIVERY": {"MAX_REDELIVERIES": 0},
    "CONSUME": {"HEARTBEAT": 0.5},
    "DISPATCH_ON_COMMIT": "off",
}


@pytest.fixture
def boss(transactional_db: None) -> Client:
    """A user with all permissions."""
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    return client


@pytest.fixture
def consumer(
    transactional_db: None, manage: Callable[..., ManageProcess]
) -> ManageProcess:
    """A running consumer of both stages."""
    return manage("consume", hook="tests.admin.hooks.declare_stages", txmsg=SETTINGS)


@pytest.mark.usefixtures("consumer")
def test_a_dead_letter_is_mended_redelivered_and_processed_once(boss: Client) -> None:
    with running.txmsg():
        sent = running.send(FRAGILE, {"order": 1})
        letter = wait_until(lambda: DeadLetter.objects.first(), message="a dead letter")
        assert "the world is broken" in boss.get(f"{ADMIN}deadletter/").content.decode()

        Effect.objects.create(name="mended", message_id="")
        boss.post(
            f"{ADMIN}deadletter/confirm/",
            {"kind": "redeliver", "fingerprint": letter.fingerprint},
        )
        running.ship()

        wait_until(lambda: Effect.objects.filter(name="fragile"), message="the effect")
        wait_until(lambda: InboxMessage.objects.get().processed_at, message="processed")
    assert [one.message_id for one in Effect.objects.filter(name="fragile")] == [
        str(sent.id)
    ]
    assert DeadLetter.objects.get().resolution == "redelivered"
    page = boss.get(f"{ADMIN}outboxmessage/{sent.id}/").content.decode()
    assert "the world is broken" in page
    assert ">processed<" in page


@pytest.mark.usefixtures("consumer")
def test_a_paused_stage_takes_nothing_until_it_is_resumed(boss: Client) -> None:
    def heartbeat() -> dt.datetime | None:
        return Worker.objects.values_list("heartbeat_at", flat=True).first()

    began = wait_until(heartbeat, message="a consumer")
    Effect.objects.create(name="mended", message_id="")
    boss.post(f"{ADMIN}stagestate/pause/", {"stage": FRAGILE})
    # The promise is two seconds, by the consumer's own clock.
    two_seconds = began + dt.timedelta(seconds=2.5)
    wait_until(lambda: (heartbeat() or began) > two_seconds, message="2.5 seconds")

    with running.txmsg():
        running.send(FRAGILE, {})
        running.send(SOUND, {})
        wait_until(
            lambda: Effect.objects.filter(name="sound"), message="the other stage"
        )
        assert not Effect.objects.filter(name="fragile").exists()

        boss.post(f"{ADMIN}stagestate/resume/", {"stage": FRAGILE})
        wait_until(lambda: Effect.objects.filter(name="fragile"), message="the effect")
