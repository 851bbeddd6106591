"""The API for users: the class `Flow`, and the decorators of its methods.

A flow declares two stages. `NAME` receives the messages that start runs. `NAME.steps`
receives the messages that continue runs.
"""

from __future__ import annotations

import datetime as dt
import typing
import uuid
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Generic, TypeVar, Union, overload

from .. import stages
from ..envelope.redelivery import RedeliveryPolicy
from ..errors import ConfigurationError
from ..sending.destination import Destination
from ..sending.outbox import destination_name
from . import engine
from .declaration import (
    Declaration,
    Mark,
    check_name,
    declare,
    methods_of,
    state_of,
)
from .joining import check_enough
from .sending import send_signal
from .unread import StartReader, UnreadReader
from .values import (
    Answers,
    Ask,
    Cancelled,
    Continuation,
    Dead,
    Fail,
    Gather,
    HandOver,
    Later,
    Next,
    Out,
    Reply,
    Request,
    Sleep,
    TimedOut,
    Wait,
)

In = TypeVar("In")
Body = TypeVar("Body")
Method = TypeVar("Method", bound=Callable[..., Any])
#: A step, which may take the value that continues the run.
Then = Union[Callable[[Reply], Next[Out]], Callable[[], Next[Out]]]  # noqa: UP007
#: A deadline; `...`: the default one; None: for ever.
Within = dt.timedelta | EllipsisType | None


@overload
def step(method: Method, /) -> Method: ...
@overload
def step(*, was: str | tuple[str, ...]) -> Callable[[Method], Method]: ...
def step(
    method: Any = None, /, *, was: str | tuple[str, ...] = ()
) -> Callable[[Any], Any] | Any:
    """Make a method a step of its flow. The method returns an answer, or a continuation
    of the run.

    The row of a run stores the name of the step for which the run waits. So if you
    rename a step, pass its former names as `was`.
    """
    return _marked(method, is_signal=False, was=was)


@overload
def signal(method: Method, /) -> Method: ...
@overload
def signal(*, was: str | tuple[str, ...]) -> Callable[[Method], Method]: ...
def signal(
    method: Any = None, /, *, was: str | tuple[str, ...] = ()
) -> Callable[[Any], Any] | Any:
    """Make a method handle the signals of one type. The method runs between two steps,
    whenever a signal of this type arrives. If the method returns None, the run
    continues to wait as before. If the method returns a continuation, the run stops
    waiting for the previous continuation, and waits for the returned one."""
    return _marked(method, is_signal=True, was=was)


def _marked(method: Any, *, is_signal: bool, was: str | tuple[str, ...]) -> Any:
    former = (was,) if isinstance(was, str) else tuple(was)

    def mark(given: Any) -> Any:
        if isinstance(given, (staticmethod, classmethod, property)):
            raise ConfigurationError(f"{given!r} is not a plain method of a flow.")
        given.__txmsg_flow__ = Mark(is_signal, former)
        return given

    return mark if method is None else mark(method)


class Flow(Generic[In, Out]):
    """A conversation of several steps between services. Between two steps the run is
    only a row: no process waits.

    `class Checkout(Flow[PlaceOrder, Answer], name="orders.checkout")` declares a flow.
    A PlaceOrder starts a run by the step `start`, and the caller gets an Answer. The
    annotated fields of the class are the state of a run, stored as JSON of at most 64
    KiB. `version` is the version of the state, like the version of a message type.
    `within` is the default deadline of an ask or a wait, or `None`. `using` and
    `broker` apply to the flow's two stages. `concurrency` is the number of threads in
    each process for each stage.
    """

    destination: ClassVar[Destination[Any, Any]]
    _declaration: ClassVar[Declaration]

    def __init_subclass__(
        cls,
        *,
        name: str,
        version: int = 1,
        within: Within = ...,
        using: str = "default",
        broker: str = "default",
        concurrency: int = 1,
        redelivery: RedeliveryPolicy | None = None,
    ) -> None:
        super().__init_subclass__()
        check_name(name)
        accepts, answers = _types_of(cls, name)
        state, fields = state_of(cls, Flow, name, version)
        steps, signals = methods_of(cls, name, accepts)
        cls.destination = Destination(name, accepts, reply=answers)
        declared = cls._declaration = Declaration(
            name=name,
            version=version,
            cls=cls,
            destination=cls.destination,
            using=using,
            broker=broker,
            within=within,
            state=state,
            fields=fields,
            steps=steps,
            signals=signals,
        )
        declare(declared)
        started = StartReader(accepts, lambda: declared.reads)
        continued = UnreadReader(lambda: declared.reads)
        for address, accepted, work, undoes in (
            (name, started, engine.begin, None),
            (declared.steps_name, continued, engine.go_on, name),  # takes cancels
        ):
            stages.register(
                stages.Stage(
                    name=address,
                    destination=address,
                    handler=_handler(cls, work, declared),
                    accepts=accepted,
                    redelivery=redelivery,
                    using=using,
                    broker=broker,
                    concurrency=concurrency,
                    undoes=undoes,
                )
            )

    def __init__(self, **state: Any) -> None:
        """Create an object with this state, for a test of a step."""
        #: Keys of the stored state that are no fields of this code.
        self._unknown: dict[str, Any] = state.pop("_unknown", {})
        values = self._declaration.state(**state)
        for one in self._declaration.fields:
            setattr(self, one, getattr(values, one))
        #: Headers that travel with the run's requests: text by name.
        self.baggage: dict[str, str] = {}
        self._run_id = uuid.uuid4()
        self._undos: list[tuple[Destination[Any, Any], Any]] = []
        self._made: list[Continuation] = []

    @classmethod
    def signal(cls, key: str, body: object) -> None:
        """Store a signal for the open run of this key, in the caller's transaction.

        The flow's method for this type of signal runs between two steps. Raises
        InvalidMessage if no method takes the type of the body, and TransactionRequired
        outside a transaction.
        """
        send_signal(cls._declaration, key, body)

    def ask(
        self,
        destination: Destination[Body, Reply] | type[Flow[Body, Reply]],
        body: Body,
        *,
        then: Then[Reply, Out],
        undo: Destination[Body, Any] | None = None,
        within: Within = ...,
        otherwise: Then[TimedOut | Dead, Out] | None = None,
        key: str | None = None,
    ) -> Ask:
        """Send a request to a stage or a flow, and continue with the answer.

        If the run fails, one message with the same body is sent to the destination
        `undo`. A stage that is declared with `undoes=` handles this message only if the
        request was executed.

        The step `otherwise` gets TimedOut if the deadline passes before the answer is
        processed. It gets Dead if the request is given up. Without `otherwise`, the run
        fails in these cases.

        Raises ConfigurationError if `then` is not a step, or if no deadline is
        declared. Also raises ConfigurationError if the stage that consumes `undo` is
        declared with an `undoes=` that differs from the destination of this request.
        """
        request = self.branch(destination, body, undo=undo, key=key)
        return self._note(
            Ask(
                **vars(request),
                then=self._step(then),
                within=self._deadline(within),
                otherwise="" if otherwise is None else self._step(otherwise),
            )
        )

    def branch(
        self,
        destination: Destination[Body, Reply] | type[Flow[Body, Reply]],
        body: Body,
        *,
        undo: Destination[Body, Any] | None = None,
        key: str | None = None,
    ) -> Request[Reply]:
        """Return a request for gather(). The arguments are the same as for ask().
        Raises ConfigurationError if the stage that consumes `undo` is declared with an
        `undoes=` that differs from the destination of this request."""
        of_flow = isinstance(destination, type) and issubclass(destination, Flow)
        asked: Any = destination
        if of_flow:
            asked = asked.destination
        if undo is not None:
            _check_undo(destination_name(undo), destination_name(asked))
        return Request(asked, body, undo=undo, key=key, of_flow=of_flow)

    def gather(
        self,
        requests: Sequence[Request[Reply]],
        *,
        then: Then[Answers[Reply], Out],
        at_once: int | None = None,
        enough: int | None = None,
        within: Within = ...,
    ) -> Gather:
        """Send several requests. Continue with the step `then` as soon as one of these
        conditions is true: no request is open any more, because all are answered or
        given up; `enough` requests are answered; the deadline has passed. At first, at
        most `at_once` requests are sent. After each answered or given-up request, one
        more request is sent.

        The step `then` gets the answers in the order of the requests. If a request has
        no answer when the flow continues, its `undo` is sent immediately, or the
        requested flow is cancelled.

        Raises ConfigurationError in these cases: `then` is not a step; `then` takes an
        argument other than `Answers`; no deadline is declared; `enough` is not between
        1 and the number of requests; `at_once` is less than 1; `at_once` is given, and
        the deadline is None or a request has a `key`.
        """
        check_enough(enough, len(requests))
        deadline = self._deadline(within)
        if at_once is not None and (at_once < 1 or deadline is None):
            raise ConfigurationError(
                f"at_once={at_once!r} of {len(requests)} requests: it is at least 1, "
                f"and within= is a deadline, at which those that are left expire."
            )
        if at_once is not None and any(one.key for one in requests):
            raise ConfigurationError(
                "gather() takes no at_once= if a request has a key: a request that is "
                "held back would also hold back all later messages of its key."
            )
        return self._note(
            Gather(
                tuple(requests),
                then=self._step(then, joins=True),
                enough=enough,
                within=deadline,
                at_once=at_once,
            )
        )

    def wait(
        self,
        *,
        then: Then[Any, Out],
        within: Within = ...,
        otherwise: Then[TimedOut | Dead, Out] | None = None,
    ) -> Wait:
        """Wait until `resume()` is called with the token of the returned value."""
        return self._note(
            Wait(
                then=self._step(then),
                within=self._deadline(within),
                otherwise="" if otherwise is None else self._step(otherwise),
                run_id=self._run_id,
            )
        )

    def sleep(self, duration: dt.timedelta, *, then: Callable[[], Next[Out]]) -> Sleep:
        """After `duration`, continue with the step `then` in a separate transaction."""
        return self._note(Sleep(duration, self._step(then)))

    @overload
    def later(self, then: Callable[[], Next[Out]]) -> Later: ...
    @overload
    def later(self, then: Callable[[Body], Next[Out]], value: Body) -> Later: ...
    def later(self, then: Any, value: Any = None) -> Later:
        """Continue immediately with the step `then`, in a separate transaction."""
        return self._note(Later(self._step(then), value))

    def hand_over(self, flow: type[Flow[Body, Out]], body: Body) -> HandOver:
        """End this run, and let a run of another flow answer the caller of this run.
        The registered undos of this run are dropped, as they are when a run answers."""
        return self._note(HandOver(flow.destination, body))

    def undo(self, destination: Destination[Body, Any], body: Body) -> None:
        """Register the message that undoes this step's own work if the run fails."""
        self._undos.append((destination, body))

    def fail(
        self, value: Out | TimedOut | Dead | Cancelled, *, answer_first: bool = False
    ) -> Fail:
        """Execute the registered undos, the newest first. Each undo waits until the
        previous undo is confirmed. Then answer with `value`. With `answer_first`, the
        answer is sent before the undos."""
        return self._note(Fail(value, answer_first))

    def _step(self, method: object, *, joins: bool = False) -> str:
        name = self._declaration.name_of(method, self)
        taken = self._declaration.steps[name]
        if taken.joins != joins and not taken.takes_nothing:
            wanted = "Answers[…], of all requests" if joins else "one value"
            raise ConfigurationError(
                f"Step {name!r} of flow {self._declaration.name!r} does not take what "
                f"it would get here: {wanted}. A step after gather() takes Answers, "
                f"and no other step does."
            )
        return name

    def _deadline(self, within: Within) -> dt.timedelta | None:
        found = self._declaration.within if within is ... else within
        if found is ...:
            raise ConfigurationError(
                f"Flow {self._declaration.name!r} asks or waits without a deadline. "
                f"Say within=timedelta(…) there or for the class, or None for ever."
            )
        return found

    def _note(self, made: Made) -> Made:
        self._made.append(made)
        return made


Made = TypeVar("Made", bound=Continuation)


def _types_of(cls: type[Any], name: str) -> tuple[Any, Any]:
    """Return the start type and the answer type of a flow, from its base class."""
    for base in getattr(cls, "__orig_bases__", ()):
        if typing.get_origin(base) is Flow:
            accepts, answers = typing.get_args(base)
            if not isinstance(accepts, TypeVar):
                return accepts, answers
    raise ConfigurationError(
        f"Flow {name!r} does not say what starts it and what it answers: write "
        f"class {cls.__name__}(Flow[Order, Answer], name={name!r})."
    )


def _check_undo(undo: str, asked: str) -> None:
    for one in stages.all_stages():
        if one.destination == undo and one.undoes not in (None, asked):
            raise ConfigurationError(
                f"undo={undo!r} of a request to {asked!r}: stage {one.name!r} undoes "
                f"{one.undoes!r}, and would find no such request. Give the undo of "
                f"{asked!r}, or correct undoes= of the stage."
            )


def _handler(
    cls: type[Any], work: Callable[[Declaration, Any], None], declared: Declaration
) -> Callable[[Any], None]:
    def handle(message: Any) -> None:
        work(declared, message)

    handle.__module__ = cls.__module__
    handle.__qualname__ = f"{cls.__qualname__}.{work.__name__}"
    return handle
