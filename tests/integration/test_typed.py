"""Typed messages on their way from the sender to the stage: stored, read, upgraded,
refused and parked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_txmsg import (
    Destination,
    Message,
    RedeliveryPolicy,
    codecs,
    message_type,
    send_message,
    stages,
    upgrade,
)
from django_txmsg.dead_letters import bulk
from django_txmsg.errors import InvalidMessage
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.monitoring import alarms, status
from django_txmsg.testing import drain
from tests.factories import ago
from tests.faults import wait_until
from tests.forgetting import forget_upgraders
from tests.running import (
    committing,
    declared,
    put,
    running,
    send,
    ship,
    step,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@message_type("shop.PlaceOrder")
@dataclass
class First:
    number: str
    cents: int


@message_type("shop.PlaceOrder", version=2, readable_from=2)
@dataclass
class Second:
    number: str
    amount: Decimal
    currency: str = "EUR"


@message_type("shop.Cancel")
@dataclass
class Cancel:
    number: str


class Odd(pydantic.BaseModel):
    sizes: dict[str, int]

    @pydantic.field_validator("sizes")
    @classmethod
    def leave(cls, sizes: dict[str, int]) -> dict[str, int]:
        if "exit" in sizes:
            raise SystemExit("out of a validator")
        if "large" in sizes:
            raise MemoryError
        return sizes


def odd(body: Odd) -> None:
    got.append(body)


got: list[Any] = []


def first(order: First) -> None:
    got.append(order)


def second(order: Second) -> None:
    got.append(order)


def second_with_its_message(order: Second, message: Message) -> None:
    got.append((order.number, message.headers["a"], message.delivery_attempt))


def both(event: Second | Cancel) -> None:
    got.append(event)


def fails(order: Second) -> None:
    got.append(order)
    raise ValueError(order.number)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    got.clear()
    upgrade("shop.PlaceOrder", from_version=1)(from_cents)
    yield
    forget_upgraders("shop.PlaceOrder")
    codecs.forget()


def from_cents(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"amount": str(Decimal(body.pop("cents")) / 100)}


JSON = {"content-type": "application/json"}
ORDER = Second("A-1", Decimal("12345678901234567.890"))
UPGRADED = Second("A-1", Decimal("9.9"))


def test_a_typed_body_arrives_as_it_was_sent() -> None:
    with declared(second_with_its_message) as stage:
        send(stage.destination, ORDER, headers={"a": "b"}, key="A-1")
        row = OutboxMessage.objects.get()
        step(stage)

    assert row.headers == {"a": "b", "txmsg-type": "shop.PlaceOrder;v=2;min=2"}
    assert json.loads(bytes(row.body))["amount"] == "12345678901234567.890"
    assert got == [("A-1", "b", 1)]


@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc", "broker_only"])
@pytest.mark.parametrize("batch", [1, 3])
def test_typed_bodies_are_read_in_every_mode_and_in_batches(
    mode: Any, batch: int
) -> None:
    batch = batch if mode == "outbox" else 1
    with declared(both, transaction=mode, batch=batch) as stage:
        send(stage.destination, ORDER)
        send(stage.destination, Cancel("A-1"))
        send(stage.destination, First("A-1", 990))
        step(stage, times=3)

    assert got == [ORDER, Cancel("A-1"), UPGRADED]


def test_typed_destination_refuses_another_type() -> None:
    orders = Destination("tests.typed", Second | Cancel)
    with stages_of(orders, both), transaction.atomic():
        orders.send(ORDER, key="A-1")
        send_message(orders, Cancel("A-1"))
        with pytest.raises(InvalidMessage, match=r"takes one of shop\.PlaceOrder"):
            orders.send("A-1")  # type: ignore[arg-type]
        with pytest.raises(InvalidMessage, match="amount: unexpected_type"):
            orders.send(Second("A-1", 9.9))  # type: ignore[arg-type]
    with stages_of(orders, both) as stage:
        ship()
        step(stage, times=2)

    assert got == [ORDER, Cancel("A-1")]


class stages_of:  # noqa: N801 - reads as a block
    """Declare a stage with a typed destination until the end of the block."""

    def __init__(self, destination: Destination[Any], handler: Any) -> None:
        stages.stage(destination)(handler)
        self.name = str(destination)

    def __enter__(self) -> stages.Stage:
        return stages.find([self.name])[0]

    def __exit__(self, *_: object) -> None:
        stages.unregister(self.name)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_body_that_does_not_fit_is_dead_at_once(batch: int) -> None:
    with declared(second, batch=batch) as stage:
        put(stage.destination, b'{"number": "secret", "amount": "secret"}')
        send(stage.destination, ORDER)
        step(stage, times=2 if batch == 1 else 1)

    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.exception) == (
        "invalid_body",
        "amount: decimal_parsing",
    )
    assert (letter.traceback, letter.attempts) == ("", 0)
    assert b"secret" in bytes(letter.body)
    assert got == [ORDER]


def test_bodies_that_are_wrong_in_the_same_way_are_one_group() -> None:
    with declared(second) as stage:
        for body in (b'{"number": "1"}', b'{"number": "2"}', b'{"amount": 1}'):
            put(stage.destination, body)
        step(stage, times=3)

    prints = list(DeadLetter.objects.values_list("exception", "fingerprint"))
    assert len(set(prints)) == 2


def test_what_a_sender_writes_into_a_header_makes_no_group_of_its_own() -> None:
    given: list[tuple[str, dict[str, str]]] = [
        (f"unknown {name}", {"txmsg-type": name}) for name in ("a.B", "c.D")
    ]
    given += [
        (f"not JSON {kind}", {"content-type": kind})
        for kind in ("a/b", "it's/c", 'a/"d"', "a/'b\"c")
    ]
    given += [
        (f"no type {text}", {"txmsg-type": text})
        for text in ("no type", "it's none", "a\\'b\"")
    ]
    with declared(second) as stage:
        for body, header in given:
            put(stage.destination, body.encode(), {**JSON, **header})
        step(stage, times=len(given))

    letters = DeadLetter.objects.filter(reason="invalid_body")
    assert letters.count() == len(given)
    assert letters.values("fingerprint").distinct().count() == 3
    assert letters.filter(exception__contains="c.D").exists(), "it is still named"


def test_unreadable_body_stops_no_stage() -> None:
    """One body contains a NUL, and the validator of another body raises SystemExit.
    Both messages are buried, and the next message is processed."""
    with declared(odd) as stage:
        put(stage.destination, b'{"sizes": {"a\\u0000b": "x"}}')
        put(stage.destination, b'{"sizes": {"exit": 1}}')
        put(stage.destination, b'{"sizes": {"a": 1}}')
        step(stage, times=3)

    letters = DeadLetter.objects.order_by("id").values_list("reason", "exception")
    assert list(letters) == [
        ("invalid_body", "sizes.*: int_type"),
        ("invalid_body", "$: SystemExit"),
    ]
    assert got == [Odd(sizes={"a": 1})]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["non_blocking", "blocking", "broker"])
def test_a_body_too_large_for_the_memory_ends_in_the_dead_letters(
    mode: Any, batch: int
) -> None:
    """There is not enough memory to read a body. A later attempt might have more, so
    the message is redelivered until its attempts are exhausted."""
    policy = RedeliveryPolicy(
        max_redeliveries=2, initial_delay=0, max_delay=0, jitter=0, mode=mode
    )
    with declared(odd, redelivery=policy, batch=batch) as stage:
        for body in (b'{"sizes": {"large": 1}}', b'{"sizes": {"a": 1}}'):
            put(stage.destination, body)
        with running(stage):
            wait_until(DeadLetter.objects.exists)
            wait_until(lambda: got)

    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.exception.strip()) == (3, "MemoryError")
    assert bytes(letter.body) == b'{"sizes": {"large": 1}}'
    assert got == [Odd(sizes={"a": 1})]


def test_a_parked_body_is_upgraded_when_it_is_read_again() -> None:
    policy = RedeliveryPolicy(max_redeliveries=2, initial_delay=0, jitter=0)
    with declared(fails, redelivery=policy) as stage:
        send(stage.destination, First("A-1", 990))
        step(stage)
        parked = InboxMessage.objects.get()
        assert json.loads(bytes(parked.body or b"")) == {"number": "A-1", "cents": 990}
        step(stage, times=2)

    assert got == [UPGRADED] * 3
    assert json.loads(bytes(DeadLetter.objects.get().body))["cents"] == 990


@pytest.mark.parametrize("here", [True, False])
def test_a_dead_letter_is_upgraded_when_it_is_redelivered(here: bool) -> None:
    refusing = RedeliveryPolicy(refuse_on=(ValueError,))
    with declared(fails, redelivery=refusing, name="tests.old") as stage:
        send(stage.destination, First("A-1", 990))
        step(stage)
        destination = stage.destination
    # Where no stage of that name is declared it is sent again.
    with declared(second, destination, name="tests.old" if here else "new") as stage:
        assert bulk.finish(bulk.start("redeliver", {})).done == 1
        ship()
        step(stage)

    assert got == [UPGRADED, UPGRADED]


def test_message_needing_newer_code_waits_without_attempts() -> None:
    with declared(first, name="tests.place") as stage:
        sent = send(stage.destination, ORDER)
        send(stage.destination, First("A-2", 1))
        step(stage, times=4)

        row = InboxMessage.objects.get(message_id=sent.id)
        assert (row.attempts, row.needs_type, row.needs_version) == (
            0,
            "shop.PlaceOrder",
            2,
        )
        assert row.last_error == (
            "shop.PlaceOrder is read by version 2 and above, and this is 1"
        )
        assert got == [First("A-2", 1)]
        newer = status.read().stages["tests.place"].newer
        assert newer is not None
        assert (newer.count, newer.type, newer.version) == (1, "shop.PlaceOrder", 2)
        assert not any("newer code" in str(one) for one in alarms.of(status.read()))

        # A copy changes nothing: it waits once.
        put(
            stage.destination,
            bytes(row.body or b""),
            {**(row.headers or {}), "txmsg-id": str(sent.id)},
        )
        step(stage)
        destination = stage.destination
    with declared(second, destination, name="tests.place") as stage:
        step(stage)

    assert got == [First("A-2", 1), ORDER]
    assert InboxMessage.objects.get(message_id=sent.id).attempts == 1
    assert DeadLetter.objects.count() == 0


def test_messages_for_newer_code_make_no_thread_search_for_parked_ones() -> None:
    """After a roll-back, an old worker parks a long queue of newer messages. It does
    not search all of them for one that it can read, while it parks them."""
    with declared(first, name="tests.place") as stage:
        for _ in range(20):
            send(stage.destination, ORDER)
        with CaptureQueriesContext(connection) as queries:
            step(stage, times=20, parked=False)
    assert InboxMessage.objects.filter(needs_version=2).count() == 20
    claims = [one for one in queries if "c.due_at <= " in one["sql"]]
    assert not claims


@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_message_for_newer_code_waits_in_every_mode(mode: Any) -> None:
    with declared(first, name="tests.place", transaction=mode) as stage:
        send(stage.destination, ORDER)
        step(stage, times=2)
        destination = stage.destination
    assert got == []
    with declared(second, destination, name="tests.place", transaction=mode) as stage:
        step(stage)

    assert got == [ORDER]


def test_an_older_worker_gives_back_what_a_newer_one_has_parked() -> None:
    slow = RedeliveryPolicy(initial_delay=0, jitter=0)
    with declared(fails, name="tests.place", redelivery=slow) as stage:
        send(stage.destination, ORDER)
        step(stage)
        destination = stage.destination
    with declared(first, destination, name="tests.place") as stage:
        step(stage, times=3)
        row = InboxMessage.objects.get()
        assert (row.attempts, row.needs_version) == (1, 2)
    with declared(second, destination, name="tests.place") as stage:
        step(stage)

    assert got == [ORDER, ORDER]
    assert InboxMessage.objects.get().attempts == 2


def test_message_needing_newer_code_alarms_after_15_minutes() -> None:
    with declared(first, name="tests.place") as stage:
        send(stage.destination, ORDER)
        step(stage)
        InboxMessage.objects.update(first_received_at=ago(minutes=16))
        picture = status.read()

        assert not picture.overdue
        assert not alarms.well(picture)
        told = [str(one) for one in alarms.of(picture) if "newer code" in one.what]
        assert told == [
            "1 message of stage tests.place needs newer code: shop.PlaceOrder version "
            "2, for 16 min. Deploy it; or, after a roll-back, bury these messages."
        ]
        with pytest.raises(SystemExit):
            call_command("message_status")


@pytest.mark.parametrize("named", [True, False])
def test_operator_buries_unreadable_messages_after_a_roll_back(
    named: bool,
) -> None:
    with (
        declared(first, name="tests.place") as stage,
        declared(first, name="tests.other"),
    ):
        sent = [send(stage.destination, ORDER) for _ in range(3)]
        step(stage, times=3)
        destination = stage.destination
        InboxMessage.objects.filter(message_id=sent[0].id).update(
            lease_token=sent[0].id, lease_until=ago(minutes=-5)
        )
        arguments = ["--stage", "tests.place"] if named else []
        call_command("txmsg", "contracts", "bury", "--stage", "tests.other")
        for wrong, why in (
            (["--stage", ""], "is blank"),
            (["--stage", "nope"], "no stage 'nope'"),
            (["--database", "nope"], "No database 'nope'"),
        ):
            with pytest.raises(CommandError, match=why):
                call_command("txmsg", "contracts", "bury", *wrong)
        assert DeadLetter.objects.count() == 0
        call_command("txmsg", "contracts", "bury", *arguments)

    letters = DeadLetter.objects.filter(reason="needs_newer_code", attempts=0)
    assert {letter.message_id for letter in letters} == {sent[1].id, sent[2].id}
    # It is redelivered to the code that reads it.
    with declared(second, destination, name="tests.place") as stage:
        bulk.finish(bulk.start("redeliver", {}))
        step(stage, times=3)
    assert got == [ORDER, ORDER]


def test_drain_leaves_messages_that_need_newer_code() -> None:
    with declared(first, name="tests.place") as stage, txmsg():
        with transaction.atomic():
            send_message(stage.destination, ORDER)
            send_message(stage.destination, First("A-2", 1))
        done = drain("tests.place")

    assert (done.processed, done.redelivered, got) == (1, 0, [First("A-2", 1)])


def test_a_handler_of_messages_takes_every_version() -> None:
    bodies: list[Any] = []

    def plain(message: Message) -> None:
        bodies.append(message.body)

    with declared(plain) as stage:
        send(stage.destination, Cancel("A-1"))
        step(stage)

    assert bodies == [{"number": "A-1"}]


def test_waiting_message_that_expired_is_buried_by_newer_code() -> None:
    with declared(first, name="tests.place") as stage:
        send(stage.destination, ORDER)
        step(stage)
        destination = stage.destination
        row = InboxMessage.objects.get()
        past = {**(row.headers or {}), "txmsg-expires": "2020-01-01T00:00:00Z"}
        InboxMessage.objects.update(headers=past, due_at=F("due_at"))
    with declared(second, destination, name="tests.place") as stage:
        step(stage)

    assert DeadLetter.objects.get().reason == "expired"
