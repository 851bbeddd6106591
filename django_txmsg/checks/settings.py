"""Checks of the TXMSG setting: its values, its brokers, its functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import import_string

from .. import brokers, conf
from ..errors import ConfigurationError
from .deployment import MIDDLEWARE

_HOW_A_BROKER_LOOKS = (
    f"A URL looks like {', '.join(one.example for one in brokers.BUILT_IN)}; options "
    'go into the query, ?heartbeat=5. A "BACKEND" is the dotted path of a class.'
)
#: The protocol of a well-known port, and the URL that is for it.
PORTS = {
    "5672": ("amqp", "amqp://HOST:5672"),
    "5671": ("amqp", "amqps://HOST:5671"),
    "61613": ("stomp", "stomp://HOST:61613"),
    "61614": ("stomp", "stomp+ssl://HOST:61614"),
    "61616": ("openwire", "of Java's clients; STOMP is stomp://HOST:61613"),
}
#: Errors after which no further check is possible.
UNREADABLE = frozenset({"txmsg.E001", "txmsg.E002"})


def check() -> list[CheckMessage]:
    """Return the errors that prevent any further check of the settings."""
    return [*_problems(), *_time_zone()]


def check_values() -> list[CheckMessage]:
    """Return the faults of settings whose value has the right type but is unusable."""
    return [
        *_other_name(),
        *_brokers(),
        *_ports(),
        *_paths(),
        *_aliases(),
        *_pipeline(),
        *_middleware(),
    ]


def _problems() -> Iterator[CheckMessage]:
    for problem in conf.problems():
        yield Error(
            f"{problem.path} {problem.message}",
            hint=problem.hint
            or "Each setting with its default: "
            "https://django-txmsg.github.io/django_txmsg/reference/settings.html",
            id="txmsg.E001",
        )


def _time_zone() -> Iterator[CheckMessage]:
    if not django_settings.USE_TZ:
        yield Error(
            "USE_TZ is False, but the due time of a message needs a time zone.",
            hint="Set USE_TZ = True.",
            id="txmsg.E002",
        )


def _other_name() -> Iterator[CheckMessage]:
    if hasattr(django_settings, "TXMSG"):
        return
    for name in dir(django_settings):
        if "TXMSG" in name and isinstance(getattr(django_settings, name), Mapping):
            yield Warning(
                f"The settings have {name} and no TXMSG: defaults are used.",
                hint=f"Rename {name} to TXMSG.",
                id="txmsg.W010",
            )


def _ports() -> Iterator[CheckMessage]:
    for alias, entry in conf.get().BROKERS.items():
        scheme, _, rest = entry.get("URL", "").partition("://")
        hosts = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
        for port in re.findall(r":(\d+)(?:,|$)", hosts):
            protocol, url = PORTS.get(port, ("", ""))
            if protocol and scheme.split("+")[0] not in ("", protocol, protocol + "s"):
                yield Warning(
                    f'TXMSG["BROKERS"]["{alias}"] is {scheme}:// and names port '
                    f"{port}, which is usually another protocol's.",
                    hint=f"For that port the URL is {url}; for {scheme}://, name the "
                    f"port on which the broker listens for it.",
                    id="txmsg.W009",
                )


def _brokers() -> Iterator[CheckMessage]:
    for alias, entry in conf.get().BROKERS.items():
        where = f'TXMSG["BROKERS"]["{alias}"]'
        absent = "BACKEND" not in entry and brokers.without_client(entry["URL"])
        if absent:
            scheme = entry["URL"].partition("://")[0]
            yield Error(
                f"{where} is {scheme}://, and {absent.client} is not installed.",
                hint=f'Run: pip install "django_txmsg[{absent.extra}]"',
                id="txmsg.E004",
            )
            continue
        try:
            wrong = brokers.of_entry(alias, entry).check()
        except (ConfigurationError, OSError, ValueError) as error:
            wrong = [str(error)]
        for one in wrong:
            yield Error(
                f"{where} cannot be used: {one}",
                hint=_HOW_A_BROKER_LOOKS,
                id="txmsg.E003",
            )


def _aliases() -> Iterator[CheckMessage]:
    direct = conf.get().LISTEN_DATABASE
    if direct is not None and direct not in django_settings.DATABASES:
        yield Error(
            f'TXMSG["LISTEN_DATABASE"] is {direct!r}, which is not in DATABASES.',
            hint="Name the alias of a direct connection to the outbox's database, or "
            "leave it out.",
            id="txmsg.E030",
        )


def _paths() -> Iterator[CheckMessage]:
    settings = conf.get()
    for name, path in (
        ('["TRANSACTION_DEFINITION"]', settings.TRANSACTION_DEFINITION),
        ('["MASK"]', settings.MASK),
        ('["HTTP"]["IDEMPOTENCY_CALLER"]', settings.HTTP.IDEMPOTENCY_CALLER),
        *(('["CODECS"]', path) for path in settings.CODECS),
        *(('["STAGE_MIDDLEWARE"]', path) for path in settings.STAGE_MIDDLEWARE),
    ):
        if path is None:
            continue
        try:
            usable = callable(import_string(path))
            why = "it is not a function"
        except Exception as error:
            usable, why = False, f"{type(error).__name__}: {error}"
        if not usable:
            yield Error(
                f"TXMSG{name} names {path!r}, which cannot be used: {why}.",
                hint="Give the dotted path of a function, or of a codec's or a "
                "middleware's class.",
                id="txmsg.E005",
            )


def _pipeline() -> Iterator[CheckMessage]:
    if conf.get().LAKE is not None and not apps.is_installed("django_txmsg.spark"):
        yield Error(
            'TXMSG["LAKE"] is set, but the pipeline\'s app is not installed: nothing '
            "archives the message log, and prune_messages does not delete it.",
            hint='Add "django_txmsg.spark" to INSTALLED_APPS, and migrate.',
            id="txmsg.E013",
        )


def _middleware() -> Iterator[CheckMessage]:
    """Warn of settings that have no effect because the middleware is not installed."""
    http = conf.get().HTTP
    needs = [name for name in ("IDEMPOTENCY", "ROLLBACK_ON_4XX") if getattr(http, name)]
    if needs and not any(map(_is_ours, django_settings.MIDDLEWARE)):
        yield Warning(
            f'TXMSG["HTTP"] has {" and ".join(needs)}, which does nothing: the '
            f"middleware is not in MIDDLEWARE.",
            hint=f"Add {MIDDLEWARE!r} to MIDDLEWARE, as the last one.",
            id="txmsg.W011",
        )


def _is_ours(path: str) -> bool:
    try:
        bases = getattr(import_string(path), "__mro__", ())
    except ImportError:
        return False  # Django says so at the first request
    return MIDDLEWARE in {f"{one.__module__}.{one.__qualname__}" for one in bases}
