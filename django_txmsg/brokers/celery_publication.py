"""Hops 2 and 4 for Celery: stores the arguments of one `producer.publish()` call as
text.

The process that calls a task creates the task's message and stores it in the outbox.
The relay passes the message unchanged to kombu. The body of the row is the body of the
message. The row's header `celery` holds all other arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kombu import Exchange, Queue
from kombu.compression import compress
from kombu.entity import binding
from kombu.serialization import dumps
from kombu.utils import json

#: The row's header that holds a publication without its body.
HEADER = "celery"
#: Arguments of `publish()` that are not stored: how to send, and what the headers
#: already contain.
_HOW = frozenset(
    {
        *("retry", "retry_policy", "timeout", "confirm_timeout", "mandatory"),
        *("serializer", "compression", "argsrepr", "kwargsrepr"),
    }
)
_KINDS: dict[str, Any] = {"exchange": Exchange, "queue": Queue, "binding": binding}


@dataclass(slots=True)
class Publication:
    """One message in the form in which kombu sends it. `declare` lists, as text, the
    queues and exchanges to declare before sending. `then` lists messages to send after
    this message, such as an event."""

    body: bytes
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    declare: list[str] = field(default_factory=list)
    then: list[Publication] = field(default_factory=list)

    @classmethod
    def make(cls, body: Any, given: Mapping[str, Any]) -> Publication:
        """Serialize and compress the body, and return the message that `publish(body,
        **given)` would send.

        Raises kombu's EncodeError for arguments that the serializer cannot write.
        """
        content_type, encoding, data = dumps(body, serializer=given.get("serializer"))
        headers = dict(given.get("headers") or {})
        if isinstance(data, str):
            data = data.encode(encoding)
        if given.get("compression"):
            data, headers["compression"] = compress(data, given["compression"])
        exchange = given.get("exchange") or ""
        properties = {
            name: value
            for name, value in given.items()
            if name not in _HOW
            and name not in ("headers", "exchange", "routing_key", "declare")
            and value is not None
        }
        if isinstance(exchange, Exchange):
            properties.setdefault("delivery_mode", exchange.delivery_mode)
            exchange = exchange.name
        return cls(
            body=data,
            content_type=content_type,
            content_encoding=encoding,
            headers=headers,
            properties=properties,
            exchange=exchange,
            routing_key=given.get("routing_key") or "",
            declare=[_written(entity) for entity in given.get("declare") or ()],
        )

    def text(self) -> str:
        """Return the publication as text for the row's header, without the body and its
        content type."""
        return str(json.dumps(self._fields()))

    @classmethod
    def read(cls, text: str, body: bytes, content_type: str) -> Publication:
        """Create a publication from three values: a text that `text()` has returned,
        the body, and the body's content type. Raises ValueError, KeyError or TypeError
        if the text is not of the form that `text()` returns."""
        return cls._from(json.loads(text), body, content_type)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "content_encoding": self.content_encoding,
            "headers": self.headers,
            "properties": self.properties,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "declare": self.declare,
        }
        if self.then:
            fields["then"] = [
                [one._fields(), one.body, one.content_type] for one in self.then
            ]
        return fields

    @classmethod
    def _from(
        cls, fields: dict[str, Any], body: bytes, content_type: str
    ) -> Publication:
        then = [cls._from(*one) for one in fields.pop("then", ())]
        return cls(body=body, content_type=content_type, then=then, **fields)

    def entities(self) -> list[Any]:
        """Return the queues and exchanges to declare first."""
        return [_read(text) for text in self.declare]

    @property
    def has_a_queue(self) -> bool:
        """Whether the message is meant for one particular queue.

        If that queue is missing, publishing must fail, because the message would be
        lost. For a message to an exchange it is no error if the message reaches no
        queue.
        """
        return not self.exchange or any(
            isinstance(one, Queue) for one in self.entities()
        )

    def publish(self, producer: Any, **how: Any) -> None:
        """Publish the message with a kombu producer. Raises the producer's errors."""
        producer.publish(
            self.body,
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            headers=dict(self.headers),
            exchange=self.exchange,
            routing_key=self.routing_key,
            **self.properties,
            **how,
        )


def _written(entity: Any) -> str:
    """Return a queue or an exchange as text, without default values."""
    return str(json.dumps(_plain(entity), sort_keys=True))


def _plain(value: Any) -> Any:
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            attributes = {name: getattr(value, name) for name, *_ in value.attrs}
            plain = {
                name: _plain(one)
                for name, one in attributes.items()
                if one not in (None, getattr(cls, name, None), [], set())
            }
            return {"kind": kind, **plain}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    return value


@lru_cache(1000)
def _read(text: str) -> Any:
    return _entity(json.loads(text))


def _entity(value: Any) -> Any:
    if isinstance(value, list):
        return [_entity(one) for one in value]
    if not (isinstance(value, dict) and value.get("kind") in _KINDS):
        return value
    fields = {name: _entity(one) for name, one in value.items() if name != "kind"}
    return _KINDS[value["kind"]](**fields)
