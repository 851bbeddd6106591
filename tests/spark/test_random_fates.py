"""Random faults in two services that use the package itself: the verdicts are the same
whether all rows are live, half of them archived, or all in journeys.

`shop` and `orders` have a database each. The test writes only instants by hand, to let
time pass for the rows of both, and plays the faults of a broker: lost, doubled and
foreign messages.
"""

from __future__ import annotations

import datetime as dt
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db import connections, transaction
from django.db.models import DateTimeField, F

from django_txmsg import RedeliveryPolicy, cancel_message, reschedule_message
from django_txmsg.dead_letters import resolution
from django_txmsg.dead_letters.resolution import Tally
from django_txmsg.envelope.message import Message
from django_txmsg.errors import Redeliver, Refuse
from django_txmsg.management.commands.pipeline import source_spec
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message
from django_txmsg.spark.jobs.reconcile import ReconcileOptions, run_reconcile
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import Table
from django_txmsg.spark.spec import JobSpec, LakeSpec, Subscription
from django_txmsg.stages import Stage
from tests.running import declared, put, ship, step, txmsg
from tests.spark.archives import delta_rows
from tests.spark.conftest import committing
from tests.spark.running import run

pytestmark = committing

PLACE, PLACED = "orders.place", "topic:orders.placed"
TURNS, SLOW = "orders.turns", "orders.slow"
ERP, LEGACY = "erp.invoices", "//legacy.example/orders"
HOUR = dt.timedelta(hours=1)
VERDICTS = Table("verdicts", "", "", (), "", ("",))
Fate = Callable[["Services"], None]


def handle(message: Message) -> None:
    """Do what the message's body demands."""
    match message.body:
        case "refuse":
            raise Refuse("no")
        case "park":
            raise Redeliver(after=1.0)


@dataclass
class Services:
    """Both services, and the expected verdict of each message between them."""

    stages: dict[str, Stage]
    dice: random.Random
    expected: dict[tuple[str, str], str] = field(default_factory=dict)
    """The verdict of a message, by its id and a topic's consumer."""

    def expect(self, message: Any, verdict: str, consumer: str = "") -> None:
        self.expected[str(getattr(message, "id", message)), consumer] = verdict

    def send(self, destination: str, body: Any = "", **more: Any) -> Message:
        with transaction.atomic(), shop():
            return send_message(destination, body, **more)

    def relay(self) -> None:
        with shop():
            ship()

    def consume(self, *names: str, times: int = 1) -> None:
        with orders():
            for name in names or (PLACE,):
                step(self.stages[name], times)

    def lose(self, queue: str) -> None:
        """Delete the messages of a queue, as a broker that loses them."""
        assert QueueMessage.objects.filter(queue=queue).delete()[0]

    def letter(self, message: Message) -> list[DeadLetter]:
        return list(DeadLetter.objects.using("other").filter(message_id=message.id))


@contextmanager
def shop() -> Iterator[None]:
    with txmsg(SERVICE="shop"):
        yield


@contextmanager
def orders() -> Iterator[None]:
    with txmsg(SERVICE="orders"):
        yield


def pass_time(by: dt.timedelta, *aliases: str) -> None:
    """Move all instants of a database's rows into the past."""
    for model in apps.get_app_config("django_txmsg").get_models():
        names = [f.name for f in model._meta.fields if isinstance(f, DateTimeField)]
        if names and model._meta.managed:
            for alias in aliases or ("default", "other"):
                model._base_manager.using(alias).update(
                    **{name: F(name) - by for name in names}
                )


def set_clock(ahead: dt.timedelta) -> None:
    """Move the clock of `orders` ahead: in its rows, all instants except those that
    senders wrote."""
    pass_time(-ahead, "other")
    for model, name in (
        (InboxMessage, "created_at"),
        (DeadLetter, "message_created_at"),
    ):
        rows = model._base_manager.using("other")
        rows.update(**{name: F(name) - ahead})


# -- Fates: what happens to a message, and what is to be found of it ----------------


def arrives(services: Services) -> None:
    message = services.send(PLACE)
    services.relay()
    services.consume()
    services.expect(message, "ok")


def is_lost(services: Services) -> None:
    message = services.send(PLACE)
    services.relay()
    services.lose(PLACE)
    services.expect(message, "never_received")


def is_delayed(services: Services) -> None:
    message = services.send(PLACE, delay=30 * HOUR)
    services.relay()
    pass_time(30 * HOUR)
    services.relay()
    services.consume()
    services.expect(message, "ok")


def is_put_off(services: Services) -> None:
    message = services.send(PLACE, delay=HOUR)
    with shop():
        assert reschedule_message(message.id, delay=9 * HOUR)
    pass_time(9 * HOUR)
    services.relay()
    services.consume()
    services.expect(message, "ok")


def is_delayed_and_lost(services: Services) -> None:
    message = services.send(PLACE, delay=30 * HOUR)
    pass_time(30 * HOUR)
    services.relay()
    services.lose(PLACE)
    services.expect(message, "never_received")


def is_due_next_month(services: Services) -> None:
    message = services.send(PLACE, delay=900 * HOUR)
    services.expect(message, "in_flight")


def is_cancelled(services: Services) -> None:
    message = services.send(PLACE, delay=HOUR)
    with shop():
        assert cancel_message(message.id)
    services.expect(message, "cancelled")


def expires_before_it_leaves(services: Services) -> None:
    message = services.send(PLACE, expires=HOUR)
    pass_time(2 * HOUR)
    services.relay()
    services.expect(message, "expired")


def expires_at_the_broker(services: Services) -> None:
    message = services.send(PLACE, expires=HOUR)
    services.relay()
    services.lose(PLACE)
    services.expect(message, "expired")


def dies(services: Services) -> Message:
    message = services.send(PLACE, "refuse")
    services.relay()
    services.consume()
    assert services.letter(message)
    services.expect(message, "dead")
    return message


def is_discarded(services: Services) -> None:
    message = dies(services)
    with orders():
        resolution.discard(services.letter(message), Tally(), using="other")
    services.expect(message, "discarded")


def is_replaced(services: Services) -> None:
    message = dies(services)
    [letter] = services.letter(message)
    with orders():
        copy = resolution.redeliver_copy(letter, headers={}, body=b'"mended"')
    services.consume()
    services.expect(message, "replaced")
    services.expect(copy, "ok")


def is_redelivered_and_dies_again(services: Services) -> None:
    message = dies(services)
    with orders(), transaction.atomic(using="other"):
        resolution.redeliver(services.letter(message), Tally(), using="other")
    services.consume()


def waits_for_the_consumer(services: Services) -> None:
    message = services.send(PLACE)
    services.relay()
    pass_time(5 * HOUR)
    services.consume()
    services.expect(message, "late")


def never_leaves(services: Services) -> None:
    # Nobody runs a relay for that broker.
    services.expect(services.send(PLACE, broker="apart"), "not_sent")


def is_parked_for_good(services: Services) -> None:
    message = services.send(SLOW, "park")
    services.relay()
    # No worker comes back for it.
    services.consume(SLOW, times=3)
    services.expect(message, "not_processed")


def waits_behind_a_lost_one(services: Services) -> None:
    key = str(uuid.UUID(int=services.dice.getrandbits(128)))
    first = services.send(TURNS, key=key)
    services.relay()
    services.lose(TURNS)
    second = services.send(TURNS, key=key)
    services.relay()
    services.consume(TURNS)
    services.expect(first, "never_received")
    services.expect(second, "not_processed")


def comes_three_times(services: Services) -> None:
    message = services.send(PLACE)
    services.relay()
    [row] = QueueMessage.objects.filter(queue=PLACE)
    for _ in range(2):
        put(PLACE, bytes(row.body), row.headers)
    services.consume(times=3)
    services.expect(message, "redelivered_deduplicated")


def is_done_by_two_stages(services: Services) -> None:
    message = services.send(PLACE)
    services.relay()
    [row] = QueueMessage.objects.filter(queue=PLACE)
    services.consume()
    put(PLACE, bytes(row.body), row.headers)
    services.consume("rival")
    services.expect(message, "processed_twice")


def is_a_strangers(services: Services) -> None:
    services.expect(put(PLACE, b'""'), "unknown_sender")
    services.consume()


def is_an_event_of_a_known_system(services: Services) -> None:
    event = uuid.UUID(int=services.dice.getrandbits(128))
    headers = {"ce-specversion": "1.0", "ce-id": str(event), "ce-source": LEGACY,
               "ce-type": "order", "content-type": "application/json"}  # fmt: skip
    put(PLACE, b'""', headers)
    services.consume()
    [row] = (
        InboxMessage.objects.using("other").filter(service=LEGACY).order_by("-id")[:1]
    )
    services.expect(row.message_id, "external")


def goes_to_the_erp(services: Services) -> None:
    message = services.send(ERP)
    services.relay()
    services.expect(message, "external")


def is_announced(services: Services) -> None:
    message = services.send(PLACED)
    services.relay()
    services.consume("ledger", "mails")
    for name in ("ledger", "mails"):
        services.expect(message, "ok", f"orders/{name}")


def is_announced_and_lost_for_one(services: Services) -> None:
    message = services.send(PLACED)
    services.relay()
    services.consume("ledger")
    waiting = QueueMessage.objects.filter(queue__contains="mails")
    assert waiting.delete()[0]
    services.expect(message, "ok", "orders/ledger")
    services.expect(message, "never_received", "orders/mails")


FATES: tuple[Fate, ...] = (
    arrives, is_lost, is_delayed, is_put_off, is_delayed_and_lost, is_due_next_month,
    is_cancelled, expires_before_it_leaves, expires_at_the_broker, dies, is_discarded,
    is_replaced, is_redelivered_and_dies_again, waits_for_the_consumer, never_leaves,
    is_parked_for_good, waits_behind_a_lost_one, comes_three_times,
    is_done_by_two_stages, is_a_strangers, is_an_event_of_a_known_system,
    goes_to_the_erp, is_announced, is_announced_and_lost_for_one,
)  # fmt: skip


@contextmanager
def playing(dice: random.Random) -> Iterator[Services]:
    """Two services whose messages meet random fates, each fate at least once."""
    with ExitStack() as stack:
        stack.enter_context(orders())
        stages = {
            name: stack.enter_context(
                declared(handle, place, name=name, using="other", **more)
            )
            for name, place, more in (
                (PLACE, PLACE, {}), ("rival", PLACE, {}), ("ledger", PLACED, {}),
                ("mails", PLACED, {}), (TURNS, TURNS, {"ordered": "block"}),
                (SLOW, SLOW, {"redelivery": RedeliveryPolicy(max_redeliveries=99)}),
            )
        }  # fmt: skip
        services = Services(stages, dice)
        # Who listens subscribes before anything is sent, and who keeps the order knows
        # since when.
        services.consume("ledger", "mails", TURNS)
        fates = [*FATES, *dice.choices(FATES, k=6), *[arrives] * 4]
        dice.shuffle(fates)
        for fate in fates:
            fate(services)
            # The next one is sent some time later.
            pass_time(dt.timedelta(minutes=dice.randrange(10, 90)))
        pass_time(80 * HOUR)
        yield services


def judged(spark: Any, spec: JobSpec, **more: Any) -> tuple[Counter[str], Any]:
    options = ReconcileOptions(**{"many": 0, **more})
    found = run_reconcile(spark, spec, options, Run("reconcile", {}))
    assert spec.lake is not None
    last: dict[tuple[str, ...], dict[str, Any]] = {}
    rows = delta_rows(spec.lake, VERDICTS).to_pylist()
    for row in sorted(rows, key=lambda row: row["recorded_at"]):
        consumer = row["consumer"] if row["destination"] == PLACED else ""
        last[row["message_id"], consumer, row["verdict"]] = row
    listed = {
        (message, consumer): verdict
        for (message, consumer, verdict), row in last.items()
        if row["change"] == "found"
    }
    return Counter(found.counts), (listed, found)


def play(spark: Any, lake: LakeSpec, seed: int) -> None:
    dice = random.Random(seed)
    ahead = dice.choice([0, 0, -3, 3]) * HOUR
    with playing(dice) as services:
        set_clock(ahead)
        spec = JobSpec(
            (source_spec("default", "shop"), source_spec("other", "orders")),
            lake,
            subscriptions=tuple(
                Subscription(one.destination, "orders", one.name)
                for one in services.stages.values()
            ),
            external=("erp.*",),
            external_senders=("//legacy.example/*",),
        )
        counts = Counter(services.expected.values())
        findings = {
            key: verdict
            for key, verdict in services.expected.items()
            if verdict in ("never_received", "processed_twice", "not_processed",
                           "not_sent", "dead", "late", "unknown_sender")
        }  # fmt: skip

        def agree(when: str) -> None:
            told, (listed, found) = judged(spark, spec)
            assert (listed, told) == (findings, counts), (seed, when)
            apart = [one.ahead for one in found.clocks]
            assert [round(one / HOUR) for one in apart] == (
                [ahead / HOUR] if ahead else []
            ), (seed, when)

        agree("live")
        for source in spec.services:
            alone = JobSpec((source,), lake)
            days = dice.randrange(84, 130)
            run(alone, "archive", "--older-than", f"{days}h", "--no-vacuum")
        agree("half archived")
        for source in spec.services:
            run(
                JobSpec((source,), lake), "archive", "--older-than", "0s", "--no-vacuum"
            )
        agree("archived, and journeys made")
        agree("from the journeys")


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.matrix) for n in (5, 9))]
)
def test_random_fates_are_judged_the_same_wherever_they_lie(
    spark: object, lake: LakeSpec, seed: int
) -> None:
    play(spark, lake, seed)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_verdicts_match_planted_fates_in_200_draws(
    spark: object, tmp_path: Path
) -> None:
    for seed in range(200):
        play(spark, LakeSpec(f"file://{tmp_path}/{seed}"), seed)
        for alias in ("default", "other"):
            with connections[alias].cursor() as cursor:
                for table in ("archivemark", "finding", "pipelinerun"):
                    cursor.execute(f"DELETE FROM django_txmsg_{table}")
            for model in (OutboxMessage, InboxMessage, DeadLetter, QueueMessage):
                model._base_manager.using(alias).all().delete()
