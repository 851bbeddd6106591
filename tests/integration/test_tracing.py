"""A real store, relay and stage report spans and metrics to OpenTelemetry's SDK."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection, transaction
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from django_txmsg import Refuse, send_message, send_messages, tracing, wire
from django_txmsg.brokers.base import Outgoing
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.models import DeadLetter, OutboxMessage
from tests.running import committing, declared, send, ship, step, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

CALLERS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Telemetry:
    """The spans and metrics that OpenTelemetry has received."""

    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader
    provider: TracerProvider

    def spans(self, operation: str) -> list[ReadableSpan]:
        """Return the ended spans of an operation."""
        return [
            one
            for one in self.exporter.get_finished_spans()
            if (one.attributes or {})["messaging.operation.name"] == operation
        ]

    def points(self, name: str) -> list[Any]:
        """Return the data points of a metric."""
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """The spans and metrics of the test."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider, meters = TracerProvider(), MeterProvider([reader])
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.install(provider, meters)
    yield Telemetry(exporter, reader, provider)
    tracing.uninstall()
    provider.shutdown()
    meters.shutdown()


def test_a_message_is_created_sent_and_processed_in_linked_spans(
    telemetry: Telemetry,
) -> None:
    with declared(lambda message: None) as stage:
        sent = send(stage.destination, {"order": 1}, headers={"correlation-id": "f-1"})
        step(stage)

    (create,), (out,), (process,) = map(telemetry.spans, ("create", "send", "process"))
    assert (create.name, create.kind) == (
        f"create {stage.destination}",
        SpanKind.PRODUCER,
    )
    assert (out.name, out.kind) == (f"send {stage.destination}", SpanKind.CLIENT)
    assert (process.name, process.kind) == (
        f"process {stage.destination}",
        SpanKind.CONSUMER,
    )
    for one in (out, process):
        assert [link.context.span_id for link in one.links] == [create.context.span_id]
    assert process.context.trace_id == create.context.trace_id
    row = OutboxMessage.objects.get(message_id=sent.id)
    assert row.headers["traceparent"].split("-")[2] == f"{create.context.span_id:016x}"
    for one, operation in ((create, "create"), (out, "send"), (process, "process")):
        attributes = dict(one.attributes or {})
        assert attributes["messaging.system"] == "django_txmsg"
        assert attributes["messaging.operation.type"] == operation
        assert attributes["messaging.message.id"] == str(sent.id)
        assert attributes["messaging.destination.name"] == stage.destination
        assert "error.type" not in attributes
    assert process.attributes["messaging.consumer.group.name"] == stage.name
    assert process.attributes["messaging.message.conversation_id"] == "f-1"


# Django 6.1 deprecates what projects still call.
@pytest.mark.filterwarnings("ignore:savepoint")
def test_rollback_drops_the_create_span(
    telemetry: Telemetry,
) -> None:
    with transaction.atomic():
        try:
            with transaction.atomic():
                send_message("tests.inner", 1)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        by_hand = connection.savepoint()
        send_message("tests.by_hand", 1)
        connection.savepoint_rollback(by_hand)
        send_message("tests.kept", 1)

    def fails() -> None:
        with transaction.atomic():
            send_message("tests.whole", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert [one.name for one in telemetry.spans("create")] == ["create tests.kept"]


def test_the_relay_links_each_message_of_a_batch(telemetry: Telemetry) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": f"tests.{number % 2}", "body": number}
            for number in range(300)
        )
    ship()

    spans = telemetry.spans("send")
    counts = [one.attributes["messaging.batch.message_count"] for one in spans]
    assert sorted(counts) == [22, 22, 128, 128]
    linked = {link.context.span_id for one in spans for link in one.links}
    created = {one.context.span_id for one in telemetry.spans("create")}
    assert len(created) == 300
    assert linked == created
    sent = telemetry.points("messaging.client.sent.messages")
    assert sum(point.value for point in sent) == 300
    assert {point.attributes["messaging.destination.name"] for point in sent} == {
        "tests.0",
        "tests.1",
    }


def test_a_send_that_fails_says_why(telemetry: Telemetry) -> None:
    batch = [Outgoing("tests.q", {wire.MESSAGE_ID: str(uuid.uuid4())}, b"1")]
    with pytest.raises(BrokerUnavailable), tracing.sending(batch):
        raise BrokerUnavailable("the password is s3cret")

    (span,) = telemetry.spans("send")
    assert span.attributes["error.type"] == "django_txmsg.errors.BrokerUnavailable"
    (point,) = telemetry.points("messaging.client.sent.messages")
    assert point.attributes["error.type"] == "django_txmsg.errors.BrokerUnavailable"
    assert "s3cret" not in span.to_json()


@pytest.mark.parametrize("texts", [False, True])
def test_texts_of_exceptions_are_in_spans_only_where_asked_for(
    telemetry: Telemetry, texts: bool
) -> None:
    tracing.install(telemetry.provider, exception_texts=texts)

    def fails(message: object) -> None:
        raise ValueError("card 4111 1111 1111 1111")

    with declared(fails) as stage, txmsg():
        send(stage.destination, 1)
        step(stage)

    (span,) = telemetry.spans("process")
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["error.type"] == "ValueError"
    assert ("4111" in span.to_json()) is texts


class UnreadableRefusal(Refuse):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize("texts", [False, True])
def test_refusal_without_a_readable_text_is_buried_at_once(
    telemetry: Telemetry, texts: bool
) -> None:
    tracing.install(telemetry.provider, exception_texts=texts)

    def refuses(message: object) -> None:
        raise UnreadableRefusal

    with declared(refuses) as stage, txmsg():
        send(stage.destination, 1)
        step(stage)

    assert DeadLetter.objects.get().reason == "refused"
    (span,) = telemetry.spans("process")
    assert span.attributes["error.type"].endswith(".UnreadableRefusal")


def test_stages_are_measured(telemetry: Telemetry) -> None:
    def fails_at(message: Any) -> None:
        if message.body == "bad":
            raise KeyError

    with declared(fails_at) as stage:
        for body in ("good", "good", "bad"):
            send(stage.destination, body)
            step(stage, parked=False)

    counted = {
        point.attributes.get("error.type"): point.value
        for point in telemetry.points("messaging.client.consumed.messages")
    }
    assert counted == {None: 2, "KeyError": 1}
    durations = telemetry.points("messaging.process.duration")
    assert sum(point.count for point in durations) == 3
    for point in durations:
        assert point.attributes["messaging.consumer.group.name"] == stage.name
        assert point.attributes["messaging.system"] == "django_txmsg"


def test_a_traceparent_given_by_the_caller_stays(telemetry: Telemetry) -> None:
    send("tests.q", 1, headers={"traceparent": CALLERS})

    assert OutboxMessage.objects.get().headers["traceparent"] == CALLERS
    assert telemetry.spans("create") == []
    (span,) = telemetry.spans("send")
    assert f"{span.links[0].context.trace_id:032x}" == CALLERS.split("-")[1]


def test_without_install_nothing_is_traced() -> None:
    with declared(lambda message: None) as stage:
        send(stage.destination, 1)
        step(stage)

    assert "traceparent" not in OutboxMessage.objects.get().headers
