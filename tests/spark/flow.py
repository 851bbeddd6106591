"""The message logs of three services after many orders, with a known number of planted
faults."""

from __future__ import annotations

import datetime as dt
import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.spark.log import UTC, Log

PLACE, PLACED = "orders.place", "topic:orders.placed"


@dataclass
class Flow:
    """The message logs, and the ids of the messages with a planted fault."""

    logs: dict[str, Log]
    planted: dict[str, set[str]] = field(default_factory=dict)
    orders: int = 0
    late_rows: list[dict[str, Any]] = field(default_factory=list)
    """What comes once more when the archive has its first inbox rows."""


def run_flow(
    make_log: Callable[..., Log],
    orders: int,
    *,
    vendors: tuple[str, str, str] = ("postgresql", "sqlite", "sqlite"),
    start: dt.datetime | None = None,
    seed: int = 7,
) -> Flow:
    """Store the messages of `orders` orders in the logs of three services.

    `shop` sends each order to the queue of `payments`. `payments` announces it on a
    topic, which `shipping` and `shop` consume. So each order has five sent or received
    messages.
    """
    dice = random.Random(seed)
    begin = start or dt.datetime.now(UTC) - dt.timedelta(days=5)
    names = ("shop", "payments", "shipping")
    logs = {n: make_log(v, n) for n, v in zip(names, vendors, strict=True)}
    flow = Flow(logs, orders=orders)
    sent: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    got: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    buried: list[dict[str, Any]] = []
    pace = dt.timedelta(days=3) / orders
    for number in range(orders):
        at = begin + pace * number
        first, second = _id(dice), _id(dice)
        sent["shop"].append(_sent(first, PLACE, at, number))
        announced = at + dt.timedelta(seconds=dice.lognormvariate(-1, 0.6))
        fault = {
            0: "never_received", 1: "processed_twice", 2: "dead", 3: "late",
            4: "unknown_sender", 5: "redelivered_deduplicated", 6: "not_processed",
        }.get(number % 100) if number >= 100 else None  # fmt: skip
        if fault == "processed_twice" and number > orders / 2:
            fault = None  # its inbox row is still there, and would drop the copy
        if fault:
            flow.planted.setdefault(fault, set()).add(str(first))
        receipt = _got(first, "orders.place", PLACE, "shop", at, announced, dice)
        if fault == "never_received":
            continue
        if fault == "processed_twice":
            again = receipt["first_received_at"] + dt.timedelta(days=1)
            got["payments"].append(
                {**receipt, "first_received_at": again, "last_received_at": again,
                 "processed_at": again, "_live": True}
            )  # fmt: skip
        if fault == "dead":
            del receipt["processed_at"]
            receipt |= {"dead_at": announced, "attempts": 7, "deliveries": 7}
            reason = ["card declined: order 0x1f", "no such customer 4711"][
                number % 200 > 99
            ]
            buried.append(
                {"message_id": first, "created_at": announced,
                 "fingerprint": reason[:16],
                 "headers": {"txmsg-id": str(first), "txmsg-key": "k", "own": "1"},
                 "body": json.dumps({"number": number}).encode(),
                 "exception": f"ValueError: {reason}"}
            )  # fmt: skip
        if fault == "late":
            receipt["processed_at"] = announced + dt.timedelta(hours=5)
        if fault == "unknown_sender":
            sent["shop"].pop()
        if fault == "redelivered_deduplicated":
            receipt["deliveries"] = 2
        if fault == "not_processed":
            del receipt["processed_at"]
            receipt["processed_at"] = None
        got["payments"].append(receipt)
        if fault in ("dead", "not_processed"):
            continue
        sent["payments"].append(_sent(second, PLACED, announced, number))
        for listener in ("shipping", "shop"):
            lost = listener == "shipping" and number % 100 == 50
            if lost:
                flow.planted.setdefault("never_received", set()).add(str(second))
                continue
            done = announced + dt.timedelta(seconds=dice.lognormvariate(-1, 1))
            got[listener].append(
                _got(
                    second,
                    f"{listener}.note",
                    PLACED,
                    "payments",
                    announced,
                    done,
                    dice,
                )
            )
    for name, log in logs.items():
        log.send(sent[name])
        early = [r for r in got[name] if not r.get("_live")]
        log.receive(early)
    logs["payments"].bury(buried)
    flow.late_rows = [
        {k: v for k, v in r.items() if k != "_live"}
        for r in got["payments"]
        if r.get("_live")
    ]
    return flow


def _id(dice: random.Random) -> uuid.UUID:
    return uuid.UUID(int=dice.getrandbits(128), version=4)


def _sent(
    message_id: uuid.UUID, destination: str, at: dt.datetime, number: int
) -> dict[str, Any]:
    return {
        "message_id": message_id, "destination": destination, "created_at": at,
        "dispatched_at": at + dt.timedelta(milliseconds=40),
        "body": json.dumps({"number": number}).encode(), "headers": {"own": "1"},
    }  # fmt: skip


def _got(
    message_id: uuid.UUID, stage: str, destination: str, service: str,
    at: dt.datetime, done: dt.datetime, dice: random.Random,
) -> dict[str, Any]:  # fmt: skip
    received = at + (done - at) / 2
    return {
        "message_id": message_id, "stage": stage, "destination": destination,
        "service": service, "created_at": at, "first_received_at": received,
        "last_received_at": received, "started_at": received, "processed_at": done,
    }  # fmt: skip
