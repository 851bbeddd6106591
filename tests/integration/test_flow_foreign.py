"""A plain STOMP client without this package answers a flow."""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_txmsg import Destination, send_message, stages
from django_txmsg.envelope.broker_url import split_url
from django_txmsg.flows import Answers, Dead, Flow, Next, TimedOut, cancel, start, step
from django_txmsg.models import Batch, OutboxMessage, Run
from django_txmsg.monitoring import retention
from django_txmsg.testing import answers, drain
from django_txmsg.testing.frames import Frame
from tests.faults import wait_until
from tests.raw_client import RawClient
from tests.running import IMPATIENT, committing, running, ship, txmsg
from tests.running import step as take
from tests.services.stomp_server import PASSWORD, USER, StompServer
from tests.shelved_flows import at_hand, shelved

pytestmark = committing

#: The brokers outlive the tests.
HERE = f"foreign{os.getpid()}"


@dataclass
class Ask:
    amount: int


@dataclass
class Priced:
    amount: int


price = Destination(f"{HERE}.price", Ask, reply=Priced, foreign=True)
forget = Destination(f"{HERE}.forget", Ask, foreign=True)


@shelved
class Quote(Flow[Ask, int], name=f"{HERE}.quote", within=dt.timedelta(hours=1)):
    @step
    def start(self, ask: Ask) -> Next[int]:
        if ask.amount < 0:
            both = [self.branch(price, Ask(one)) for one in (1, 2)]
            return self.gather(both, then=self.gathered)
        return self.ask(
            price, ask, then=self.priced, undo=forget, otherwise=self.given_up
        )

    @step
    def priced(self, reply: Priced) -> Next[int]:
        return self.fail(0) if reply.amount == 0 else reply.amount

    @step
    def gathered(self, answers: Answers[Priced]) -> Next[int]:
        return sum(one.amount for one in answers if isinstance(one, Priced))

    @step
    def given_up(self, why: TimedOut | Dead) -> Next[int]:
        return self.fail(-1)


@shelved
class Either(Flow[Ask, int], name=f"{HERE}.either", within=dt.timedelta(hours=1)):
    @step
    def start(self, ask: Ask) -> Next[int]:
        all_of_them = range(1, 3 + ask.amount)
        asked = [self.branch(price, Ask(one), undo=forget) for one in all_of_them]
        return self.gather(asked, then=self.gathered, enough=1)

    @step
    def gathered(self, answers: Answers[Priced]) -> Next[int]:
        return 0


@pytest.fixture(
    params=["activemq", pytest.param("rabbitmq", marks=pytest.mark.soak)],
)
def client(request: pytest.FixtureRequest) -> Iterator[RawClient]:
    server: StompServer = request.getfixturevalue(request.param)
    port = split_url(server.url()).port
    assert port is not None
    with (
        txmsg(**{**IMPATIENT, "BROKERS": {"default": {"URL": server.url()}}}),
        at_hand(Quote),
        RawClient(("127.0.0.1", port), login=USER, passcode=PASSWORD) as opened,
    ):
        for number, one in enumerate((price, forget)):
            opened.send(
                "SUBSCRIBE", {"destination": f"/queue/{one}", "id": str(number)}
            )
        yield opened


def asked(amount: int) -> Run:
    with transaction.atomic():
        return start(Quote, Ask(amount))


def all_wait() -> bool:
    """Relay messages, and return whether all runs have sent their requests."""
    ship()
    return not Run.objects.filter(waits_for="start").exists() and not ship()


def answer(client: RawClient, request: Frame, body: object) -> None:
    """Answer a request: use its reply queue and its correlation id, and send the answer
    as JSON."""
    # RabbitMQ would replace JMS's header.
    to = request.headers.get("reply-to") or f"/queue/{request['txmsg-reply-to']}"
    client.send(
        "SEND",
        {
            "destination": to,
            "correlation-id": request["correlation-id"],
            "persistent": "true",
        },
        json.dumps(body).encode(),
        receipt="sent",
    )
    client.expect_receipt("sent")


@pytest.mark.postgresql
def test_a_plain_client_answers_by_copying_two_headers(client: RawClient) -> None:
    run, failing, both = asked(7), asked(8), asked(-1)
    with running(stages.find([f"{HERE}.quote"])[0]):
        wait_until(all_wait)
    frames = [client.expect("MESSAGE") for _ in range(4)]
    requests = {json.loads(one.body)["amount"]: one for one in frames}
    assert sorted(requests) == [1, 2, 7, 8]
    with running(stages.find([f"{HERE}.quote.steps"])[0]):
        for _ in range(2):  # the second one is late
            answer(client, requests[7], {"amount": 70})
        answer(client, requests[1], {"amount": 10})
        answer(client, requests[2], {"amount": 20})
        answer(client, requests[8], {"amount": 0})
        wait_until(lambda: Run.objects.get(pk=failing.pk).waits_for == "undo")
        ship()
        undo = client.expect("MESSAGE")
        assert undo["destination"] == f"/queue/{forget}"
        assert json.loads(undo.body) == {"amount": 8}
        answer(client, undo, None)
        wait_until(lambda: not Run.objects.filter(ended_at=None).exists())
    answers = {one.pk: (one.outcome, one.answer) for one in Run.objects.all()}
    assert answers == {
        run.pk: ("answered", "70"),
        failing.pk: ("failed", "0"),
        both.pk: ("answered", "30"),
    }


def test_undo_of_an_open_request_leaves_after_the_deadline_of_the_request() -> None:
    """The request may still be in the other service's queue. That service would execute
    the request after its undo."""
    with txmsg(**IMPATIENT), at_hand(Quote):
        run = asked(7)
        drain(f"{HERE}.quote")
        with transaction.atomic():
            cancel(run)
        drain(f"{HERE}.quote.steps")
    request, undo = sent(price), sent(forget)
    assert undo.due_at >= request.expires_at > undo.created_at


def test_undo_of_a_request_older_than_the_retention_leaves_after_its_deadline() -> None:
    with txmsg(**IMPATIENT), at_hand(Quote):
        run = asked(7)
        drain(f"{HERE}.quote")
        # SQLite's times have milliseconds.
        now = timezone.now().replace(microsecond=0)
        old, later = now - dt.timedelta(8), now + dt.timedelta(22)
        rows = OutboxMessage.objects.all()
        rows.update(created_at=old, dispatched_at=old, expires_at=later)
        rows.filter(destination=f"{HERE}.quote").update(expires_at=None)
        assert sum(retention.prune(retention.kinds()[0], "default")) == 1
        with transaction.atomic():
            cancel(run)
        drain(f"{HERE}.quote.steps")
    assert sent(forget).due_at >= later


def test_undo_of_a_withdrawn_request_that_may_have_arrived_leaves_late() -> None:
    """A relay sent the request, and got no receipt. The row counts no attempt."""
    with txmsg(**IMPATIENT), at_hand(Quote):
        run = asked(7)
        ship()
        take(stages.find([f"{HERE}.quote"])[0])
        rows, token = OutboxMessage.objects, uuid.uuid4()
        ids = [sent(price).pk]
        assert rows.claim(broker="default", token=token, lease=60, limit=1, ids=ids)
        assert rows.release(ids, token, delay=60)
        with transaction.atomic():
            cancel(run)
        ship()
        take(stages.find([f"{HERE}.quote.steps"])[0])
    request, undo = sent(price), sent(forget)
    assert (request.state, request.attempts) == ("cancelled", 0)
    assert undo.due_at >= request.expires_at > undo.created_at


def test_undo_of_an_answered_request_leaves_at_once() -> None:
    with txmsg(**IMPATIENT), at_hand(Quote), answers(price, Priced(0)):
        asked(7)
        drain()
    assert sent(forget).dispatched_at is not None


def test_undo_of_what_a_join_leaves_over_leaves_after_the_deadline() -> None:
    end_join(0)
    _, second = OutboxMessage.objects.filter(destination=str(price)).order_by("pk")
    assert sent(forget).due_at >= second.expires_at


def test_undos_of_more_open_requests_of_a_join_cost_no_more_queries() -> None:
    few, many = end_join(0), end_join(20)
    assert OutboxMessage.objects.filter(destination=str(forget)).count() == 22
    assert many - few < 5


def end_join(more: int) -> int:
    """Answer the first of `more` + 2 requests, which ends the join. Return the number
    of queries of its end."""
    with txmsg(**IMPATIENT), at_hand(Either):
        with transaction.atomic():
            run = start(Either, Ask(more))
        drain(f"{HERE}.either")
        batch = Batch.objects.get(run=run)
        request = batch.rows().get(number=0)
        first = OutboxMessage.objects.get(message_id=request.request_id)
        with transaction.atomic():
            send_message(
                f"{HERE}.either.steps",
                {"amount": 10},
                headers={"correlation-id": first.correlation_id},
            )
        with CaptureQueriesContext(connection) as queries:
            drain(f"{HERE}.either.steps")
    return len(queries)


def sent(destination: object) -> OutboxMessage:
    return OutboxMessage.objects.get(destination=str(destination))
