"""The record of an arrival is committed without waiting for the disk, so a server crash
may lose it.

A transaction pooler can hide the crash from the worker. The worker then finds that the
row which it has just written is missing. This does not mean that a copy was processed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import pytest

from django_txmsg import Message, message_type
from django_txmsg.models import DeadLetter, InboxMessage
from tests.integration.test_ordered import (
    deliver,
    effect,
    effects,
    send_chain,
    settle,
    taken,
)
from tests.running import committing, declared, put, record_lost_at, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@message_type("tests.lost.Order")
@dataclass
class Order:
    number: int


def order(body: Order) -> None:
    raise AssertionError("it cannot be read")


def foreign(message: Message) -> None:
    raise AssertionError("it cannot be read")


def test_a_message_that_needs_newer_code_is_kept() -> None:
    headers = {
        "content-type": "application/json",
        "txmsg-type": "tests.lost.Order;v=9;min=9",
        "txmsg-id": str(uuid.uuid4()),
    }
    with declared(order) as stage:
        put(stage.destination, b'{"number": 1}', headers)
        with record_lost_at("UPDATE django_txmsg_inboxmessage"):
            step(stage)
        assert InboxMessage.objects.get().needs_version == 9


def test_a_message_that_an_ordered_stage_cannot_read_is_a_dead_letter() -> None:
    headers = {
        "content-type": "application/json",
        "txmsg-key": "one",
        "txmsg-id": str(uuid.uuid4()),
    }
    with declared(foreign, ordered="block") as stage:
        put(stage.destination, b"{", headers)
        with record_lost_at("UPDATE django_txmsg_inboxmessage"):
            step(stage)
        assert DeadLetter.objects.get().reason == "undecodable_body"


def test_a_message_whose_turn_has_not_come_is_kept() -> None:
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1])
        zero, one = taken(stage.destination)
        deliver(stage.destination, one)
        with record_lost_at("UPDATE django_txmsg_inboxmessage SET due_at"):
            step(stage)
        assert InboxMessage.objects.get().waits_for is not None
        deliver(stage.destination, zero)
        settle(stage, 2)
        assert effects() == ["0", "1"]
