"""Hop 1 for Celery: the call of a task stores the task's message as a row of the
outbox.

Celery creates the message as usual, with its routing, canvas and ids, but a stand-in
for kombu's producer keeps the message instead of publishing it. The call contacts
neither the broker nor the result backend.

A message that continues the running task, such as a retry, is not stored, because its
row would be rolled back if the task fails. Such a message goes directly to the broker.
"""

from __future__ import annotations

import re
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kombu
from celery._state import get_current_worker_task
from celery.utils.saferepr import saferepr
from django.apps import apps
from django.db import connections
from kombu.utils import json

from .. import conf, tracing, wire
from ..brokers import of_kind
from ..brokers.celery_publication import HEADER, Publication
from ..dead_letters import masking
from ..django_internals import in_block
from ..envelope.message import carried, new_id
from ..errors import ConfigurationError, InvalidMessage, TransactionRequired

if TYPE_CHECKING:
    from ..models.outbox_store import Origin
    from ..sending.scope import Scope


@dataclass
class Run:
    """One execution of a task. When the task's transaction has ended, the messages in
    `later` are sent to the broker."""

    later: list[Publication] = field(default_factory=list)
    ended: bool = False


#: The current execution of a task in this context, or None.
current_run: ContextVar[Run | None] = ContextVar(
    "django_txmsg_celery_run", default=None
)


def without_asking(app: Any) -> None:
    """Make sure that calling a task does not contact the app's result backend. The
    backend is contacted only when a caller waits for a result."""
    backend = app.backend
    if getattr(backend, "is_async", False) and not hasattr(backend, "txmsg"):
        backend.txmsg = _Patience(backend)


class _Patience:
    """Replaces four methods of a result backend, so that calling a task inside a
    transaction does not contact the backend."""

    def __init__(self, backend: Any) -> None:
        self._call = backend.on_task_call
        self._add = backend.add_pending_result
        self._wait, self._iterate = backend.wait_for_pending, backend.iter_native
        #: Results that no caller has waited for yet, while one could.
        self._results: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        backend.on_task_call = self.on_task_call
        backend.add_pending_result = self.add_pending_result
        backend.wait_for_pending = self.wait_for_pending
        backend.iter_native = self.iter_native

    def on_task_call(self, producer: Any, task_id: str) -> Any:
        """Call the backend's own method, unless the task's message is kept for the
        outbox."""
        return {} if hasattr(producer, "published") else self._call(producer, task_id)

    def add_pending_result(self, result: Any, **options: Any) -> Any:
        """Wait in the background for the result of a task. Inside a transaction,
        postpone this until a caller waits for a result."""
        if not any(map(in_block, connections.all(initialized_only=True))):
            return self._add(result, **options)
        number, results = id(result), self._results
        gone = weakref.ref(result, lambda _: results.pop(number, None))
        results[number] = gone, options
        return result

    def wait_for_pending(self, result: Any, **options: Any) -> Any:
        """Wait for this result, and return it. First start the background waits that
        `add_pending_result()` has postponed."""
        self._catch_up()
        return self._wait(result, **options)

    def iter_native(self, result: Any, **options: Any) -> Any:
        """Return an iterator that waits for the results of a group. First start the
        background waits that `add_pending_result()` has postponed."""
        self._catch_up()
        return self._iterate(result, **options)

    def _catch_up(self) -> None:
        while self._results:
            reference, options = self._results.popitem()[1]
            result = reference()
            if result is not None:
                self._add(result, **options)


#: As long as Celery's own.
_LONGEST = 1024
#: The third part of a body, if nothing follows the task.
_NOTHING = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))


# `argsrepr` and `kwargsrepr` travel in headers and events, to the logs of workers and
# to monitors. The arguments themselves are in the body, which is masked where it is
# shown.
def hidden(destination: str, arguments: tuple[Any, Any]) -> dict[str, str]:
    """Return the options with which Celery shows masked texts in place of a call's
    arguments. The options are empty if the settings have no mask."""
    if conf.get().MASK is None:
        return {}
    args, kwargs = arguments
    shown: Any = None
    try:
        body = json.dumps([args or [], kwargs or {}, _NOTHING]).encode()
    except Exception:
        body = None  # needs another serializer: not shown
    if body is not None:
        _, shown = masking.shown(destination, {}, body, wire.JSON)
    texts = (masking.MASKED, masking.MASKED)
    if isinstance(shown, list | tuple) and len(shown) == 3:
        texts = (saferepr(shown[0], _LONGEST), saferepr(shown[1], _LONGEST))
    return dict(zip(("argsrepr", "kwargsrepr"), texts, strict=True))


#: Takes the task's id and the producer, and further options by name.
Send = Callable[..., Any]


class StoringProducer:
    """Stands in for kombu's producer while Celery creates a task's message."""

    serializer = None

    def __init__(self) -> None:
        self.published: list[Publication] = []

    def publish(self, body: Any, **given: Any) -> None:
        """Keep the message that Celery would publish."""
        self.published.append(Publication.make(body, given))

    @property
    def connection(self) -> StoringProducer:
        """Return this object. Celery uses the connection only to translate errors."""
        return self

    def _reraise_as_library_errors(self) -> Any:
        return nullcontext()


def stands_in(producer: Any) -> bool:
    """Return whether the producer is a `StoringProducer`, which uses no connection."""
    return isinstance(producer, StoringProducer)


def call(
    app: Any,
    name: str,
    arguments: tuple[Any, Any],
    send: Send,
    *,
    task_id: str | None,
    producer: Any,
    leads: Sequence[Any],
    using: str | None,
    nesting: int,
) -> Any:
    """Call `send(task_id, producer)`, and return its result. If a transaction is open,
    store the message that `send` publishes.

    `leads` are the connections and producers that the caller has passed. Raises
    InvalidMessage if the message must be stored, but one of `leads` belongs to another
    broker than the app's.
    """
    if stands_in(producer) or not apps.models_ready:
        return send(task_id, producer)
    masked = hidden(place(name), arguments)
    if _continues(task_id, nesting):
        if (run := current_run.get()) is None:
            return send(task_id, producer, **masked)
        refuse_another_broker(app, name, producer, *leads)
        return _send_later(send, app, task_id, run, masked)
    # Imported here: an app is created before Django's models can be imported.
    from ..sending.scope import alias_of, current_scope

    current, alias = current_scope(), alias_of(using)
    if not in_block(connections[alias]):
        if requires(app) and not _has_its_own(producer):
            raise TransactionRequired(
                f"The task {name!r} was called with no transaction open on database "
                f'{alias!r}, and TXMSG["CELERY"]["REQUIRE_ATOMIC"] is True. Wrap the '
                f"call and your own queries in transaction.atomic(using={alias!r}). "
                f"If an on_commit() hook calls the task, drop the hook, and call the "
                f"task inside the transaction."
            )
        return send(task_id, producer, **masked)
    refuse_another_broker(app, name, producer, *leads)
    origin: Origin = "caller"
    if task_id is None and current is not None and current.cause is not None:
        origin = "derived"
        # A call never joins the broker's transaction or the rows of mode none.
        task_id = str(
            current.derived_id(
                alias,
                lambda: (name, content(arguments)),
                by_content=current.enlist is not None,
            )
        )
    elif task_id is None:
        origin, task_id = "new", str(new_id())
    stand_in = StoringProducer()
    without_asking(app)
    result = send(task_id, stand_in, **masked)
    _store(app, name, task_id, stand_in.published, alias, current, origin)
    return result


class _Encoder(json.JSONEncoder):  # type: ignore[misc]  # published without type hints
    """Encodes every value."""

    def default(self, o: Any) -> Any:
        try:
            return super().default(o)
        except TypeError:
            return repr(o)


def content(value: object) -> object:
    """Return a text that identifies the arguments of a call. The text is the same in
    every process if kombu can write the arguments as JSON."""
    try:
        return json.dumps(value, cls=_Encoder)
    except Exception:
        return repr(value)  # for example because a dict has a tuple as a key


def stores(using: str | None) -> bool:
    """Return whether the call of a task would now be stored as a row."""
    from ..sending.scope import alias_of

    return in_block(connections[alias_of(using)])


def requires(app: Any) -> bool:
    """Return whether the call of a task outside a transaction is an error."""
    return conf.get().CELERY.REQUIRE_ATOMIC and not in_worker(app)


def _has_its_own(producer: Any) -> bool:
    """Return whether the caller passes a producer of its own, as Celery beat does. The
    producer of a group comes from the app's pool and does not count."""
    return producer is not None and "release" not in vars(producer)


def in_worker(app: Any) -> bool:
    """Return True if this process is a Celery worker or this thread runs a task. A
    check for a task is not enough: a worker's main process runs no tasks, but calls the
    links of a task that has exceeded its hard time limit."""
    worker = getattr(app.loader, "worker_initialized", False)
    return bool(worker) or get_current_worker_task() is not None


def _continues(task_id: str | None, nesting: int) -> bool:
    """Return whether a call continues the running task: the call is a retry or a
    replacement, or is made after the task's transaction has ended."""
    run = current_run.get()
    if run is not None and run.ended:
        return True
    task = get_current_worker_task()
    if task is None:
        return False
    request = task.request
    nested = getattr(request, "replaced_task_nesting", 0) or 0
    return (task_id is not None and task_id == request.id) or nesting > nested


def _send_later(
    send: Send, app: Any, task_id: str | None, run: Run, masked: dict[str, str]
) -> Any:
    """Call `send`, and keep its message in `run.later` instead of sending it. Return
    the result of `send`."""
    stand_in = StoringProducer()
    without_asking(app)
    result = send(task_id, stand_in, **masked)
    run.later += stand_in.published
    return result


def refuse_another_broker(app: Any, name: str, *leads: Any) -> None:
    """Raise InvalidMessage if one of these connections or producers belongs to another
    broker than the app's, because a row of the outbox is always sent to the app's
    broker."""
    given = [one for one in leads if one is not None]
    if not given:
        return
    own = app.connection_for_write()
    places = {_place(own), *(_place(kombu.Connection(url)) for url in own.alt)}
    for lead in given:
        known = isinstance(lead, kombu.Connection)
        connection = lead if known else getattr(lead, "connection", None)
        if connection is None or _place(connection) not in places:
            raise InvalidMessage(
                f"The task {name!r} was called inside a transaction with a connection "
                f"or a producer of your own, which leads to another broker than "
                f"{own.as_uri()}. A stored task leaves through that one, the broker of "
                f"its app {app.main!r}. Nothing was stored. Call the task by the app "
                f"that has the other broker "
                f'(other_app.send_task({name!r}, …), with an entry of TXMSG["BROKERS"] '
                f"like celery://shop.other:other_app), or call it after the "
                f"transaction."
            )


def _place(connection: kombu.Connection) -> tuple[Any, ...]:
    """Return the parts of a connection's URL that identify the broker, without the user
    name."""
    info = connection.info()
    place = [info[key] for key in ("transport", "hostname", "port", "virtual_host")]
    if "redis" in place[0]:
        place[3] = str(place[3] or "").strip("/") or "0"  # the database without a name
    return tuple(place)


def _store(
    app: Any,
    name: str,
    task_id: str,
    published: Sequence[Publication],
    alias: str,
    current: Scope | None,
    origin: Origin,
) -> None:
    from ..models.outbox_store import NewMessage
    from ..sending.storing import store

    task, *task.then = published
    if len(task.body) > conf.get().MAX_MESSAGE_BYTES:
        raise InvalidMessage(
            f"The arguments of {name!r} have {len(task.body)} bytes; at most "
            f"{conf.get().MAX_MESSAGE_BYTES} are accepted "
            f'(TXMSG["MAX_MESSAGE_BYTES"]). Store them elsewhere and send an id.'
        )
    message_id, destination = identity(task_id), place(name)
    root = str(task.headers.get("root_id") or task_id)
    if current is not None and current.cause is not None:
        root = current.cause.correlation_id or str(current.cause.id)
    headers: dict[str, str] = {}
    committed = tracing.created(message_id, destination, headers)
    headers[HEADER] = task.text()
    row = NewMessage(
        message_id=message_id,
        broker=broker_of(app),
        destination=destination,
        content_type=task.content_type,
        body=task.body,
        correlation_id=carried(root, wire.MAX_CORRELATION_ID),
        session_id=current.session_id if current else None,
        headers=headers,
        origin=origin,
        committed=committed,
    )
    store([row], alias)


#: Characters that a destination cannot have.
_NO_NAME = re.compile(r"^[^A-Za-z0-9_]|[^A-Za-z0-9_.\-]")


def place(name: str) -> str:
    """Return the task's name in a form that is valid for a destination and a stage."""
    return _NO_NAME.sub("_", name)[:255]


def identity(task_id: str, nesting: int = 0) -> uuid.UUID:
    """Return the message id of a task. In Celery, the replacement of a task keeps the
    task's id. Here the replacement gets another id, derived from `nesting`, the number
    of replacements."""
    try:
        if not nesting:
            return uuid.UUID(task_id)
    except ValueError:
        pass
    return uuid.uuid5(wire.NAMESPACE, f"celery/{task_id}/{nesting}")


def broker_of(app: Any) -> str:
    """Return the alias of the broker for this app. Raises ConfigurationError if
    TXMSG["BROKERS"] has no such entry."""
    app = getattr(app, "_get_current_object", lambda: app)()
    for alias, broker in of_kind("celery").items():
        if broker.app is app:
            return alias
    raise ConfigurationError(
        f'No entry of TXMSG["BROKERS"] has the Celery app {app.main!r}: add one like '
        f'"celery": {{"URL": "celery://shop.celery:app"}}, with the module that your '
        f"app is in."
    )
