"""`replay --from dead_letters` requests a bulk operation, which redelivers dead letters
in the same way as the app."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg.dead_letters import bulk
from django_txmsg.envelope.message import Message
from django_txmsg.management.commands.pipeline import source_spec
from django_txmsg.models import BulkOperation, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.spark.errors import UsageError
from django_txmsg.spark.spec import JobSpec
from tests import factories as make
from tests.app.models import Effect
from tests.running import declared, send, ship, step
from tests.spark.conftest import committing
from tests.spark.log import Log
from tests.spark.running import outcome, run

TOPIC = "topic:orders.placed"


def replay(spec: JobSpec, where: str, *more: str) -> dict[str, Any]:
    return run(spec, "replay", "--from", "dead_letters", "--where", where, *more)


@pytest.fixture
def spec(settings: Any) -> JobSpec:
    """The job specification for the tests' own database."""
    return JobSpec((source_spec("default", "tests"),))


@pytest.fixture
def impatient(settings: Any) -> None:
    from tests.running import IMPATIENT

    settings.TXMSG = IMPATIENT


def counting(name: str, *errors: type[Exception]) -> Callable[[Message], None]:
    """Return a handler that records an effect at each attempt. Each of the first
    attempts raises one of these exceptions; later attempts succeed."""
    left = list(errors)

    def handle(message: Message) -> None:
        Effect.objects.create(name=name, message_id=str(message.id))
        if left:
            raise left.pop()("out of stock")

    return handle


@committing
@pytest.mark.usefixtures("impatient")
def test_a_topics_letter_goes_to_the_stage_that_gave_up_and_to_no_other(
    spark: Any, spec: JobSpec
) -> None:
    """One of two stages gives up a topic's message. A replay of the dead letter
    redelivers it only to that stage, even if the inbox of the other was pruned."""
    with (
        declared(counting("bill", *[ValueError] * 3), TOPIC, name="billing") as stage,
        declared(counting("ship"), TOPIC, name="shipping") as other,
    ):
        step(stage)
        step(other)
        send(TOPIC, {"n": 1})
        step(other)
        step(stage, times=3)
        letter = DeadLetter.objects.get()
        InboxMessage.objects.filter(stage="shipping").delete()

        facts = replay(spec, "exception LIKE '%out of stock'")

        operation = BulkOperation.objects.get(pk=facts["operation"])
        assert (operation.kind, operation.total) == ("redeliver", 1)
        assert operation.filter == {"ids": [letter.pk], "service": "tests"}
        assert DeadLetter.objects.get().resolution == "open"
        assert bulk.finish(operation).done == 1
        assert ship() == 0
        step(stage)
        step(other)
    effects = list(Effect.objects.order_by("name").values_list("name", flat=True))
    assert effects == ["bill", "ship"]
    assert OutboxMessage.objects.filter(destination=TOPIC).count() == 1
    letter.refresh_from_db()
    assert letter.resolution == "redelivered"
    assert letter.resolved_by == f"pipeline: {facts['counts']['name']}"
    assert operation.why == "exception LIKE '%out of stock'"


@committing
@pytest.mark.usefixtures("impatient")
def test_replay_skips_letters_processed_meanwhile(spark: Any, spec: JobSpec) -> None:
    with declared(counting("done"), "orders.place"):
        done = make.DeadLetterFactory()
        make.InboxMessageFactory(message_id=done.message_id)
        make.DeadLetterFactory.create_batch(3)
        make.DeadLetterFactory(discarded=True)

        facts = replay(spec, "stage = 'orders.place'", "--rate", "5000")
        # An operator sees to one of them before a consumer comes to it.
        seen_to = DeadLetter.objects.last()
        assert seen_to is not None
        opened = DeadLetter.objects.filter(resolution="open")
        opened.filter(pk=opened.latest("pk").pk).delete()
        operation = bulk.finish(BulkOperation.objects.get(pk=facts["operation"]))

    assert (facts["rows"], operation.total, operation.rate) == (4, 4, 5000)
    assert (operation.done, operation.skipped) == (2, 1)
    assert "has processed" in operation.skipped_why[str(done.pk)]


@committing
@pytest.mark.usefixtures("impatient")
def test_replaying_thousands_of_letters_is_one_operation(
    spark: Any, spec: JobSpec
) -> None:
    """A replay requests one bulk operation for all of its dead letters. So they have
    one rate, one pause and one audit entry."""
    number = 6_000
    DeadLetter.objects.bulk_create(
        make.DeadLetterFactory.build(destination="orders.other", stage="")
        for _ in range(number)
    )

    facts = replay(spec, "true")

    operation = bulk.finish(BulkOperation.objects.get(pk=facts["operation"]))
    assert (operation.state, operation.done) == ("done", number)
    assert OutboxMessage.objects.count() == number
    assert not DeadLetter.objects.filter(resolution="open").exists()


def test_a_named_replay_is_stored_once(spark: Any, log: Log) -> None:
    letters = [uuid.uuid4() for _ in range(3)]
    log.bury([{"message_id": one} for one in letters])
    spec = JobSpec((log.spec,))
    words = ("--name", "after the outage")

    selected = ("replay", "--from", "dead_letters", "--where", "true")
    told = outcome(spec, *selected, "--dry-run")
    dry = told.facts
    first = replay(spec, "true", *words)
    again = outcome(spec, *selected, *words)

    assert told.lines[0].startswith("3 dead letters would be redelivered as replay-")
    assert (dry["chosen"], dry["destinations"]) == (3, {"orders.place": 3})
    assert (first["rows"], again.facts["rows"]) == (3, 0)
    assert "has requested them before" in "\n".join(again.lines)
    assert log.count("django_txmsg_bulkoperation") == 1
    assert log.count() == log.count("django_txmsg_stagedmessage") == 0
    log.bury([{"message_id": uuid.uuid4()}])
    with pytest.raises(UsageError, match="one selection of messages"):
        replay(spec, "true", *words)
    with pytest.raises(UsageError, match="is redelivered under its own id"):
        replay(spec, "true", "--as", "copy")
    assert replay(spec, "destination = 'nowhere'")["rows"] == 0
    assert log.count("django_txmsg_bulkoperation") == 1
