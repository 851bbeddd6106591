"""Creates the brokers of TXMSG["BROKERS"]: `get_broker("default")` returns the broker
with that alias.

To use a broker of your own, set `"BACKEND"` to the dotted path of a subclass of
`Broker`. The subclass must pass `django_txmsg.testing.broker_suite`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from django.utils.module_loading import import_string

from .. import conf
from ..envelope.broker_url import split_url
from ..errors import ConfigurationError
from ..lazy_imports import needs
from .base import Broker, Delivery, Outgoing, Session

__all__ = [
    "Broker",
    "Delivery",
    "Outgoing",
    "Session",
    "find_broker",
    "get_broker",
    "make_broker",
]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in broker: the path of its class, its URL schemes and its client library.
    The class and the library are imported when the broker is first created."""

    #: Its class, below this package.
    path: str
    schemes: tuple[str, ...]
    #: The form of its URL.
    example: str
    #: The module of its client, which is also the extra that installs the client, and
    #: the client's display name.
    module: str = ""
    client: str = ""


#: Every built-in broker. The classes declare everything else.
BUILT_IN = (
    BuiltIn("database.DatabaseBroker", ("database",), "database://"),
    BuiltIn(
        "stomp.StompBroker",
        ("stomp", "stomp+ssl"),
        "stomp://user:password@host:61613 (stomp+ssl:// for TLS)",
        module="stomp",
        client="stomp.py",
    ),
    BuiltIn(
        "amqp.AmqpBroker",
        ("amqp", "amqps"),
        "amqp://user:password@host:5672 (amqps:// for TLS)",
        module="amqp",
        client="py-amqp",
    ),
    BuiltIn(
        "celery.CeleryBroker",
        ("celery",),
        "celery://module:app",
        module="celery",
        client="Celery",
    ),
)
BY_SCHEME = {scheme: one for one in BUILT_IN for scheme in one.schemes}


def get_broker(alias: str = "default") -> Broker:
    """Return a new Broker for this alias, without connecting.

    Raises ConfigurationError if the alias, the URL scheme or `"BACKEND"` is unknown, or
    if the broker's client library is not installed.
    """
    brokers = conf.get().BROKERS
    if alias not in brokers:
        raise ConfigurationError(
            f'No broker {alias!r} under TXMSG["BROKERS"]; '
            f"known: {', '.join(sorted(brokers))}."
        )
    return of_entry(alias, brokers[alias])


def of_entry(alias: str, entry: Mapping[str, Any]) -> Broker:
    """Return the Broker for an entry of TXMSG["BROKERS"]. Raises ConfigurationError if
    the entry is not usable."""
    url = entry.get("URL", "")
    path = entry.get("BACKEND")
    if path is None:
        return make_broker(alias, url)
    try:
        found = import_string(path)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The BACKEND of broker {alias!r}, {path!r}, cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Broker)):
        raise ConfigurationError(
            f"The BACKEND of broker {alias!r}, {path!r}, is not a subclass of "
            "django_txmsg.brokers.Broker."
        )
    return found(alias, url)


def find_broker(alias: str) -> Broker | None:
    """Return a new Broker for this alias, or None if `get_broker()` would raise."""
    try:
        return get_broker(alias)
    except (ConfigurationError, ValueError):
        return None


def of_kind(kind: str) -> dict[str, Any]:
    """Return a dict of all configured brokers of one kind. The keys are their
    aliases."""
    found = {alias: find_broker(alias) for alias in conf.get().BROKERS}
    return {a: one for a, one in found.items() if one is not None and one.kind == kind}


def make_broker(alias: str, url: str) -> Broker:
    """Return a Broker for a URL. Raises ConfigurationError if the scheme is unknown or
    the client library is not installed."""
    scheme = split_url(url).scheme
    if scheme not in BY_SCHEME:
        raise ConfigurationError(
            f"The URL of broker {alias!r} starts with {scheme!r}; "
            f"known: {', '.join(sorted(BY_SCHEME))}. Queues in your own database are "
            f'database://. Another broker needs a "BACKEND".'
        )
    known = BY_SCHEME[scheme]
    broker = f"Broker {alias!r} ({scheme}://)"
    with needs(broker, known.module, known.module, error=ConfigurationError):
        kind = import_string(f"{__name__}.{known.path}")
    made: Broker = kind(alias, url)
    return made


def without_client(url: str) -> BuiltIn | None:
    """Return the built-in broker for a URL, if the broker's client library is not
    installed. Otherwise return None."""
    found = BY_SCHEME.get(url.partition("://")[0].lower())
    absent = found and found.module and find_spec(found.module) is None
    return found if absent else None
