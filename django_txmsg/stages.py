"""Hop 8: your functions, declared with `@stage` and found by autodiscovery.

When Django starts, it imports the `stages` module of every installed app.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from django.apps import apps
from django.utils.module_loading import import_string

from . import codecs, conf, wire
from .envelope.handler import Body, Declaring, Handler, accepted, bound, check, origin
from .envelope.message import MAX_NAME_LENGTH, Message
from .envelope.redelivery import RedeliveryPolicy
from .envelope.stage_options import Rate, TransactionMode, check_mode
from .envelope.stage_options import TransactionDefinition as TransactionDefinition
from .envelope.typed_body import BodyReader
from .errors import ConfigurationError
from .sending import pending, undoing, unique
from .sending.answering import replying
from .sending.destination import Destination
from .sending.outbox import destination_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Longest time-out of a handler, in seconds: PostgreSQL counts milliseconds in an
#: integer.
MAX_TIMEOUT = 7 * 86_400.0
#: Most messages of a batch. SQLite takes the parameters of 5,461 in one statement.
MAX_BATCH = 5000
Order = Literal["block", "skip"]
ORDERS: tuple[Order, ...] = ("block", "skip")
#: What other packages call an option, and its name here.
_SYNONYMS = {
    "retries": "max_redeliveries",
    "max_retries": "max_redeliveries",
    "retry_backoff": "backoff",
    "retry_delay": "initial_delay",
    "time_limit": "timeout",
    "database": "using",
    "threads": "concurrency",
    "workers": "concurrency",
}
#: What these options must be, and how an error says it.
_KINDS: dict[str, tuple[Any, str]] = {
    "redelivery": (
        RedeliveryPolicy,
        "a RedeliveryPolicy, like RedeliveryPolicy(max_redeliveries=3)",
    ),
    "isolation": (str, 'an isolation level, like "serializable"'),
    "using": (str, "an alias of DATABASES"),
    "broker": (str, 'an alias of TXMSG["BROKERS"]'),
    "undoes": (str, "a Destination"),
}

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True)
class Stage:
    """A handler, its destination, and the options of its transaction."""

    name: str
    destination: str
    handler: Handler
    transaction: TransactionMode = "outbox"
    redelivery: RedeliveryPolicy | None = None
    isolation: str | None = None
    using: str | None = None
    concurrency: int = 1
    broker: str = "default"
    batch: int = 1
    timeout: float | None = None
    #: Whether messages of one key run in order, and whether a dead one blocks them.
    ordered: Order | None = None
    #: How many messages it processes in a time, for each value of the header `per`.
    rate: Rate | None = None
    per: str | None = None
    #: The annotation of the body that the handler takes, or that body's reader; None:
    #: the handler takes the message.
    accepts: Any = None
    #: The destination of the requests that it undoes.
    undoes: str | None = None
    #: Wraps the handler so that its result is the answer; None: it sends its answers
    #: itself.
    answering: Callable[[Handler], Handler] | None = None
    #: What `resolved()` has determined.
    _definition: TransactionDefinition | None = None
    #: Middlewares around its transaction (`consuming/stage_middleware.py`).
    outside: Any = None

    @property
    def is_resolved(self) -> bool:
        """Whether `resolved()` returned this stage. Such a stage stores its redelivery
        policy and transaction. A consumer processes messages only for such stages."""
        return self._definition is not None

    def resolved(self) -> Stage:
        """Return a copy of the stage. The copy stores the redelivery policy and the
        transaction that apply now. So all steps of a message's processing use the same
        values."""
        assert self.reader is None or self.reader  # a missing codec is an error at once
        return replace(self, redelivery=self.policy, _definition=self.definition)

    @property
    def reader(self) -> BodyReader | None:
        """The reader that decodes a message's body into the handler's argument. None if
        the handler takes only the message; the message's body is parsed JSON then.
        Raises ConfigurationError if no codec handles the argument's type."""
        if self.accepts is None or isinstance(self.accepts, BodyReader):
            return self.accepts
        return codecs.reader(self.accepts)

    @property
    def reads(self) -> Sequence[tuple[str, int]] | None:
        """The types of message bodies that the handler can read, each with the version
        that this code has. None if the handler's only parameter is the message."""
        reader = self.reader
        return None if reader is None else reader.reads

    @property
    def policy(self) -> RedeliveryPolicy:
        """The stage's own redelivery policy, or the policy of the settings."""
        if self.redelivery is not None:
            return self.redelivery
        given = vars(conf.get().REDELIVERY)
        return RedeliveryPolicy(
            **{name.lower(): value for name, value in given.items()}
        )

    @property
    def subscriber(self) -> str | None:
        """The name of the stage's subscription, if its destination is a topic."""
        if not wire.is_topic(self.destination):
            return None
        return f"{conf.get().SERVICE}.{self.name}"

    @property
    def definition(self) -> TransactionDefinition:
        """The stage's transaction, from the stage's own options. For options that the
        stage does not set, the setting TRANSACTION_DEFINITION applies."""
        if self._definition is not None:
            return self._definition
        default = TransactionDefinition()
        path = conf.get().TRANSACTION_DEFINITION
        if path is not None:
            default = import_string(path)(self) or default
        return TransactionDefinition(
            using=self.using or default.using,
            isolation=self.isolation or default.isolation,
        )


class CallNext:
    """Calls the next middleware of TXMSG["STAGE_MIDDLEWARE"], or the handler after the
    last middleware. A middleware must call this object exactly once. `stage` is the
    stage that processes the message."""

    __slots__ = ("_call", "stage")

    def __init__(self, stage: Stage, call: Handler) -> None:
        self.stage, self._call = stage, call

    def __call__(self, message: Message) -> Any:
        """Pass on the message, or a copy with another body or other headers. Returns
        the handler's result if the middleware runs inside the stage's transaction.
        Raises the handler's exception."""
        return self._call(message)


if TYPE_CHECKING:

    class StageOptions(TypedDict, total=False):
        """The options of `stage()`, for type checkers."""

        name: str | None
        transaction: TransactionMode
        redelivery: RedeliveryPolicy | None
        isolation: str | None
        using: str | None
        concurrency: int
        broker: str
        batch: int
        timeout: float | None
        ordered: Order | None
        rate: str | None
        per: str | None
        undoes: Destination[Any, Any] | None


_stages: dict[str, Stage] = {}
_providers: list[Callable[[], Iterable[Stage]]] = []


@overload
def stage(
    destination: Destination[Body, Any],
    **options: Unpack[StageOptions],
) -> Declaring[Body]: ...
@overload
def stage(
    destination: str,
    **options: Unpack[StageOptions],
) -> Callable[[Decorated], Decorated]: ...
def stage(
    destination: str | Destination[Any, Any],
    *,
    name: str | None = None,
    transaction: TransactionMode = "outbox",
    redelivery: RedeliveryPolicy | None = None,
    isolation: str | None = None,
    using: str | None = None,
    concurrency: int = 1,
    broker: str = "default",
    batch: int = 1,
    timeout: float | None = None,
    ordered: Order | None = None,
    rate: str | None = None,
    per: str | None = None,
    undoes: Destination[Any, Any] | None = None,
    **unknown: Any,
) -> Callable[[Any], Any]:
    """Declare a function as the consumer of `destination`, a name or a Destination.

    The function takes a Message, or a body of the annotated type: `(order: Order)` or
    `(order: Order, message: Message)`. If the type is a union, the header `txmsg-type`
    selects the member. If the message is a flow's request, the function's result is the
    answer.

    - `name` (default: the destination) identifies the stage in the inbox, so keep the
      name when you rename the function.
    - `transaction` is "outbox" (takes effect only once), "best_effort_1pc" (faster, for
      idempotent handlers), "broker_only" (no database) or "none". With "none", no
      transaction is open while the handler runs, so the handler may call other services
      and may be a coroutine function. It runs at least once, and its messages are sent
      once.
    - `using` and `isolation` define the database transaction (default:
      TXMSG["TRANSACTION_DEFINITION"], or else the database "default" with its own
      isolation level).
    - `concurrency` is the number of threads in each process.
    - `batch` is the number of messages that share one transaction, each in a savepoint
      (at most 5,000).
    - `timeout` is how many seconds one execution of the handler may take. After that
      time its running query is cancelled, further queries raise an error, and the
      attempt fails with StageTimedOut.
    - `ordered` makes the messages of one key run one at a time, in the order in which
      they were sent. With "block", a dead message blocks its followers. With "skip", it
      does not.
    - `rate` ("10/s", "900/m"; also h and d) limits how many messages all processes
      together handle. With `per`, each value of that header has its own limit. Messages
      over the rate wait in the inbox.
    - `undoes` is the destination of the requests that this stage undoes. The handler
      runs only if this service has processed the request. Otherwise the request is
      revoked, so that it is never processed.

    Raises ConfigurationError if the name is taken, or if an option is unknown, invalid
    or contradicts another.
    """
    if unknown:
        _refuse(unknown)
    named = _named(destination)
    if isinstance(name, str):
        name = str.__str__(name)  # that of an enum's member is its value, not its name
    undone: Any = undoes
    if isinstance(undoes, (str, Destination)):
        undone = destination_name(undoes)
    given = Stage(
        name=named if name is None or name == "" else name,
        destination=named,
        handler=lambda message: None,  # replaced in declare()
        transaction=transaction,
        redelivery=redelivery,
        isolation=isolation,
        using=using,
        concurrency=concurrency,
        broker=broker,
        batch=batch,
        timeout=timeout,
        ordered=ordered,
        rate=None if rate is None else Rate.parse(rate),
        per=per,
        undoes=undone,
        answering=partial(
            replying, annotation=getattr(destination, "reply", None), broker=broker
        ),
    )
    _check_kinds(given)
    _check(given)
    _check_rate(given)

    def declare(handler: Callable[..., Any]) -> Callable[..., Any]:
        check(handler, coroutine=transaction == "none")
        work = bound(handler)
        if given.undoes is not None:
            work = undoing.if_done(
                work,
                given.undoes,
                lambda: consumers(undone, broker),
                lambda: declared.definition.using,
            )
        declared = replace(given, handler=work, accepts=accepted(handler))
        register(declared)
        return handler

    return declare


def register(declared: Stage) -> None:
    """Register a stage. Raises ConfigurationError if its name is taken."""
    known = _stages.get(declared.name, declared)
    (first, made), (second, other) = origin(known.handler), origin(declared.handler)
    # After the start, a test or a notebook may declare a changed function again.
    if first != second or (made != other and not apps.ready):
        raise ConfigurationError(
            f"Two stages are named {declared.name!r}: {first} and {second}. Give one "
            f"of them another name=. But a queue gives each message to one stage only: "
            f"if both need it, send to a topic, or call both from one handler."
        )
    _stages[declared.name] = declared


def unregister(name: str) -> None:
    """Remove a stage, for tests."""
    _stages.pop(name, None)


def provide(provider: Callable[[], Iterable[Stage]]) -> None:
    """Register a function that returns the stages declared by settings other than
    TXMSG. The function is called each time the stages are listed."""
    if provider not in _providers:
        _providers.append(provider)


def _known() -> dict[str, Stage]:
    provided = {one.name: one for provider in _providers for one in provider()}
    return provided | _stages


def all_stages() -> list[Stage]:
    """Return all declared stages, sorted by name."""
    known = _known()
    return [known[name] for name in sorted(known)]


def find(names: Sequence[str]) -> list[Stage]:
    """Return the stages with these names, or all stages if `names` is empty. Raises
    ConfigurationError if a name is unknown."""
    known = _known()
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"No stage {name!r}; known: {', '.join(sorted(known)) or 'none'}."
            )
    return [known[name] for name in dict.fromkeys(names or sorted(known))]


def consumers(destination: str, broker: str) -> list[str]:
    """Return the names of the stages of this service that consume a destination."""
    return [
        one.name
        for one in all_stages()
        if (one.destination, one.broker) == (destination, broker)
    ]


def _recorded(destination: str, broker: str) -> set[str]:
    """Return the databases in which stages record that a message to this destination
    was processed."""
    return {
        one.definition.using
        for one in map(_known().__getitem__, consumers(destination, broker))
        if one.transaction in ("outbox", "none")
    }


unique.recorded_by(_recorded)


def _receivers(destination: str, broker: str, using: str) -> dict[str, bool]:
    found = [_known()[name] for name in consumers(destination, broker)]
    here = [one for one in found if one.definition.using == using]
    return {one.name: one.transaction == "outbox" for one in here}


pending.received_by(_receivers)


def _named(destination: Any) -> str:
    if isinstance(destination, (str, Destination)):
        return destination_name(destination)
    hint = 'Give a name, as in @stage("orders.place"), or a Destination.'
    if inspect.isroutine(destination):
        hint = f'Write @stage("orders.place") above {destination.__qualname__}().'
    raise ConfigurationError(
        f"@stage was given {destination!r} for its destination. {hint}"
    )


def _check_kinds(given: Stage) -> None:
    name: object = given.name
    fits = isinstance(name, str) and name.isprintable() and len(name) <= MAX_NAME_LENGTH
    if not fits:
        raise ConfigurationError(
            f"name={name!r} is not a text of at most {MAX_NAME_LENGTH} printable "
            f"characters, as the inbox stores it."
        )
    for option, (kind, words) in _KINDS.items():
        value = getattr(given, option)
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{option}={value!r} is not {words}.")


def _refuse(unknown: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, because `@stage` has no such option. The error names
    the most similar option."""
    name, value = next(iter(unknown.items()))
    meant = _SYNONYMS.get(name, name)
    known = list(stage.__kwdefaults__ or ())
    near = difflib.get_close_matches(meant, known, n=1)
    if meant in {one.name for one in fields(RedeliveryPolicy)}:
        hint = f"Write redelivery=RedeliveryPolicy({meant}={value!r})."
    elif near:
        hint = f"Did you mean {near[0]}=?"
    else:
        hint = f"It takes {', '.join(known)}."
    raise ConfigurationError(f"@stage takes no {name}=. {hint}")


def _check(given: Stage) -> None:
    check_mode(given.transaction)
    TransactionDefinition(isolation=given.isolation)
    for option in ("concurrency", "batch"):
        number = getattr(given, option)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigurationError(
                f"{option}={number!r} is not a whole number of 1 or more."
            )
    if given.batch > MAX_BATCH:
        raise ConfigurationError(f"batch={given.batch} is more than {MAX_BATCH}.")
    if given.batch > 1 and given.transaction != "outbox":
        raise ConfigurationError('batch needs transaction="outbox".')
    if given.undoes is not None and given.transaction != "outbox":
        raise ConfigurationError(
            f"The stage of {given.destination!r} undoes {given.undoes} and has "
            f"transaction={given.transaction!r}: whether there is anything to undo is "
            f'decided in the transaction of its work. Use transaction="outbox".'
        )
    timeout = given.timeout
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout <= MAX_TIMEOUT):
        raise ConfigurationError(
            f"timeout={timeout!r} is not a number of seconds above 0, at most a week."
        )
    if given.ordered is not None and given.ordered not in ORDERS:
        raise ConfigurationError(
            f"ordered={given.ordered!r} must be one of {', '.join(ORDERS)}, or None."
        )


def _check_rate(given: Stage) -> None:
    per, redelivery = given.per, given.redelivery
    if per is not None and (given.rate is None or not isinstance(per, str) or not per):
        raise ConfigurationError(
            f"per={per!r} is not the name of a header beside a rate=."
        )
    if given.rate is None:
        return
    reason = ""
    if given.batch > 1:
        reason = (
            "batch: each message takes its slot in a commit of its own, and a batch "
            "exists to save commits."
        )
    elif given.ordered is not None:
        reason = "ordered: a message would use its slot up while its predecessor runs."
    elif redelivery is not None and redelivery.mode == "blocking":
        reason = (
            'redelivery mode "blocking": its attempts follow each other in the thread. '
            'Use "non_blocking".'
        )
    if reason:
        raise ConfigurationError(f"rate cannot be combined with {reason}")
