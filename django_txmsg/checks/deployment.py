"""Checks for settings that are unsafe in production: `manage.py check --deploy`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Warning
from django.db import connections

from .. import conf
from ..brokers import Broker, find_broker
from ..django_internals import settings_of
from ..envelope.broker_url import split_url
from ..stages import all_stages

MIDDLEWARE = "django_txmsg.middleware.OutboxMiddleware"
#: Well-known credentials.
GUESSED = frozenset({"admin", "changeme", "guest", "password", "system", "manager"})


def check() -> list[CheckMessage]:
    """Return the risks in the settings of brokers, names and databases."""
    found: list[CheckMessage] = []
    for alias, entry in conf.get().BROKERS.items():
        broker = find_broker(alias)
        if broker is not None:  # or another check says why not
            found += _exposed(broker, entry.get("URL", ""))
    for look in (_default_service, _deferred_sqlite, _no_receiver, _for_tests, _twice):
        found += look()
    return found


def _exposed(broker: Broker, url: str) -> Iterator[CheckMessage]:
    where = f'TXMSG["BROKERS"]["{broker.alias}"]'
    try:
        credentials, _, hosts = split_url(url).netloc.rpartition("@")
    except ValueError:
        return  # a custom broker's URL, which only it can read
    user, _, password = credentials.partition(":")
    safe = broker.tls_scheme
    if safe and not all(map(_local, hosts.split(","))):
        yield Warning(
            f"{where} sends messages and its password over the network in the clear.",
            hint=f"Use a URL with {safe}://, and ca= for your own certificate "
            "authority.",
            id="txmsg.W101",
        )
    if (password or user).lower() in GUESSED or password == user != "":
        yield Warning(
            f"{where} logs in as {user!r} with a password that is easy to guess.",
            hint="Make a user for this service on the broker, with a password.",
            id="txmsg.W102",
        )


def _default_service() -> Iterator[CheckMessage]:
    if conf.get().SERVICE == conf.Settings().SERVICE:
        yield Warning(
            'TXMSG["SERVICE"] is not set: two services of the same name on one broker '
            "take each other's control messages.",
            hint='Set TXMSG["SERVICE"] to this service\'s own name.',
            id="txmsg.W103",
        )


def _deferred_sqlite() -> Iterator[CheckMessage]:
    for alias in connections:
        connection: Any = connections[alias]
        if connection.vendor != "sqlite":
            continue
        mode = settings_of(connection).get("OPTIONS", {}).get("transaction_mode")
        if str(mode).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
            yield Warning(
                f"SQLite database {alias!r} begins transactions without a lock: with "
                f'several processes, one that reads first can fail with "database is '
                f'locked" when it writes.',
                hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE", "timeout": 20}.',
                id="txmsg.W104",
            )


def _for_tests() -> Iterator[CheckMessage]:
    if conf.get().DISPATCH_ON_COMMIT == "inline":
        yield Warning(
            'TXMSG["DISPATCH_ON_COMMIT"] is "inline": each request waits for the '
            "broker, and for its time-outs while the broker is down.",
            hint='Leave it out ("thread"), or set "off" and let the relay send.',
            id="txmsg.W106",
        )
    if not conf.get().REQUIRE_ATOMIC:
        yield Warning(
            'TXMSG["REQUIRE_ATOMIC"] is False: a message that is stored outside a '
            "transaction is sent even if the work around it fails.",
            hint="Leave it out, and send inside transaction.atomic(), a request or a "
            "stage.",
            id="txmsg.W107",
        )


def _twice() -> Iterator[CheckMessage]:
    if list(settings.MIDDLEWARE).count(MIDDLEWARE) > 1:
        yield Warning(
            f"{MIDDLEWARE!r} is in MIDDLEWARE more than once: each request would open "
            f"a session inside another one.",
            hint="Keep the last one.",
            id="txmsg.W108",
        )


def _no_receiver() -> Iterator[CheckMessage]:
    sends = conf.get().HTTP.CONTROL_MESSAGE != "off"
    if sends and MIDDLEWARE in settings.MIDDLEWARE and not all_stages():
        yield Warning(
            "Requests send control messages to this service, which has no stage and so "
            "perhaps no `manage.py consume` to receive them: they would pile up on the "
            "broker, each for a day.",
            hint='Run `manage.py txmsg run`, or set TXMSG["HTTP"]'
            '["CONTROL_MESSAGE"] = "off": then the relay alone stands in for a web '
            "process that dies.",
            id="txmsg.W105",
        )


def _local(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
