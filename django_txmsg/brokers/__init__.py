"""Brokers by alias: `get_broker("default")` makes what TXMSG["BROKERS"] names.

A broker of your own is a class that `"BACKEND"` names. It is a `Broker`, its
conversations are `Session`s, and it passes `django_txmsg.testing.broker_suite`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .. import conf
from ..envelope.broker_url import split_url
from ..errors import ConfigurationError
from .base import Broker, Delivery, Outgoing, Session

__all__ = ["Broker", "Delivery", "Outgoing", "Session", "get_broker", "make_broker"]

#: What a scheme's broker is, and the extra that brings its client.
BACKENDS = {
    "amqp": ("amqp.broker.AmqpBroker", "amqp"),
    "amqps": ("amqp.broker.AmqpBroker", "amqp"),
    "celery": ("celery.broker.CeleryBroker", "celery"),
    "database": ("database.DatabaseBroker", ""),
    "stomp": ("stomp.StompBroker", "stomp"),
    "stomp+ssl": ("stomp.StompBroker", "stomp"),
}
#: An extra's module, and what to call it.
CLIENTS = {
    "amqp": ("amqp", "py-amqp"),
    "celery": ("celery", "Celery"),
    "stomp": ("stomp", "stomp.py"),
}


def get_broker(alias: str = "default") -> Broker:
    """Return a new Broker for this alias. Nothing is connected yet.

    Raises ConfigurationError for an unknown alias, URL scheme or `"BACKEND"`.
    """
    brokers = conf.get().BROKERS
    if alias not in brokers:
        raise ConfigurationError(
            f'No broker {alias!r} under TXMSG["BROKERS"]; '
            f"known: {', '.join(sorted(brokers))}."
        )
    return of_entry(alias, brokers[alias])


def of_entry(alias: str, entry: Mapping[str, Any]) -> Broker:
    """Return the Broker of an entry of TXMSG["BROKERS"]. Raises ConfigurationError."""
    url = entry.get("URL", "")
    path = entry.get("BACKEND")
    if path is None:
        return make_broker(alias, url)
    made = _imported(alias, path)(alias, url)
    assert isinstance(made, Broker)
    return made


def receives(alias: str) -> bool:
    """Return whether messages can be consumed from this alias's broker here: Celery's
    are for its workers."""
    entry = conf.get().BROKERS.get(alias, {})
    return split_url(entry.get("URL", "")).scheme != "celery"


def make_broker(alias: str, url: str) -> Broker:
    """Return a Broker for a URL. Raises ConfigurationError when it is not usable."""
    scheme = split_url(url).scheme
    if scheme not in BACKENDS:
        raise ConfigurationError(
            f"The URL of broker {alias!r} starts with {scheme!r}; "
            f'known: {", ".join(BACKENDS)}. Another broker needs a "BACKEND".'
        )
    path, extra = BACKENDS[scheme]
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        client, called = CLIENTS.get(extra, ("", ""))
        if (error.name or "").partition(".")[0] != client:
            raise
        raise ConfigurationError(
            f"Broker {alias!r} is {scheme}://, and {called} is not installed. "
            f'Run: pip install "django_txmsg[{extra}]"'
        ) from error
    made: Broker = kind(alias, url)
    return made


def absent_client(url: str) -> tuple[str, str, str] | None:
    """Return scheme, extra and client of a URL whose client is not installed."""
    scheme = split_url(url).scheme
    _, extra = BACKENDS.get(scheme, ("", ""))
    module, called = CLIENTS.get(extra, ("", ""))
    return (scheme, extra, called) if module and find_spec(module) is None else None


def _imported(alias: str, path: str) -> type[Broker]:
    """Return the class that a `"BACKEND"` names."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The BACKEND of broker {alias!r}, {path!r}, cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Broker)):
        raise ConfigurationError(
            f"The BACKEND of broker {alias!r}, {path!r}, is no subclass of "
            "django_txmsg.brokers.Broker."
        )
    return found
