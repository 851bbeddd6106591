"""The broker refuses the subscription of one stage. The other stages are not affected.
The tests check this by the broker's counts."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_txmsg import wire
from django_txmsg.brokers.stomp import StompBroker
from django_txmsg.consuming.subscription import Subscription
from django_txmsg.envelope.message import Message
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.http_outbox.control_thread import ControlThread
from django_txmsg.runtime import breaker as breakers
from django_txmsg.runtime.breaker import Breaker
from django_txmsg.runtime.liveness import Activity
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.testing.profiles import CLASSIC, RABBITMQ
from django_txmsg.testing.scripted_broker import ScriptedBroker
from tests import services
from tests.app.models import Effect
from tests.faults import Proxy, wait_until
from tests.running import committing, declared, running, thread_of, txmsg

pytestmark = committing


@pytest.fixture(params=[CLASSIC, RABBITMQ], ids=lambda profile: profile.name)
def broker(request: pytest.FixtureRequest) -> Iterator[ScriptedBroker]:
    """A scripted broker, which is the default broker in the settings."""
    with (
        ScriptedBroker(request.param) as scripted,
        txmsg(BROKERS={"default": {"URL": scripted.url}}),
    ):
        yield scripted


def effect(message: Message) -> None:
    Effect.objects.create(name="done", message_id=str(message.id))


def test_refused_subscription_slows_no_other_stage(
    broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    destination = wire.control_destination("tests")
    for refused in ("tests.forbidden", destination):
        broker.on("SUBSCRIBE", destination=f"/queue/{refused}").reject()
    stop, shared = threading.Event(), Breaker("default", 1.0)
    group = ThreadGroup(stop.set)
    with (
        declared(effect, "tests.healthy") as healthy,
        declared(effect, "tests.forbidden") as forbidden,
    ):
        good = thread_of(healthy, stop, breaker=shared)
        bad = thread_of(forbidden, stop, breaker=shared)
        control = ControlThread("default", stop, shared, Activity())
        group.add("good", good.run)
        group.add("bad", bad.run)
        group.add("control", control.run)
        group.start()
        try:
            wait_until(lambda: bad.refusal and control._refused.error)
            for _ in range(200):
                broker.put(
                    "/queue/tests.healthy",
                    "null",
                    {"txmsg-id": str(uuid.uuid4()), "content-type": "application/json"},
                )
            wait_until(lambda: good.handled == 200)
            refusals = broker.received(
                "SUBSCRIBE", where=lambda one: "healthy" not in one.destination
            )
            assert len(refusals) >= 2
            assert shared.error is None
            mine = broker.received("SUBSCRIBE", destination="/queue/tests.healthy")
            assert len(mine) == 1
            broker.forget_rules()
            broker.put(
                "/queue/tests.forbidden",
                "null",
                {"txmsg-id": str(uuid.uuid4()), "content-type": "application/json"},
            )
            wait_until(lambda: bad.handled == 1)
        finally:
            stop.set()
            group.join()
    assert Effect.objects.count() == 201
    assert "the subscription of stage 'tests.forbidden' cannot be used" in caplog.text
    assert "broker 'default' cannot be used" not in caplog.text


def test_a_refused_subscription_is_not_retried_at_once() -> None:
    """After a refused subscription, the stage waits longer than after an outage,
    because each try costs a connection."""
    with txmsg(), declared(effect) as stage:
        subscription = Subscription(stage, Breaker("default", 30.0))
        for breaker, least, most in (
            (subscription.refused, 0.75, 1.25),
            (subscription._breaker, 0.15, 0.25),
        ):
            before = time.monotonic()
            breaker.failed(BrokerUnavailable("no"))
            after = time.monotonic()
            assert before + least <= breaker._until <= after + most


def test_the_refusal_of_a_paused_stage_is_forgotten(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on("SUBSCRIBE", destination="/queue/tests.forbidden").reject()
    with (
        declared(effect, "tests.forbidden") as stage,
        running(stage) as (thread,),
    ):
        wait_until(lambda: thread.refusal)
        thread.paused.set()
        monkeypatch.setattr(breakers, "QUIET", 0.05)
        wait_until(lambda: not thread.refusal)


@pytest.mark.parametrize("user", ["stage", "paused", "control"])
def test_the_outage_of_a_broker_ends_even_if_nothing_can_be_received(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """The broker can be reached again after an outage, but its only user receives
    nothing: the broker refuses the subscription, or the stage is paused. The outage
    ends nevertheless."""
    monkeypatch.setattr(breakers, "QUIET", 0.05)
    broker.on("SUBSCRIBE").reject()
    stop, shared = threading.Event(), Breaker("default", 1.0)
    shared.failed(BrokerUnavailable("down"))
    group = ThreadGroup(stop.set)
    with declared(effect, "tests.forbidden") as stage:
        thread = thread_of(stage, stop, breaker=shared)
        control = ControlThread("default", stop, shared, Activity())
        if user == "paused":
            thread.paused.set()
        group.add(user, control.run if user == "control" else thread.run)
        group.start()
        try:
            wait_until(lambda: shared.error is None)
        finally:
            stop.set()
            group.join()


def test_the_second_connection_of_a_subscriber_has_a_short_time_out() -> None:
    """The broker refuses the subscriber's name. Then the stage tests whether the broker
    accepts a connection without a name, but the broker no longer answers."""
    with (
        ScriptedBroker(CLASSIC) as silent,
        txmsg(BROKERS={"default": {"URL": silent.url}}),
        declared(effect, "topic:tests.news") as stage,
    ):
        silent.on("*", times=1).reject()
        silent.on("*").call_with(lambda talk, frame: None)
        subscription = Subscription(stage, Breaker("default", 30.0))
        began = time.monotonic()
        assert subscription.open() is None
        assert time.monotonic() - began < 6.0  # a first attempt may take 10 seconds
        named, unnamed = (one.headers for one in silent.received("*"))
        assert named["client-id"]
        assert "client-id" not in unnamed
        assert subscription._breaker.error is not None
        assert subscription.refused.error is None


def test_each_host_has_time_to_accept_the_second_connection_of_a_subscriber() -> None:
    """The broker has six hosts. The last host, which is the only one that is up, is far
    away, and refuses the subscriber's name."""
    with ScriptedBroker(CLASSIC) as distant, ThreadPoolExecutor(1) as pool:
        url = distant.url.replace("//", "//" + "127.0.0.1:1," * 5)
        with (
            txmsg(BROKERS={"default": {"URL": url}}),
            declared(effect, "topic:tests.news") as stage,
        ):
            distant.on("*", times=1).reject()
            distant.on("*", times=1).park()
            subscription = Subscription(stage, Breaker("default", 30.0))
            opening = pool.submit(subscription.open)
            distant.wait_for_held()
            threading.Event().wait(0.6)  # the time that the answer is on its way
            distant.release()
            assert opening.result() is None
            assert subscription._breaker.error is None
            assert subscription.refused.error is not None


def test_the_outage_of_a_broker_ends_although_the_subscribers_name_is_in_use(
    activemq: services.ActiveMQ, destination: str
) -> None:
    """After an outage, the broker answers again, but another connection has the name of
    the stage's durable subscription: only the subscription is refused. Then no
    connection is accepted: the broker is down."""
    stop, shared = threading.Event(), Breaker("default", 0.2)
    shared.failed(BrokerUnavailable("down"))
    group = ThreadGroup(stop.set)
    with (
        Proxy(activemq.port) as proxy,
        txmsg(BROKERS={"default": {"URL": activemq.url(port=proxy.port)}}),
        declared(effect, f"topic:{destination}") as stage,
    ):
        holder = StompBroker("other", activemq.url()).open(subscriber=stage.subscriber)
        thread = thread_of(stage, stop, breaker=shared)
        group.add("stage", thread.run)
        group.start()
        try:
            wait_until(lambda: thread.refusal and shared.error is None)
            assert "already connected" in str(thread.refusal)
            proxy.refuse()
            wait_until(lambda: shared.error is not None)
            proxy.accept()
            holder.close()
            wait_until(lambda: not thread.refusal and shared.error is None)
        finally:
            stop.set()
            group.join()
            holder.close()
