"""An operator changes a rate for a limited time. Consumers use the new rate, and
waiting messages get new slots. Then the change ends."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from django_txmsg.consuming.consumer import Consumer
from django_txmsg.envelope.stage_options import Rate
from django_txmsg.models import AuditEntry, RateLine, StageState
from tests.app.models import Effect
from tests.factories import ago
from tests.faults import wait_until
from tests.integration.test_rates import HOUR, effect, seconds_until, waiting
from tests.integration.test_refused_statements import trigger
from tests.integration.test_stop_message import consuming
from tests.running import committing, declared, send, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def rate(*arguments: str) -> str:
    out = StringIO()
    call_command("txmsg", "rate", *arguments, stdout=out)
    return out.getvalue().strip()


def obey(consumer: Consumer) -> None:
    consumer._obey()
    consumer._begin("default")


def hours() -> list[float]:
    return [seconds_until(row) / HOUR for row in waiting()]


def test_what_waits_moves_there_and_back() -> None:
    with declared(effect, rate="1/h", per="tenant") as one:
        for _ in range(3):
            send(one.destination)
        step(one, times=3)
        consumer = Consumer([one])
        said = rate("set", one.name, "2/h", "--for", "30m")
        obey(consumer)
        assert hours() == pytest.approx([0.5, 1], abs=0.05)
        assert said == f"Stage {one.name} has a rate of 2/h for 30 min."
        assert rate("list").startswith(f"{one.name}  1/h per tenant  CHANGED to 2/h")

        send(one.destination)
        (thread,) = consumer.threads
        thread._step()
        thread._close()
        assert hours() == pytest.approx([0.5, 1, 1.5], abs=0.05)
        assert waiting()[-1].last_error == "over the rate of 2/h"

        StageState.objects.update(rate_until=ago(seconds=1))
        obey(consumer)
        assert hours() == pytest.approx([1, 2, 3], abs=0.05)
        assert rate("list") == f"{one.name}  1/h per tenant"
    assert AuditEntry.objects.get().text == said


def test_a_consumer_obeys_at_once_and_when_the_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "django_txmsg.consumer")
    with declared(effect, rate="1/h") as one, consuming(one):
        send(one.destination)
        send(one.destination)
        wait_until(lambda: len(waiting()) == 1, deadline=30)
        assert Effect.objects.count() == 1
        rate("set", one.name, "100/s", "--for", "3s")
        wait_until(lambda: Effect.objects.count() == 2, deadline=20)
        wait_until(lambda: RateLine.objects.get().period == HOUR, deadline=20)
        wait_until(lambda: "its rate is now 1/h" in caplog.text, deadline=5)


def test_a_process_that_starts_meanwhile_obeys_too() -> None:
    with declared(effect, rate="1/h") as one:
        rate("set", one.name, "2/h")
        first, second = Consumer([one]), Consumer([one])
        for consumer in (first, second):
            obey(consumer)
            assert str(consumer.threads[0].stage.rate) == "2/h"
        assert rate("reset", one.name) == f"Stage {one.name} has its own rate again."
        obey(first)
        assert first.threads[0].stage.rate == one.rate


def test_a_new_rate_that_the_database_refuses_at_the_start_is_recorded_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with declared(effect, rate="1/h") as one:
        send(one.destination)
        send(one.destination)
        step(one, times=2)
        assert hours() == pytest.approx([1], abs=0.05)
        with ExitStack() as refused:
            refused.enter_context(trigger("UPDATE", RateLine._meta.db_table))
            with consuming(replace(one, rate=Rate.parse("2/h"))):
                wait_until(lambda: "cannot record which stages" in caplog.text)
                refused.close()
                wait_until(lambda: hours() == pytest.approx([0.5], abs=0.05))


def test_only_a_stage_with_a_rate_can_have_another() -> None:
    with declared(effect) as plain, declared(effect, rate="1/s") as limited:
        for arguments in (
            ("set", plain.name, "1/s"),
            ("set", "tests.unknown", "1/s"),
            ("set", limited.name, "many"),
            ("set", limited.name, "1/s", "--for", "ever"),
            ("reset", limited.name),
        ):
            with pytest.raises(CommandError):
                rate(*arguments)
    assert not StageState.objects.exists()
    assert not AuditEntry.objects.exists()
    assert rate("list") == "No stage here has a rate."
