"""Checks of settings: of TXMSG, its values, its brokers and its functions; of settings
that are unsafe in production (`manage.py check --deploy`); and of settings of Celery
with which a task can be lost or executed twice."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections
from django.utils.module_loading import import_string

from .. import brokers, conf
from ..django_internals import settings_of
from ..envelope.broker_url import split_url
from ..envelope.codec import Codec
from ..errors import ConfigurationError
from ..http_outbox import MIDDLEWARE, count_middleware
from ..lazy_imports import install
from ..monitoring.databases import once_tasks
from ..stages import all_stages

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
#: Well-known credentials.
GUESSED = frozenset({"admin", "changeme", "guest", "password", "system", "manager"})

#: Transports that keep messages in the memory of one process.
_NOWHERE = ("memory", "memory+socket")


def check() -> Iterator[CheckMessage]:
    """Report the errors that prevent any further check of the settings."""
    for problem in conf.problems():
        yield Error(
            f"{problem.path} {problem.message}",
            hint=problem.hint
            or "Each setting with its default: "
            "https://django-txmsg.github.io/django_txmsg/reference/settings.html",
            id="txmsg.E001",
        )
    if not django_settings.USE_TZ:
        yield Error(
            "USE_TZ is False, but the due time of a message needs a time zone.",
            hint="Set USE_TZ = True.",
            id="txmsg.E002",
        )


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


def _other_name() -> Iterator[CheckMessage]:
    if hasattr(django_settings, "TXMSG"):
        return
    for name in dir(django_settings):
        named = "TXMSG" in name.replace("_", "")  # TX_MSG, say
        if named and isinstance(getattr(django_settings, name), Mapping):
            yield Warning(
                f"The settings have {name} and no TXMSG: defaults are used.",
                hint=f"Rename {name} to TXMSG.",
                id="txmsg.W010",
            )


def _ports() -> Iterator[CheckMessage]:
    for alias, entry in conf.get().BROKERS.items():
        scheme, _, rest = entry.get("URL", "").partition("://")
        scheme = scheme.lower()
        if scheme not in brokers.BY_SCHEME:
            continue  # another check reports it, or it is a BACKEND's own
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
                hint=f"Run: {install(absent.module)}",
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
    lake = conf.get().LAKE
    named = [
        ('["PIPELINE"]["DATABASES"]', one) for one in conf.get().PIPELINE.DATABASES
    ]
    if lake is not None and lake.READER and "://" not in lake.READER:
        named.append(('["LAKE"]["READER"]', lake.READER))
    for name, alias in named:
        if alias not in connections:
            yield Error(
                f"TXMSG{name} has {alias!r}, which is not in DATABASES.",
                hint=f"Known here: {', '.join(sorted(connections))}.",
                id="txmsg.E006",
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
            found = import_string(path)
            usable = callable(found)
            why = "it is not a function"
            if name == '["CODECS"]':
                usable = isinstance(found(), Codec)
                why = "it makes no Codec"
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
    if needs and not count_middleware():
        yield Warning(
            f'TXMSG["HTTP"] has {" and ".join(needs)}, which does nothing: the '
            f"middleware is not in MIDDLEWARE.",
            hint=f"Add {MIDDLEWARE!r} to MIDDLEWARE, as the last one.",
            id="txmsg.W011",
        )


def check_deployment() -> list[CheckMessage]:
    """Return the risks in the settings of brokers, names and databases."""
    found: list[CheckMessage] = []
    for alias, entry in conf.get().BROKERS.items():
        broker = brokers.find_broker(alias)
        if broker is not None:  # or another check says why not
            found += _exposed(broker, entry.get("URL", ""))
    return [*found, *_deferred_sqlite(), *_unsafe()]


def _exposed(broker: brokers.Broker, url: str) -> Iterator[CheckMessage]:
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


def _unsafe() -> Iterator[CheckMessage]:
    """Warn of values that are for tests and for trying, or with which messages pile
    up."""
    settings, installed = conf.get(), count_middleware()
    if settings.SERVICE == conf.Settings().SERVICE:
        yield Warning(
            'TXMSG["SERVICE"] is not set: two services of the same name on one broker '
            "take each other's control messages.",
            hint='Set TXMSG["SERVICE"] to this service\'s own name.',
            id="txmsg.W103",
        )
    if settings.DISPATCH_ON_COMMIT == "inline":
        yield Warning(
            'TXMSG["DISPATCH_ON_COMMIT"] is "inline": each request waits for the '
            "broker, and for its time-outs while the broker is down.",
            hint='Leave it out ("thread"), or set "off" and let the relay send.',
            id="txmsg.W106",
        )
    if not settings.REQUIRE_ATOMIC:
        yield Warning(
            'TXMSG["REQUIRE_ATOMIC"] is False: a message that is stored outside a '
            "transaction is sent even if the work around it fails.",
            hint="Leave it out, and send inside transaction.atomic(), a request or a "
            "stage.",
            id="txmsg.W107",
        )
    if installed > 1:
        yield Warning(
            f"{MIDDLEWARE!r}, or a subclass, is in MIDDLEWARE more than once: each "
            f"request would open a session inside another one.",
            hint="Keep the last one.",
            id="txmsg.W108",
        )
    sends = settings.HTTP.CONTROL_MESSAGE != "off"
    if sends and installed and not all_stages():
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


def check_celery() -> Iterator[CheckMessage]:
    """Check each app that a celery:// URL names."""
    celerys = brokers.of_kind("celery")
    for alias, broker in celerys.items():
        where, app = f'TXMSG["BROKERS"]["{alias}"]', broker.app
        for message, hint in (*_lossy(app), *_once(app)):
            yield Error(f"{where}: {message}", hint=hint, id="txmsg.E020")
        yield from _plain(where, app)
        yield from _uncounted(where, app)
    yield from _consumed(celerys)


def _lossy(app: Any) -> Iterator[tuple[str, str]]:
    from ..brokers.celery import refused_serializers

    settings = app.conf
    backend = str(settings.result_backend or "")
    if backend.startswith(("rpc", "amqp")):
        yield (
            f"the result backend {backend.partition('://')[0]}:// sends results to "
            "the process that sent the task, and that is the relay.",
            "Use a backend that stores results, such as Redis or a database, or none.",
        )
    if settings.task_protocol != 2:
        yield (
            f"task_protocol is {settings.task_protocol}, but messages are stored in "
            f"the form of protocol 2.",
            "Leave task_protocol at 2.",
        )
    transport = str(settings.broker_url or "").partition("://")[0]
    if transport in _NOWHERE and not settings.task_always_eager:
        yield (
            f"the transport {transport}:// keeps tasks in the memory of one process.",
            "Set broker_url to a broker that the workers share.",
        )
    try:
        refused = refused_serializers(app)
    except ConfigurationError as error:
        refused = []
        yield (
            str(error),
            "Correct the name, or register the serializer where the app is defined.",
        )
    for name in refused:
        yield (
            f"tasks are written with the serializer {name!r}, which is not in "
            f"accept_content: the workers drop them.",
            "Add it to accept_content, or use another serializer.",
        )
    if settings.task_default_delivery_mode in ("transient", 1):
        yield (
            "task_default_delivery_mode is transient: the broker forgets tasks when it "
            "is restarted, after the relay has its confirm for them.",
            'Leave task_default_delivery_mode at "persistent".',
        )


def _once(app: Any) -> Iterator[tuple[str, str]]:
    tasks = once_tasks(app)
    # Tasks found by autodiscovery log the same in their worker.
    for task in tasks:
        for careless in task.careless():
            yield careless, "Leave it to OnceTask."
    if tasks and app.conf.worker_deduplicate_successful_tasks:
        yield (
            f"worker_deduplicate_successful_tasks is True: if a worker dies before the "
            f"chord of an OnceTask such as {tasks[0].name!r} has counted it, Celery "
            f"drops the task's redelivery, and the chord never ends.",
            "Leave worker_deduplicate_successful_tasks at False: OnceTask recognizes "
            "copies itself.",
        )


def _uncounted(where: str, app: Any) -> Iterator[CheckMessage]:
    backend = str(app.conf.result_backend or "")
    if backend.startswith("django-db") and once_tasks(app):
        yield Warning(
            f"{where}: with the result backend django-db, a chord of OnceTasks may "
            f"never call its body if a worker is killed right after the chord has "
            f"counted a task.",
            hint="Use Redis as the result backend if your app has chords. If it has "
            "none, silence this warning.",
            id="txmsg.W021",
        )


def _plain(where: str, app: Any) -> Iterator[CheckMessage]:
    from ..celery import Celery, TransactionalTask

    lossy = [
        name
        for name, task in sorted(app.tasks.items())
        if hasattr(task, "delay_on_commit") and not isinstance(task, TransactionalTask)
    ]
    if isinstance(app, Celery) and lossy:
        yield Warning(
            f"{where}: delay_on_commit() of {', '.join(lossy[:5])} is Celery's own, "
            f"and loses the task if the process dies right after its commit.",
            hint="Give the task, or its class, django_txmsg.celery.TransactionalTask "
            "as its base.",
            id="txmsg.W020",
        )
    if not isinstance(app, Celery) and not issubclass(app.Task, TransactionalTask):
        yield Warning(
            f"{where}: the app is a plain Celery app, and so are its tasks: a call "
            f"inside a transaction goes to the broker at once, not through the outbox.",
            hint="Write `from django_txmsg.celery import Celery`, or give the app "
            'task_cls="django_txmsg.celery:TransactionalTask".',
            id="txmsg.W020",
        )


def _consumed(celerys: Collection[str]) -> Iterator[CheckMessage]:
    for stage in all_stages():
        if stage.broker in celerys:
            yield Error(
                f"Stage {stage.name!r} consumes from the broker {stage.broker!r}, "
                f"whose messages are tasks for Celery's workers.",
                hint="Give the stage another broker, or make it a Celery task.",
                id="txmsg.E021",
            )
    if "default" in celerys:
        yield Error(
            'TXMSG["BROKERS"]["default"] is a Celery app\'s broker, which carries '
            "tasks only: messages and control messages have nowhere to go.",
            hint='Name it "celery", and leave "default" at database:// if there is no '
            "other broker.",
            id="txmsg.E021",
        )
