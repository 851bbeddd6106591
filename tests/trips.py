"""A flow of trips and the services that answer it, for tests of the operators' pages
and commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from django.db import transaction

from django_txmsg import Destination
from django_txmsg.flows import Dead, Flow, Next, TimedOut, start, step
from django_txmsg.models import Run
from django_txmsg.testing import drain
from tests.running import declared
from tests.shelved_flows import at_hand, shelved


@dataclass
class Order:
    number: int


@dataclass
class Done:
    by: str


book = Destination("acts.book", Order, reply=Done)
unbook = Destination("acts.unbook", Order)
pay = Destination("acts.pay", Order, reply=Done)
unpay = Destination("acts.unpay", Order)


@shelved
class Trip(Flow[Order, str], name="acts.trip", within=None):
    number: int = 0
    said: list[str] = []

    @step
    def start(self, order: Order) -> Next[str]:
        self.number = order.number
        return self.ask(
            book, order, then=self.booked, undo=unbook, otherwise=self.given_up
        )

    @step
    def booked(self, done: Done) -> Next[str]:
        self.said = [*self.said, done.by]
        return self.ask(pay, Order(self.number), then=self.paid, undo=unpay)

    @step
    def paid(self, done: Done) -> Next[str]:
        self.said = [*self.said, done.by]
        return self.wait(then=self.approved, otherwise=self.given_up)

    @step
    def approved(self, yes: bool) -> Next[str]:
        return f"{yes} {self.said}"

    @step
    def given_up(self, why: TimedOut | Dead) -> Next[str]:
        return self.fail(f"{type(why).__name__} {getattr(why, 'reason', '')}".strip())


class Shop:
    """The services that answer the flow: their recorded work, and the answers that they
    give."""

    did: ClassVar[list[str]] = []
    by: ClassVar[str] = "first"
    #: What the next payments raise.
    error: ClassVar[Exception | None] = None


def _booked(order: Order) -> Done:
    Shop.did.append("book")
    return Done(Shop.by)


def _unbooked(order: Order) -> None:
    Shop.did.append("unbook")


def _paid(order: Order) -> Done:
    if Shop.error is not None:
        raise Shop.error
    Shop.did.append("pay")
    return Done(Shop.by)


def _unpaid(order: Order) -> None:
    Shop.did.append("unpay")


@contextmanager
def trips() -> Iterator[None]:
    """Declare the flow, and the stages that answer it, until the end of the block."""
    Shop.did.clear()
    Shop.by, Shop.error = "first", None
    with ExitStack() as stack:
        stack.enter_context(at_hand(Trip))
        for handler, destination, options in (
            (_booked, book, {}),
            (_unbooked, unbook, {"undoes": book}),
            (_paid, pay, {}),
            (_unpaid, unpay, {"undoes": pay}),
        ):
            name = str(destination)
            stack.enter_context(declared(handler, destination, name=name, **options))
        yield


def begin(key: str = "A-1") -> Run:
    with transaction.atomic():
        return start(Trip, Order(1), key=key)


def waiting(key: str = "A-1") -> Run:
    """Return a run that has booked and paid, and now waits until a person approves."""
    run = begin(key)
    drain(raises=Shop.error is None)
    run.refresh_from_db()
    return run
