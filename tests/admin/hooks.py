"""Hooks for processes that these tests start. A hook makes its process wait at a step,
or declares stages."""

from __future__ import annotations

from typing import Any

from django_txmsg import stages
from django_txmsg.dead_letters import resolution
from django_txmsg.envelope.message import Message
from tests.app.models import Effect
from tests.faults import hang_here, wait_until

FRAGILE, SOUND, SLOW = "admin.fragile", "admin.sound", "admin.slow"


def hang_after_the_work_of_the_third_batch() -> None:
    """Hang after the third batch is redelivered, before its transaction commits."""
    redeliver = resolution.redeliver
    batches = 0

    def count_and_hang(*arguments: Any, **options: Any) -> None:
        nonlocal batches
        redeliver(*arguments, **options)
        batches += 1
        if batches == 3:
            hang_here("third batch redelivered, not committed")

    resolution.redeliver = count_and_hang


def declare_stages() -> None:
    """Declare a stage that fails until its problem is fixed, and one that never
    fails."""

    def fragile(message: Message) -> None:
        if not Effect.objects.filter(name="mended").exists():
            raise LookupError("the world is broken")
        Effect.objects.create(name="fragile", message_id=str(message.id))

    def sound(message: Message) -> None:
        Effect.objects.create(name="sound", message_id=str(message.id))

    stages.stage(FRAGILE)(fragile)
    stages.stage(SOUND)(sound)


def declare_a_slow_stage() -> None:
    """Declare a stage whose second attempt runs until the test allows it to end."""

    def slow(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise LookupError("the first attempt fails")
        wait_until(lambda: Effect.objects.filter(name="go"), message="permission")
        Effect.objects.create(name="slow", message_id=str(message.id))

    stages.stage(SLOW, transaction="none")(slow)
