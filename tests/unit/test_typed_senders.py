"""The errors that a type checker reports for typed destinations, stages and flows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

CODE = """
from dataclasses import dataclass

from django_txmsg import Destination, Message, stage


@dataclass
class Order:
    number: str


@dataclass
class Cancel:
    number: str


orders = Destination("orders.place", Order)
events = Destination("orders.events", Order | Cancel)

orders.send(Order("A-1"), key="A-1")
events.send(Cancel("A-1"))
orders.send(Cancel("A-1"))  # E
orders.send({"number": "A-1"})  # E
events.send("A-1")  # E


@stage(orders)
def place(order: Order) -> None: ...


@stage(orders)
def place_with_its_message(order: Order, message: Message) -> int:
    return 1


@stage(orders)
def place_as_json(message: Message) -> None: ...


@stage(events)
def both(event: Order | Cancel) -> None: ...


@stage(orders)  # E
def cancel(cancel: Cancel) -> None: ...


@stage(events)  # E
def half(event: Order) -> None: ...


@stage("orders.place")
def by_name(order: Order) -> None: ...


place(Order("A-1"))
place("A-1")  # E
"""


#: A flow: what `then`, `otherwise`, `undo` and `start()` take, and a step returns.
FLOW = """
import datetime as dt
from dataclasses import dataclass

from django_txmsg import Destination
from django_txmsg.flows import (
    Answers,
    Cancelled,
    Dead,
    Flow,
    Next,
    TimedOut,
    ask,
    signal,
    start,
    step,
)


@dataclass
class Order:
    number: str


@dataclass
class Reserve:
    number: str


@dataclass
class Reserved:
    shelf: str


@dataclass
class Placed:
    shelf: str


reserve = Destination("stock.reserve", Reserve, reply=Reserved)
release = Destination("stock.release", Reserve)
other = Destination("stock.other", Order)
DAY = dt.timedelta(days=1)


class Checkout(Flow[Order, Placed | Cancelled], name="shop.checkout", within=DAY):
    shelf: str = ""

    @step
    def start(self, order: Order) -> Next[Placed | Cancelled]:
        ask = Reserve(order.number)
        return self.ask(
            reserve, ask, then=self.reserved, undo=release, otherwise=self.late
        )

    @step
    def wrong_body(self, order: Order) -> Next[Placed | Cancelled]:
        return self.ask(reserve, order, then=self.reserved)  # E

    @step
    def wrong_then(self, order: Order) -> Next[Placed | Cancelled]:
        return self.ask(reserve, Reserve("1"), then=self.wrong_body)  # E

    @step
    def wrong_undo(self, order: Order) -> Next[Placed | Cancelled]:
        one = Reserve("1")
        return self.ask(reserve, one, then=self.reserved, undo=other)  # E

    @step
    def wrong_otherwise(self, order: Order) -> Next[Placed | Cancelled]:
        one, back = Reserve("1"), self.reserved
        return self.ask(reserve, one, then=back, otherwise=back)  # E

    @step
    def wrong_answer(self, order: Order) -> Next[Placed | Cancelled]:
        return Reserved("A7")  # E

    @step
    def wrong_later(self, order: Order) -> Next[Placed | Cancelled]:
        return self.later(self.reserved, order)  # E

    @step
    def reserved(self, reply: Reserved) -> Next[Placed | Cancelled]:
        self.shelf = reply.shelf
        return self.wait(then=self.approved, within=DAY, otherwise=self.late)

    @step
    def approved(self, yes: bool) -> Next[Placed | Cancelled]:
        return Placed(self.shelf) if yes else self.late()

    @step
    def slept(self) -> Next[Placed | Cancelled]:
        one = self.branch(reserve, Reserve("1"), undo=release)
        return self.gather([one], then=self.gathered)

    @step
    def gathered(self, answers: Answers[Reserved]) -> Next[Placed | Cancelled]:
        return self.fail(Cancelled("no"))

    @step
    def wrong_fail(self) -> Next[Placed | Cancelled]:
        return self.fail(Reserved("no"))  # E

    @step
    def late(self, why: TimedOut | Dead | None = None) -> Next[Placed | Cancelled]:
        return self.sleep(DAY, then=self.slept)

    @signal
    def cancelled(self, by: Cancelled) -> Next[Placed | Cancelled] | None:
        return self.fail(by)


start(Checkout, Order("1"), key="1")
start(Checkout, Reserve("1"))  # E
found: Placed | Cancelled | TimedOut | Dead = ask(Checkout, Order("1"), within=DAY)
"""


@pytest.mark.parametrize("code", [CODE, FLOW], ids=["senders", "flow"])
def test_mypy_refuses_each_wrong_line_and_no_other(code: str, tmp_path: Path) -> None:
    file = tmp_path / "checked.py"
    file.write_text(code)
    expected = [
        number
        for number, line in enumerate(code.splitlines(), 1)
        if line.endswith("# E")
    ]

    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    told = re.findall(r"checked\.py:(\d+): error:", result.stdout)
    assert sorted(map(int, told)) == expected, result.stdout
