"""Policies for listeners and futures inside `atomic()` and on an event loop. After a
fork, the child cannot use its parent's connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker

from .conftest import DESTINATION, Listener

Connect = Callable[..., jms.Connection]


def sends(connection: jms.Connection) -> list[Callable[[], Any]]:
    producer = connection.create_session().create_producer(DESTINATION)
    context = jms.Context(connection, transacted=False, ack_mode=jms.AckMode.INDIVIDUAL)
    return [
        lambda: producer.send_async(jms.Message("x"), Listener()),
        lambda: producer.submit(jms.Message("x")).result(10),
        lambda: context.create_producer().set_async(Listener()),
    ]


@pytest.mark.django_db(transaction=True)
def test_forbidden_inside_atomic_raises_from_send_and_setter_and_names_the_outbox(
    broker: ScriptedBroker, connect: Connect
) -> None:
    calls = sends(connect(broker, in_atomic="forbid"))

    for call in calls:
        with (
            transaction.atomic(),
            pytest.raises(jms.IllegalStateError, match="send_message"),
        ):
            call()
    assert broker.received("SEND") == []
    for call in calls:
        call()


@pytest.mark.django_db(transaction=True)
def test_a_warning_inside_atomic_is_the_default(
    broker: ScriptedBroker, connect: Connect
) -> None:
    for call in sends(connect(broker)):
        with transaction.atomic(), pytest.warns(RuntimeWarning, match="send_message"):
            call()


@pytest.mark.django_db(transaction=True)
def test_allowed_inside_atomic_says_nothing(
    broker: ScriptedBroker, connect: Connect
) -> None:
    for call in sends(connect(broker, in_atomic="allow")):
        with transaction.atomic():
            call()


@pytest.mark.django_db(transaction=True)
def test_synchronous_sends_are_not_restricted(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, in_atomic="forbid").create_session()

    with transaction.atomic():
        session.create_producer(DESTINATION).send(jms.Message("x"))
        assert session.send_batch([(DESTINATION, jms.Message("y"))]) == [None]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("forbid", pytest.raises(jms.IllegalStateError, match="to_thread")),
        ("warn", pytest.warns(RuntimeWarning, match="to_thread")),
        ("allow", contextlib.nullcontext()),
    ],
)
def test_a_policy_governs_sends_on_a_running_event_loop(
    broker: ScriptedBroker, connect: Connect, policy: str, expected: Any
) -> None:
    calls = sends(connect(broker, on_event_loop=policy))

    async def send_all() -> None:
        for call in calls:
            with expected:
                call()

    asyncio.run(send_all())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_cannot_use_what_it_inherited_and_the_parent_can(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    session = connection.create_session()
    producer, consumer = session.create_producer("x"), session.create_consumer("y")
    transacted = connection.create_session(transacted=True)
    producer.send(jms.Message("before"))

    with connection.link.lock:  # held by "another thread" as the fork happens
        child = os.fork()
        if child == 0:  # pragma: no cover - coverage does not follow the child
            code = 1
            try:
                refused = 0
                for call in (
                    lambda: producer.send(jms.Message("from the child")),
                    lambda: producer.send_async(jms.Message("x"), Listener()),
                    lambda: consumer.receive(1),
                    connection.create_session,
                    connection.ping,
                    lambda: session.send_batch([]),
                    session.drain,
                    transacted.commit,
                    transacted.rollback,
                ):
                    try:
                        call()
                    except jms.IllegalStateError as error:
                        refused += "fork" in str(error)
                consumer.close()
                producer.close()
                session.close()
                connection.close()
                code = 0 if (refused == 9 and connection.closed) else 2
            except BaseException as error:
                print(repr(error), file=sys.__stderr__)
            finally:
                os._exit(code)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    producer.send(jms.Message("after"))
    assert [f.text for f in broker.received("SEND")] == ["before", "after"]
