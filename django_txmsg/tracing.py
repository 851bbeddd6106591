"""OpenTelemetry (extra `opentelemetry`): spans where a message is stored, sent and
processed. Links connect the spans of a message, however long it waits between them.

Names and attributes follow the semantic conventions for messaging. Until the process
calls `tracing.install()` (in an AppConfig's `ready()`), nothing is traced or imported.
The message's header `traceparent` carries the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import groupby
from typing import Any, Protocol

from . import wire
from .envelope.failure import name_of, text_of
from .envelope.message import Message
from .errors import ConfigurationError
from .lazy_imports import needs

#: The name of this messaging system in OpenTelemetry's semantic conventions.
SYSTEM = "django_txmsg"
#: Links of one span. More than 128 are dropped by OpenTelemetry's SDK.
MOST_LINKS = 128

_tracer: Any = None
_texts = False
_instruments: dict[str, Any] = {}


class Sent(Protocol):
    """A message that is sent to a broker."""

    @property
    def destination(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...


def install(
    tracer_provider: Any = None,
    meter_provider: Any = None,
    *,
    exception_texts: bool = False,
) -> None:
    """Trace and measure from now on, with the given providers or the global ones.

    With `exception_texts`, spans contain the texts and stacks of exceptions, which may
    contain personal data. Otherwise spans contain only the exception's class, as
    `error.type`. Raises ConfigurationError if opentelemetry-api is not installed.
    """
    global _tracer, _texts
    _texts = exception_texts
    meter = _module("metrics").get_meter("django_txmsg", meter_provider=meter_provider)
    _instruments.update(
        sent=meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages sent to a broker."
        ),
        sending=meter.create_histogram(
            "messaging.client.operation.duration", "s", "Duration of a send."
        ),
        consumed=meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages delivered."
        ),
        processing=meter.create_histogram(
            "messaging.process.duration", "s", "Duration of a stage."
        ),
    )
    _tracer = _module("trace").get_tracer(
        "django_txmsg", tracer_provider=tracer_provider
    )


def uninstall() -> None:
    """Stop tracing and measuring."""
    global _tracer
    _tracer = None
    _instruments.clear()


def created(
    message_id: object, destination: str, headers: MutableMapping[str, str]
) -> Callable[[], None] | None:
    """Begin a span for a new message, and set the message's header `traceparent`.
    Returns a function, which the caller must call when the message is committed.
    Otherwise the span is never exported.

    If the caller has set a `traceparent`, do nothing and return None.
    """
    if _tracer is None or wire.TRACEPARENT in headers:
        return None
    trace = _module("trace")
    span = _tracer.start_span(
        f"create {destination}",
        kind=trace.SpanKind.PRODUCER,
        attributes=_attributes("create", destination, message_id),
    )
    _propagator().inject(headers, trace.set_span_in_context(span))
    now = time.time_ns()
    return lambda: span.end(now)


@contextmanager
def sending(
    batch: Sequence[Sent],
) -> Iterator[Callable[[Sequence[BaseException | None]], None]]:
    """Surround the sending of messages with a span for each destination. Each span is
    linked to the spans in which its messages were created. Yields a function to call
    with the outcome of each message."""
    if _tracer is None:
        yield lambda outcomes: None
        return
    trace = _module("trace")
    # In the order of the outcomes, and no more links than a span may have.
    order = sorted(range(len(batch)), key=lambda at: batch[at].destination)
    chunks = [
        (destination, group[start : start + MOST_LINKS])
        for destination, places in groupby(order, lambda at: batch[at].destination)
        for group in [list(places)]
        for start in range(0, len(group), MOST_LINKS)
    ]
    began = time.monotonic()
    with ExitStack() as stack:
        spans = []
        for destination, places in chunks:
            headers = [batch[at].headers for at in places]
            attributes = _attributes("send", destination)
            if len(places) == 1:
                attributes["messaging.message.id"] = headers[0][wire.MESSAGE_ID]
            else:
                attributes["messaging.batch.message_count"] = len(places)
            origins = [_origin(one) for one in headers]
            span = _tracer.start_span(
                f"send {destination}",
                kind=trace.SpanKind.CLIENT,
                links=[trace.Link(one) for one in origins if one.is_valid],
                attributes=attributes,
            )
            stack.callback(span.end)
            spans.append(span)

        def note(outcomes: Sequence[BaseException | None]) -> None:
            seconds = time.monotonic() - began
            for span, (destination, places) in zip(spans, chunks, strict=True):
                failed = [one for at in places if (one := outcomes[at]) is not None]
                common = _attributes("send", destination)
                del common["messaging.operation.type"]
                if len(failed) < len(places):
                    _instruments["sent"].add(len(places) - len(failed), common)
                if failed:
                    common["error.type"] = _failed(span, failed[0])
                    _instruments["sent"].add(len(failed), common)
                _instruments["sending"].record(seconds, common)

        try:
            yield note
        except BaseException as error:
            note([error] * len(batch))
            raise


@contextmanager
def processing(message: Message, stage: str) -> Iterator[None]:
    """Surround a stage with a consumer span, which is linked to the span that created
    the message. The consumer span is also a child of that span, so that one trace shows
    all messages."""
    if _tracer is None:
        yield
        return
    trace = _module("trace")
    context = _propagator().extract(dict(message.headers))
    origin = _origin(message.headers)
    common = _attributes("process", message.destination)
    common["messaging.consumer.group.name"] = stage
    attributes = common | {
        "messaging.message.id": str(message.id),
        "txmsg.attempt": message.delivery_attempt,
    }
    if message.correlation_id:
        attributes["messaging.message.conversation_id"] = message.correlation_id
    began = time.monotonic()
    with _tracer.start_as_current_span(
        f"process {message.destination}",
        context=context,
        kind=trace.SpanKind.CONSUMER,
        links=[trace.Link(origin)] if origin.is_valid else [],
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except BaseException as error:
            common["error.type"] = _failed(span, error)
            raise
        finally:
            del common["messaging.operation.type"]
            _instruments["consumed"].add(1, common)
            _instruments["processing"].record(time.monotonic() - began, common)


def _attributes(
    operation: str, destination: str, message_id: object = None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "messaging.system": SYSTEM,
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": destination,
    }
    if message_id is not None:
        found["messaging.message.id"] = str(message_id)
    return found


def _origin(headers: Mapping[str, str]) -> Any:
    context = _propagator().extract(dict(headers))
    return _module("trace").get_current_span(context).get_span_context()


def _failed(span: Any, error: BaseException) -> str:
    """Record an error in a span. Returns the error's type."""
    trace = _module("trace")
    name = name_of(type(error))
    span.set_attribute("error.type", name)
    text = text_of(error) if _texts else None
    span.set_status(trace.Status(trace.StatusCode.ERROR, text))
    if _texts:
        with suppress(BaseException):  # the error's own code may raise
            span.record_exception(error)
    return name


def _propagator() -> Any:
    # Always W3C trace context, whatever the process is set to: the wire format requires
    # it.
    name = "trace.propagation.tracecontext"
    return _module(name).TraceContextTextMapPropagator()


def _module(name: str) -> Any:
    with needs("Tracing", "opentelemetry", "opentelemetry", error=ConfigurationError):
        return import_module(f"opentelemetry.{name}")
