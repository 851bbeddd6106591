"""OpenTelemetry (extra `opentelemetry`): a span where a message is stored, a span where
it is processed, and a link between them, however long it waits in between.

Nothing happens, and nothing is imported, until the process calls `tracing.install()`
(in an AppConfig's `ready()`). The trace travels in the message's `traceparent`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from . import wire
from .envelope.message import Message
from .errors import ConfigurationError

_tracer: Any = None

#: The name of this messaging system in OpenTelemetry's semantic conventions.
SYSTEM = "django_txmsg"


def install(tracer_provider: Any = None) -> None:
    """Trace from now on, with the given or the global tracer provider.

    Raises ConfigurationError if opentelemetry-api is not installed.
    """
    global _tracer
    _tracer = _module("trace").get_tracer(
        "django_txmsg", tracer_provider=tracer_provider
    )


def uninstall() -> None:
    """Stop tracing."""
    global _tracer
    _tracer = None


def stored(
    message_id: object, destination: str, headers: MutableMapping[str, str]
) -> None:
    """Record in a producer span that a message is stored, and set its `traceparent`.

    A `traceparent` from the caller stays as it is.
    """
    if _tracer is None or wire.TRACEPARENT in headers:
        return
    trace = _module("trace")
    with _tracer.start_as_current_span(
        f"send {destination}",
        kind=trace.SpanKind.PRODUCER,
        attributes=_attributes("send", destination, message_id),
    ):
        _propagator().inject(headers)


@contextmanager
def processing(message: Message, stage: str) -> Iterator[None]:
    """Run a stage within a consumer span, linked to the span that stored the message.

    It is also a child of that span, so that one trace shows the whole flow.
    """
    if _tracer is None:
        yield
        return
    trace = _module("trace")
    context = _propagator().extract(dict(message.headers))
    origin = trace.get_current_span(context).get_span_context()
    attributes = _attributes("process", message.destination, message.id) | {
        "messaging.consumer.group.name": stage,
        "txmsg.attempt": message.delivery_attempt,
    }
    if message.correlation_id:
        attributes["messaging.message.conversation_id"] = message.correlation_id
    with _tracer.start_as_current_span(
        f"process {message.destination}",
        context=context,
        kind=trace.SpanKind.CONSUMER,
        links=[trace.Link(origin)] if origin.is_valid else [],
        attributes=attributes,
    ):
        yield


def _attributes(operation: str, destination: str, message_id: object) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": destination,
        "messaging.message.id": str(message_id),
    }


def _propagator() -> Any:
    # Always W3C trace context, whatever the process is set to: the wire format requires
    # it.
    name = "trace.propagation.tracecontext"
    return _module(name).TraceContextTextMapPropagator()


def _module(name: str) -> Any:
    try:
        return import_module(f"opentelemetry.{name}")
    except ImportError as error:
        raise ConfigurationError(
            "Tracing needs opentelemetry-api: "
            "pip install 'django_txmsg[opentelemetry]'."
        ) from error
