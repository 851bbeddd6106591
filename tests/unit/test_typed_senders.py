"""What a type checker reports about typed destinations and their stages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
orders.send(Cancel("A-1"))  # E: arg-type
orders.send({"number": "A-1"})  # E: arg-type
events.send("A-1")  # E: arg-type


@stage(orders)
def place(order: Order) -> None: ...


@stage(orders)
def place_with_its_message(order: Order, message: Message) -> int:
    return 1


@stage(orders)
def place_as_json(message: Message) -> None: ...


@stage(events)
def both(event: Order | Cancel) -> None: ...


@stage(orders)  # E: arg-type
def cancel(cancel: Cancel) -> None: ...


@stage(events)  # E: arg-type
def half(event: Order) -> None: ...


@stage("orders.place")
def by_name(order: Order) -> None: ...


place(Order("A-1"))
place("A-1")  # E: arg-type
"""


def test_mypy_refuses_the_wrong_body(tmp_path: Path) -> None:
    file = tmp_path / "senders.py"
    file.write_text(CODE)
    expected = [
        number
        for number, line in enumerate(CODE.splitlines(), 1)
        if line.endswith("# E: arg-type")
    ]

    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    told = re.findall(r"senders\.py:(\d+): error: .*\[([\w-]+)\]", result.stdout)
    assert sorted({int(line) for line, _ in told}) == expected, result.stdout
