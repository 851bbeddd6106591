"""Brokers by alias: `get_broker("default")` makes what TXMSG["BROKERS"] names."""

from __future__ import annotations

from .. import conf
from ..envelope.broker_url import split_url
from ..errors import ConfigurationError
from .base import Broker

SCHEMES = ("database", "stomp", "stomp+ssl")


def get_broker(alias: str = "default") -> Broker:
    """Return a new Broker for this alias. Nothing is connected yet.

    Raises ConfigurationError for an unknown alias or URL scheme.
    """
    brokers = conf.get().BROKERS
    if alias not in brokers:
        raise ConfigurationError(
            f'No broker {alias!r} under TXMSG["BROKERS"]; '
            f"known: {', '.join(sorted(brokers))}."
        )
    return make_broker(alias, brokers[alias]["URL"])


def make_broker(alias: str, url: str) -> Broker:
    """Return a Broker for a URL. Raises ConfigurationError when it is not usable."""
    scheme = split_url(url).scheme
    if scheme == "database":
        from .database import DatabaseBroker

        return DatabaseBroker(alias, url)
    if scheme in ("stomp", "stomp+ssl"):
        try:
            from .stomp import StompBroker
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "stomp":
                raise
            raise ConfigurationError(
                f"Broker {alias!r} is a STOMP broker, and stomp.py is not installed. "
                f'Run: pip install "django_txmsg[stomp]"'
            ) from error

        return StompBroker(alias, url)
    raise ConfigurationError(
        f"The URL of broker {alias!r} starts with {scheme!r}; "
        f"known: {', '.join(SCHEMES)}."
    )
