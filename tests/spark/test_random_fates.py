"""Random faults in two services that use the package itself. The verdicts are the same
whether all rows are live, half of them archived, or all in journeys.

`shop` and `orders` each have a database. The test simulates the faults of a broker:
lost, doubled and foreign messages. To let time pass, it changes the instants in the
rows of both databases. It writes nothing else by hand.
"""

from __future__ import annotations

import datetime as dt
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
from celery.app.trace import build_tracer
from django.apps import apps
from django.core.management import call_command
from django.db import transaction
from django.db.models import DateTimeField, F

from django_txmsg import RedeliveryPolicy, cancel_message, reschedule_message
from django_txmsg.dead_letters import resolution
from django_txmsg.dead_letters.resolution import Tally
from django_txmsg.envelope.message import Message
from django_txmsg.errors import Redeliver, Refuse
from django_txmsg.management.commands.pipeline import source_spec
from django_txmsg.models import BulkOperation, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.jobs import journeys
from django_txmsg.spark.jobs.reconcile import run_reconcile
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import Table
from django_txmsg.spark.spec import JobSpec, LakeSpec, Subscription
from django_txmsg.stages import Stage
from tests.celery_shop import add, app, retried
from tests.celery_worker import forget_connections
from tests.running import IMPATIENT, declared, put, ship, step, txmsg
from tests.spark.archives import delta_rows
from tests.spark.conftest import committing
from tests.spark.running import run

pytestmark = committing

PLACE, PLACED = "orders.place", "topic:orders.placed"
CHANGED, IGNORED = "topic:orders.changed", "topic:orders.ignored"
TURNS, SLOW = "orders.turns", "orders.slow"
ERP, LEGACY = "erp.invoices", "//legacy.example/orders"
HOUR = dt.timedelta(hours=1)
VERDICTS = Table("verdicts", "", "", (), "", ("",))
BROKERS = {
    **IMPATIENT["BROKERS"],
    "celery": {"URL": "celery://tests.celery_shop:app"},
}
Fate = Callable[["Services"], None]
refused: set[uuid.UUID] = set()


def handle(message: Message) -> None:
    """Succeed or fail, depending on the message's body."""
    match message.body:
        case "refuse":
            raise Refuse("no")
        case "refuse once" if message.id not in refused:
            refused.add(message.id)
            raise Refuse("not yet")
        case "park":
            raise Redeliver(after=1.0)


@dataclass
class Services:
    """The two services, and the expected verdict of each message between them."""

    stages: dict[str, Stage]
    dice: random.Random
    expected: dict[tuple[str, str], str] = field(default_factory=dict)
    """The verdict of a message, by its id and a topic's consumer."""
    lost: dict[str, list[Message]] = field(default_factory=dict)
    """Messages to be replayed, by what happens to them then."""
    arrived: dict[uuid.UUID, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    """Body and headers of messages that the broker may repeat."""

    def expect(self, message: Any, verdict: str, consumer: str = "") -> None:
        self.expected[str(getattr(message, "id", message)), consumer] = verdict

    def send(self, destination: str, body: Any = "", **more: Any) -> Message:
        with transaction.atomic(), shop():
            return send_message(destination, body, **more)

    def relay(self) -> None:
        with shop():
            ship()
            ship(broker="celery")

    def consume(self, *names: str, times: int = 1) -> None:
        with orders():
            for name in names or (PLACE,):
                step(self.stages[name], times)

    def lose(self, queue: str, *messages: Message) -> None:
        """Delete these messages from a queue, as if the broker had lost them. If no
        messages are given, delete all."""
        ids = {str(one.id) for one in messages}
        for row in QueueMessage.objects.filter(queue=queue):
            if not ids or row.headers["txmsg-id"] in ids:
                row.delete()

    def letter(self, message: Message) -> list[DeadLetter]:
        return list(DeadLetter.objects.using("other").filter(message_id=message.id))


@contextmanager
def shop() -> Iterator[None]:
    with txmsg(SERVICE="shop", BROKERS=BROKERS):
        yield


@contextmanager
def orders() -> Iterator[None]:
    with txmsg(SERVICE="orders"):
        yield


def pass_time(by: dt.timedelta, *aliases: str) -> None:
    """Move all instants in the rows of these databases into the past."""
    for model in apps.get_app_config("django_txmsg").get_models():
        names = [f.name for f in model._meta.fields if isinstance(f, DateTimeField)]
        if names and model._meta.managed:
            for alias in aliases or ("default", "other"):
                model._base_manager.using(alias).update(
                    **{name: F(name) - by for name in names}
                )


def set_clock(ahead: dt.timedelta) -> None:
    """Simulate that the clock of the service `orders` is ahead. Every instant in the
    service's rows is moved, except the instants that senders have written."""
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
    [row] = QueueMessage.objects.filter(queue=PLACE)
    services.arrived[message.id] = bytes(row.body), row.headers
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
        resolution.discard(BulkOperation(), services.letter(message), Tally(), "other")
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
        resolution.redeliver(
            BulkOperation(), services.letter(message), Tally(), "other"
        )
    services.consume()


def is_redelivered_and_processed(services: Services) -> None:
    message = services.send(PLACE, "refuse once")
    services.relay()
    services.consume()
    with orders(), transaction.atomic(using="other"):
        resolution.redeliver(
            BulkOperation(), services.letter(message), Tally(), "other"
        )
    services.consume()
    services.expect(message, "ok")


def is_lost_and_replayed(services: Services) -> None:
    for then in ("late", "never_received", "in_flight"):
        message = services.send(PLACE)
        services.relay()
        services.lose(PLACE)
        services.lost.setdefault(then, []).append(message)
        services.expect(message, then)


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


def is_a_plain_task(services: Services) -> None:
    with shop(), transaction.atomic():
        called = add.delay(1, 2)
    services.relay()
    services.expect(called, "external")


def is_a_once_task(services: Services) -> None:
    with shop(), transaction.atomic():
        called = retried.delay(0)
    services.relay()
    with shop():
        request = {"id": called.id, "retries": 0, "delivery_info": {}}
        traced = build_tracer(retried.name, retried, app=app)
        assert traced(called.id, (0,), {}, request).retval == 0
    services.expect(called, "ok")


def is_announced_to_nobody(services: Services) -> None:
    services.send(IGNORED)
    services.relay()


def is_announced_to_a_stage_that_is_renamed(services: Services) -> None:
    message = services.send(CHANGED)
    services.relay()
    services.consume(CHANGED)
    services.expect(message, "ok", f"orders/{services.stages[CHANGED].name}")


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
    is_redelivered_and_processed, is_lost_and_replayed, is_a_plain_task, is_a_once_task,
    is_announced_to_nobody, is_announced_to_a_stage_that_is_renamed,
)  # fmt: skip


@contextmanager
def celery_in_memory() -> Iterator[None]:
    """Make the Celery app send to an in-memory broker."""
    before = app.conf.broker_url
    app.conf.broker_url = "memory://"
    forget_connections()
    yield
    app.conf.broker_url = before
    forget_connections()


def replay(services: Services) -> None:
    """Replay the lost messages with the package's own job, and process them."""
    pass_time(5 * HOUR)
    lost = [f"'{one.id}'" for one in chain.from_iterable(services.lost.values())]
    shops = JobSpec((source_spec("default", "shop"),))
    words = ("replay", "--where", f"message_id IN ({', '.join(lost)})")
    assert run(shops, *words)["rows"] == len(lost)
    services.relay()
    services.lose(PLACE, *services.lost["never_received"], *services.lost["in_flight"])
    services.consume(times=len(services.lost["late"]))


def rename(services: Services, stack: ExitStack) -> None:
    """Rename the stage of a topic, as the documentation recommends."""
    services.stages[CHANGED] = stack.enter_context(
        declared(handle, CHANGED, name="now", using="other")
    )
    services.consume(CHANGED)
    call_command("subscriptions", "remove", CHANGED, "orders.was", verbosity=0)


def come_again(
    services: Services, sent: dict[uuid.UUID, dt.datetime], ahead: dt.timedelta
) -> None:
    """Deliver each message again if its inbox row has been pruned. A broker may deliver
    a message so late.

    Then correct the instants in the new inbox rows. pass_time() does not move the
    instants in the headers of the delivered messages, so the sending time of each
    message is taken from `sent`. The clock of `orders` is ahead by `ahead`, so `ahead`
    is added to the times of receipt and processing.
    """
    inbox = InboxMessage.objects.using("other")
    gone = services.arrived.keys() - set(inbox.values_list("message_id", flat=True))
    for message in gone:
        put(PLACE, *services.arrived[message])
        services.expect(message, "processed_twice")
    services.consume(times=max(1, len(gone)))
    for message in gone:
        inbox.filter(message_id=message).update(
            created_at=sent[message],
            first_received_at=F("first_received_at") + ahead,
            processed_at=F("processed_at") + ahead,
        )


@contextmanager
def playing(dice: random.Random) -> Iterator[Services]:
    """Yield two services between which messages are sent. Each message has a random
    fate, and each fate occurs at least once."""
    with ExitStack() as stack:
        stack.enter_context(celery_in_memory())
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
        fates = [*FATES, *dice.choices(FATES, k=6), *[arrives] * 4]
        dice.shuffle(fates)
        half = len(fates) // 2
        with declared(handle, CHANGED, name="was", using="other") as was:
            stages[CHANGED] = was
            # Who listens subscribes before anything is sent, and who keeps the order
            # knows since when.
            services.consume("ledger", "mails", TURNS, CHANGED)
            meet(services, fates[:half])
        rename(services, stack)
        meet(services, fates[half:])
        replay(services)
        pass_time(80 * HOUR)
        # Some are of this hour: these, and one that is lost.
        young = [one.id for one in services.lost["in_flight"]]
        OutboxMessage.objects.filter(message_id__in=young).exclude(replay_id="").update(
            **{one: F(one) + 80 * HOUR for one in ("created_at", "due_at")}
        )
        services.expect(services.send(PLACE), "in_flight")
        services.relay()
        services.lose(PLACE)
        yield services


def meet(services: Services, fates: Sequence[Fate]) -> None:
    for fate in fates:
        fate(services)
        # The next one is sent some time later.
        pass_time(dt.timedelta(minutes=services.dice.randrange(10, 90)))


def judged(spark: Any, spec: JobSpec) -> tuple[Counter[str], Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journeys, "MANY", 0)
        found = run_reconcile(spark, spec, parsed(["reconcile"]), Run("reconcile", {}))
    assert spec.lake is not None
    last: dict[tuple[str, ...], dict[str, Any]] = {}
    rows = delta_rows(spec.lake, VERDICTS).to_pylist()
    for row in sorted(rows, key=lambda row: row["recorded_at"]):
        consumer = row["consumer"] if row["destination"] in (PLACED, CHANGED) else ""
        last[row["message_id"], consumer, row["verdict"]] = row
    listed = {
        (message, consumer): verdict
        for (message, consumer, verdict), row in last.items()
        if row["change"] == "found"
    }
    return Counter(found.counts), (listed, found)


def play(spark: Any, lake: LakeSpec, seed: int, *, whole: bool = True) -> None:
    """Judge random messages while some of them are in the lake. With `whole`, judge
    them four times: while all are in the database, while some are in the lake, after
    all settled messages are in the lake, and once more from the journeys."""
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
            task_brokers=(("shop", "celery"),),
        )

        def agree(when: str) -> None:
            counts = Counter(services.expected.values())
            findings = {
                key: verdict
                for key, verdict in services.expected.items()
                if verdict in ("never_received", "processed_twice", "not_processed",
                               "not_sent", "dead", "late", "unknown_sender")
            }  # fmt: skip
            told, (listed, found) = judged(spark, spec)
            assert (listed, told) == (findings, counts), (seed, when)
            apart = [one.ahead for one in found.clocks]
            assert [round(one / HOUR) for one in apart] == (
                [ahead / HOUR] if ahead else []
            ), (seed, when)

        if whole:
            agree("live")
        inbox = InboxMessage.objects.using("other")
        sent = dict(inbox.values_list("message_id", "created_at"))
        for source in spec.services:
            alone = JobSpec((source,), lake)
            days = dice.randrange(84, 130)
            run(alone, "archive", "--older-than", f"{days}h", "--no-vacuum")
        agree("half archived")
        if not whole:
            return
        come_again(services, sent, ahead)
        for source in spec.services:
            run(
                JobSpec((source,), lake), "archive", "--older-than", "0s", "--no-vacuum"
            )
        agree("archived")
        agree("from the journeys")


def test_random_fates_are_judged_where_they_lie_in_two_places(
    spark: object, lake: LakeSpec
) -> None:
    play(spark, lake, 1, whole=False)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [0, 1, 5, 9])
def test_random_fates_are_judged_the_same_wherever_they_lie(
    spark: object, lake: LakeSpec, seed: int
) -> None:
    play(spark, lake, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_verdicts_match_planted_fates_in_200_draws(
    spark: object, lake: LakeSpec, seed: int
) -> None:
    play(spark, lake, seed)
