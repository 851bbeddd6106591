"""Flows of four steps over three services, whose processes are killed throughout the
test.

Each flow is answered once. Each failed flow is undone once, newest step first. No run
and no undo stays open.

A service refuses some of the flows. Some flows send requests that no stage answers.
Some flows have deadlines so short that the deadline and the answer often come at the
same time.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import threading
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import transaction

from django_txmsg import Destination, Message, Refuse, stages
from django_txmsg.flows import Dead, Flow, Next, TimedOut, start, step
from django_txmsg.models import (
    DeadLetter,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.fields import Holds
from django_txmsg.rules import inbox, outbox
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import ManageProcess, Proxy, wait_until
from tests.running import IMPATIENT, committing, txmsg
from tests.services import PostgreSQL
from tests.services.stomp_server import StompServer
from tests.shelved_flows import at_hand, shelved

pytestmark = [committing, pytest.mark.postgresql, pytest.mark.timeout(300)]

HOOK = f"{__name__}.declare"
SERVICE, PREFIX = "TESTS_FLOW_SERVICE", "TESTS_FLOW_PREFIX"
SERVICES = ("home", "stock", "payment")
#: What becomes of a flow, by its number.
FATES = ("bought", "bought", "refused", "unanswered", "hurried")
#: Of each run of the tests: the brokers outlive them.
HERE = os.environ.setdefault(PREFIX, f"kills{os.getpid()}")


@dataclass
class Buy:
    number: int
    fate: str


@dataclass
class Bought:
    number: int
    ok: bool


def asked(name: str) -> Destination[Buy, None]:
    return Destination(f"{HERE}.{name}", Buy, reply=type(None))


reserve, charge, send = asked("reserve"), asked("charge"), asked("send")
release, refund, recall = asked("release"), asked("refund"), asked("recall")
nowhere, answers = asked("nowhere"), f"{HERE}.answers"


@shelved
class Purchase(Flow[Buy, Bought], name=f"{HERE}.purchase", within=dt.timedelta(days=1)):
    number: int = 0
    fate: str = ""

    @step
    def start(self, buy: Buy) -> Next[Bought]:
        self.number, self.fate = buy.number, buy.fate
        return self.ask(
            reserve, buy, then=self.reserved, undo=release, otherwise=self.given_up
        )

    @step
    def reserved(self) -> Next[Bought]:
        return self.ask(
            charge,
            Buy(self.number, self.fate),
            then=self.charged,
            undo=refund,
            otherwise=self.given_up,
            within=dt.timedelta(seconds=0.3 if self.fate == "hurried" else 900),
        )

    @step
    def charged(self) -> Next[Bought]:
        buy = Buy(self.number, self.fate)
        if self.fate == "unanswered":
            soon = dt.timedelta(seconds=0.3)
            return self.ask(
                nowhere, buy, then=self.sent, within=soon, otherwise=self.given_up
            )
        return self.ask(send, buy, then=self.sent, undo=recall, otherwise=self.given_up)

    @step
    def sent(self) -> Next[Bought]:
        return Bought(self.number, True)

    @step
    def given_up(self, why: TimedOut | Dead) -> Next[Bought]:
        return self.fail(Bought(self.number, False))


def note(what: str, message: Message) -> None:
    """Record an effect, and fail at the first attempt of some messages."""
    Effect.objects.create(name=what, message_id=str(message.id))
    if message.delivery_attempt == 1 and message.id.int % 7 == 0:
        raise ValueError


def reserves(buy: Buy, message: Message) -> None:
    note(f"{buy.number} reserve", message)


def releases(buy: Buy, message: Message) -> None:
    note(f"{buy.number} release", message)


def charges(buy: Buy, message: Message) -> None:
    note(f"{buy.number} charge", message)


def refunds(buy: Buy, message: Message) -> None:
    note(f"{buy.number} refund", message)


def sends(buy: Buy, message: Message) -> None:
    if buy.fate == "refused":
        raise Refuse("never")
    note(f"{buy.number} send", message)


def recalls(buy: Buy, message: Message) -> None:
    note(f"{buy.number} recall", message)


def hears(answer: Bought, message: Message) -> None:
    note(f"{answer.number} {answer.ok}", message)


UNDONE_BY = {"reserve": "release", "charge": "refund", "send": "recall"}
_declared = ExitStack()


def declare() -> None:
    """Declare the flow and the stages of a service, in a process that the test
    kills."""
    match os.environ[SERVICE]:
        case "home":
            _declared.enter_context(at_hand(Purchase))
            stages.stage(answers)(hears)
        case "stock":
            stages.stage(reserve)(reserves)
            stages.stage(release, undoes=reserve)(releases)
            stages.stage(send)(sends)
            stages.stage(recall, undoes=send)(recalls)
        case "payment":
            stages.stage(charge)(charges)
            stages.stage(refund, undoes=charge)(refunds)


class Market:
    """The processes of three services, each with a relay and a consumer."""

    def __init__(self, manage: Manage, url: str, database: str = "") -> None:
        """Create a market whose processes use the broker and the database at these
        URLs."""
        self._manage = manage
        self._database = {"TXMSG_TEST_DATABASE_URL": database} if database else {}
        self.settings: dict[str, Any] = {
            **IMPATIENT,
            "BROKERS": {"default": {"URL": url}},
            "RELAY": {
                **{"POLL_INTERVAL": 0.05, "LEASE": 2, "BATCH_SIZE": 10, "LANES": 1},
                "BREAKER_MAX_PAUSE": 1.0,
            },
            "REDELIVERY": {
                **{"INITIAL_DELAY": 0.0, "MAX_DELAY": 0.0, "MAX_REDELIVERIES": 50}
            },
        }
        self.processes = {name: self._start(name) for name in SERVICES}

    def _start(self, service: str) -> ManageProcess:
        return self._manage(
            *("txmsg", "run"),
            txmsg={**self.settings, "SERVICE": service},
            hook=HOOK,
            env={SERVICE: service, PREFIX: HERE, **self._database},
        )

    def kill(self, service: str) -> None:
        """Kill a service's process, and start another like it."""
        self.processes[service].close()
        self.processes[service] = self._start(service)

    def buy(self, total: int) -> None:
        """Start `total` flows."""
        with (
            txmsg(**{**self.settings, "SERVICE": "home"}),
            at_hand(Purchase),
        ):
            for number in range(total):
                buy = Buy(number, FATES[number % len(FATES)])
                with transaction.atomic():
                    start(Purchase, buy, key=str(number), answer_to=answers)

    def reach(self, ended: int) -> None:
        """Wait until `ended` flows have ended."""

        def enough() -> bool:
            # Nobody waits here for the end of a killed worker's lease.
            for model in (InboxMessage, OutboxMessage):
                held = model.objects.exclude(lease_until=None)
                with transaction.atomic():  # in no order, so it waits for no one
                    free = held.select_for_update(skip_locked=True)
                    ids = list(free.values_list("pk", flat=True))
                    model.objects.filter(pk__in=ids).update(
                        lease_until="2000-01-01T00:00:00+00:00"
                    )
            return Run.objects.exclude(ended_at=None).count() >= ended

        self._wait(enough)

    def settle(self) -> None:
        """Wait until no message is pending or parked, and every run has its answer."""
        self._wait(
            lambda: (
                not (
                    OutboxMessage.objects.filter(Holds(outbox.PENDING)).exists()
                    or InboxMessage.objects.filter(Holds(inbox.OPEN)).exists()
                    or Effect.objects.filter(name__regex=r" (True|False)$").count()
                    < Run.objects.count()
                )
            )
        )

    def _wait(self, condition: Any) -> None:
        wait_until(
            condition,
            deadline=600,
            message=lambda: "\n".join(
                [
                    str(list(Run.objects.filter(ended_at=None).values())),
                    *(one.output[-2000:] for one in self.processes.values()),
                ]
            ),
        )


def judge(total: int) -> str:
    """Check all flows, and return the number of flows for each outcome, as text.

    Each flow must have been answered once, after all its work. Each failed flow must
    have been undone once, newest step first. No run and no undo may be open. Only dead
    letters of refused requests may be open.
    """
    found: dict[int, list[str]] = defaultdict(list)
    for name in Effect.objects.order_by("id").values_list("name", flat=True):
        number, what = name.split()
        found[int(number)].append(what)
    assert sorted(found) == list(range(total))
    for number, effects in found.items():
        *work, answer = effects
        done = [one for one in work if one in UNDONE_BY]
        undone = [one for one in work if one not in UNDONE_BY]
        fate = FATES[number % len(FATES)]
        if answer == "True":
            assert fate in ("bought", "hurried"), (number, effects)
            assert work == ["reserve", "charge", "send"], (number, effects)
        else:
            assert answer == "False", (number, effects)
            assert fate != "bought", (number, effects)
            assert len(set(done)) == len(done), (number, effects)
            assert undone == [UNDONE_BY[one] for one in reversed(done)], effects
    assert not Run.objects.filter(ended_at=None).exists()
    assert not FlowUndo.objects.filter(confirmed_at=None).exists()
    # A refused request stays as a dead letter, so that an operator sees the reason.
    kept = DeadLetter.objects.filter(resolution="open").exclude(reason="refused")
    assert not kept.exists(), list(kept.values())
    failed = [one for one in found.values() if one[-1] == "False"]
    undone = sum(len(one) // 2 for one in failed)
    return (
        f"{total} flows answered once: {total - len(failed)} as wished, {len(failed)} "
        f"failed, with {undone} undos; 0 stuck, 0 undos kept; "
        f"{DeadLetter.objects.filter(resolution='open').count()} refused requests open"
    )


#: Thousands of flows, for an hour at most.
SOAK = (pytest.mark.soak, pytest.mark.timeout(3600))


@pytest.mark.parametrize(
    ("broker", "total", "kills"),
    [
        ("database", 20, 3),
        pytest.param("database", 2000, 60, marks=SOAK),
        pytest.param("activemq", 2000, 60, marks=SOAK),
        pytest.param("rabbitmq", 2000, 60, marks=SOAK),
    ],
)
def test_flows_end_once_although_their_services_are_killed(
    broker: str,
    total: int,
    kills: int,
    manage: Manage,
    request: pytest.FixtureRequest,
) -> None:
    url = "database://?poll=0.05&lease=2"
    if broker != "database":
        server: StompServer = request.getfixturevalue(broker)
        url = server.url()
    chance, market = random.Random(7), Market(manage, url)
    market.buy(total)
    for number in range(kills):
        market.reach(number * total // (kills + 1))
        market.kill(chance.choice(SERVICES))
    market.reach(total)
    market.settle()
    print(f"\n{broker}, {kills} kills: {judge(total)}")  # noqa: T201 - for a soak


@pytest.mark.parametrize(
    ("total", "outages", "seconds"),
    [
        pytest.param(20, 2, 4.0, marks=pytest.mark.matrix),
        pytest.param(500, 4, 90.0, marks=SOAK),
    ],
)
def test_flows_end_once_although_their_database_goes_away(
    total: int, outages: int, seconds: float, manage: Manage, postgres: PostgreSQL
) -> None:
    direct = os.environ["TXMSG_TEST_DATABASE_URL"]
    with Proxy(postgres.port) as proxy:
        url = direct.replace(f":{postgres.port}/", f":{proxy.port}/")
        market = Market(manage, "database://?poll=0.05&lease=2", url)
        market.buy(total)
        for number in range(outages):
            market.reach(number * total // (outages + 1))
            ended = Run.objects.exclude(ended_at=None).count()
            proxy.refuse()
            proxy.cut()
            threading.Event().wait(seconds)
            assert ended <= Run.objects.exclude(ended_at=None).count() < total
            proxy.accept()
        market.reach(total)
        market.settle()
        assert all(one.running for one in market.processes.values())
    assert not InboxMessage.objects.filter(attempts__gt=50).exists()
    print(f"\n{outages} outages of {seconds} s: {judge(total)}")  # noqa: T201
