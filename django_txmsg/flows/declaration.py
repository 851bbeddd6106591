"""The declaration of a flow: the state, steps and signals of its class.

The declaration is checked when Python creates the class. So a mistake raises an error
at import, before any run reaches the wrong step.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import inspect
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

from .. import codecs, conf, wire
from ..envelope.codec import from_json, to_json
from ..envelope.handler import accepted, path_of, signature_of
from ..envelope.kept_values import changes
from ..envelope.message import Message
from ..envelope.message_type import is_name, message_type
from ..envelope.typed_body import BodyReader, TypeHeader
from ..errors import ConfigurationError, NewerCodeNeeded
from ..models import Run
from ..models.run import WaitsFor
from ..sending.destination import Destination, TypedName
from ..sending.outbox import send_part
from .values import Answers, Cancelled

#: Most bytes of a run's state, as JSON.
MAX_STATE = 64 * 1024
#: The argument type of a step that takes none.
NOTHING: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Mark:
    """The options of `@step` or `@signal`, stored on the decorated method."""

    is_signal: bool
    was: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step or signal of a flow, and the type of its argument."""

    name: str
    call: Callable[..., Any]
    annotation: Any
    #: Whether it takes the answers of a gather, each of the type of its argument.
    joins: bool = False

    @property
    def takes_nothing(self) -> bool:
        """Whether the method is called without an argument."""
        return self.annotation is NOTHING

    @cached_property
    def reader(self) -> BodyReader:
        """The reader for the bodies of the method's argument."""
        return codecs.reader(self.annotation)

    @cached_property
    def takes(self) -> str:
        """The type headers of the bodies that the method takes, one per line."""
        if self.takes_nothing:
            return ""
        return "\n".join(one.header for one in self.reader.types if one.name)

    def reads(self, name: str) -> bool:
        """Return whether the method takes bodies of the type with this name."""
        if self.takes_nothing:
            return False
        return any(one.name == name for one in self.reader.types)


@dataclass
class Declaration:
    """The declaration of one flow, from its class."""

    name: str
    version: int
    cls: type[Any]
    destination: Destination[Any, Any]
    using: str
    broker: str
    #: Default deadline, in seconds, of an ask or a wait.
    within: dt.timedelta | types.EllipsisType | None
    state: Any
    fields: tuple[str, ...]
    steps: dict[str, Step] = field(default_factory=dict)
    signals: dict[str, Step] = field(default_factory=dict)

    @property
    def steps_name(self) -> str:
        """The destination of the messages that continue runs."""
        return self.name + wire.STEPS

    def new_run(self, **columns: Any) -> Run:
        """Return an unsaved run that waits for its first message."""
        run = Run(
            service=conf.get().SERVICE,
            flow=self.name,
            version=self.version,
            state=self.encode(self.cls()),
            **columns,
        )
        run.wait(WaitsFor.START, "start")
        return run

    def address_of(self, step: Step) -> Any:
        """Return the destination for the bodies that a step or a signal takes."""
        name = self.steps_name
        return name if step.takes_nothing else TypedName(name, step.annotation)

    @property
    def reads(self) -> Sequence[tuple[str, int]]:
        """The name and version of everything that this code can read: the state, each
        step, each signal method, and each type that a step or a signal method
        accepts."""
        known = {(self.name, self.version): None}
        for name, one in (self.steps | self.signals).items():
            known[self._address(name), 1] = None
            if not one.takes_nothing:
                known |= dict.fromkeys(one.reader.reads)
        return list(known)

    def step(self, name: str) -> Step:
        """Return the step with this name. Raises NewerCodeNeeded if the step is
        unknown. The message then waits for code that has this step."""
        return self._found(self.steps, name)

    def signal(self, name: str) -> Step:
        """Return the signal with this name. Raises NewerCodeNeeded if the signal is
        unknown."""
        return self._found(self.signals, name)

    @property
    def on_cancel(self) -> Step | None:
        """The signal method that takes `Cancelled`, or None if the flow has no such
        method."""
        taking = (one for one in self.signals.values() if one.annotation is Cancelled)
        return next(taking, None)

    def name_of(self, method: object, of: object) -> str:
        """Return the name of the step for `method`, a bound method of the object `of`.

        Raises ConfigurationError if `method` is not a step of that object.
        """
        called = getattr(method, "__func__", None)
        if getattr(method, "__self__", None) is of:
            for one in self.steps.values():
                if one.call is called:
                    return one.name
        raise ConfigurationError(
            f"{method!r} is not a step of the flow {self.name!r}. Give one of its "
            f"methods under @step, as self.{next(iter(self.steps))}."
        )

    def encode(self, flow: Any) -> str:
        """Return a flow's state as JSON, with the keys that `decode()` did not know.
        Raises InvalidMessage if a value does not fit its field, and ConfigurationError
        if the JSON of the fields is too long."""
        values = {name: getattr(flow, name) for name in self.fields}
        body = codecs.body_type(self.state)
        text = body.encode(self.state(**values))
        if len(text) > MAX_STATE:
            raise ConfigurationError(
                f"The state of flow {self.name!r} has {len(text)} bytes, and at most "
                f"{MAX_STATE} are kept. Keep the data in rows of your own, and their "
                f"ids in the state."
            )
        if flow._unknown:
            merged = to_json(flow._unknown | from_json(text))
            # A codec may read a field from more keys than it writes, as an alias. Equal
            # sets may differ as JSON.
            own, both = (self._read(one, self.version) for one in (text, merged))
            if not changes(own, both):
                text = merged
        return text.decode()

    def decode(self, text: str, version: int) -> dict[str, Any]:
        """Return the arguments that create a flow's object with a stored state, which
        is upgraded to the version of this code.

        Newer code may have added fields without a new version. Their keys are unknown
        here, and `encode()` writes them back.

        Raises NewerCodeNeeded if the state has a newer version, and DecodeError if a
        value does not fit its field.
        """
        state = self._read(text.encode(), version)
        values = {name: getattr(state, name) for name in self.fields}
        stored = from_json(text) if version == self.version else None
        if isinstance(stored, dict) and (unknown := stored.keys() - values):
            values["_unknown"] = {name: stored[name] for name in unknown}
        return values

    def _read(self, text: bytes, version: int) -> Any:
        header = str(TypeHeader(self.name, version, version))
        return codecs.reader(self.state).read(text, wire.JSON, header)

    def send(
        self, body: object, headers: Mapping[str, str], *, to: Any = None, **more: Any
    ) -> Message:
        """Store a message with these headers of a conversation, in the database and for
        the broker of this flow. It is sent to `to`, by default to the destination of
        the messages that continue runs. `more` are further arguments of send_part()."""
        destination = self.steps_name if to is None else to
        place = {"using": self.using, "broker": self.broker}
        return send_part(destination, body, headers, **place, **more)

    def continue_run(
        self,
        run: Run,
        turn: uuid.UUID,
        body: object,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Message:
        """Store the message that continues a run which waits under `turn`. If `headers`
        ask for an answer, the answer continues the run instead. `more` are further
        arguments of send()."""
        ticket = wire.ticket(run.run_id, turn)
        given = {**(headers or {}), wire.TICKET: ticket, wire.FLOW: str(run.first_run)}
        return self.send(body, given, correlation_id=run.correlation_id, **more)

    def _found(self, among: dict[str, Step], name: str) -> Step:
        if name not in among:
            raise NewerCodeNeeded(self._address(name), 1, 0)
        return among[name]

    def _address(self, step: str) -> str:
        return f"{self.name}/{step}"


_declared: dict[str, Declaration] = {}


def declare(declared: Declaration) -> None:
    """Register a flow. Raises ConfigurationError if another flow has the same name."""
    known = _declared.get(declared.name)
    if known is not None and _path(known.cls) != _path(declared.cls):
        raise ConfigurationError(
            f"Two flows are named {declared.name!r}: {_path(known.cls)} and "
            f"{_path(declared.cls)}. Give one of them another name=."
        )
    _declared[declared.name] = declared


def declarations() -> list[Declaration]:
    """Return the declarations of all flows in this process."""
    return list(_declared.values())


def check_name(name: str) -> None:
    """Raise ConfigurationError if the name is invalid for a flow."""
    if not is_name(name) or name.endswith(wire.STEPS):
        raise ConfigurationError(
            f"{name!r} is no name of a flow: it is a destination of letters, digits, "
            f"'.', '-' and '_', and does not end in {wire.STEPS!r}."
        )


def state_of(
    cls: type[Any], base: type[Any], name: str, version: int
) -> tuple[type[Any], tuple[str, ...]]:
    """Return a dataclass that has a flow's fields, and the names of these fields.

    Raises ConfigurationError for a field that has no default, that hides an attribute
    of Flow, or that JSON does not preserve.
    """
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"A field of flow {name!r} has an annotation that names nothing: {error}."
        ) from None
    made: list[Any] = []
    for one, annotation in hints.items():
        if typing.get_origin(annotation) is ClassVar or annotation is ClassVar:
            continue
        if hasattr(base, one) or one.startswith("_"):
            raise ConfigurationError(
                f"The field {one!r} of flow {name!r} hides an attribute of every "
                "flow, or begins with '_'. Give it another name."
            )
        if not hasattr(cls, one):
            raise ConfigurationError(
                f"The field {one!r} of flow {name!r} has no default, with which a run "
                f"begins: write `{one}: … = …`."
            )
        fresh = partial(copy.deepcopy, getattr(cls, one))
        made.append((one, annotation, field(default_factory=fresh)))
    state = dataclasses.make_dataclass(f"{cls.__name__}State", made)
    state.__module__ = cls.__module__
    message_type(name, version=version)(state)
    fields = tuple(one for one, _, _ in made)
    try:
        body = codecs.body_type(state)
        body.encode(state())
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"The state of flow {name!r} would change in JSON: {error}"
        ) from error
    return state, fields


def methods_of(
    cls: type[Any], name: str, accepts: Any
) -> tuple[dict[str, Step], dict[str, Step]]:
    """Return the steps and the signals of a flow by name, including former names.

    Raises ConfigurationError if the declaration is invalid.
    """
    steps: dict[str, Step] = {}
    signals: dict[str, Step] = {}
    for attribute in dir(cls):
        call = inspect.getattr_static(cls, attribute)
        mark = getattr(call, "__txmsg_flow__", None)
        if not isinstance(mark, Mark):
            continue
        found = Step(attribute, call, *_annotation(call, name))
        if mark.is_signal and (found.takes_nothing or found.joins):
            raise ConfigurationError(f"{path_of(call)} is a signal and takes no body.")
        among = signals if mark.is_signal else steps
        for address in (attribute, *mark.was):
            if address in steps or address in signals:
                raise ConfigurationError(
                    f"Two steps of flow {name!r} are named {address!r}, with was=."
                )
            among[address] = found
    if "start" not in steps:
        raise ConfigurationError(
            f"Flow {name!r} has no first step: a method `start` under @step."
        )
    if steps["start"].annotation != accepts or steps["start"].joins:
        raise ConfigurationError(
            f"Flow {name!r} is started by {accepts!r}, and its first step takes "
            f"{steps['start'].annotation!r}."
        )
    taken = {one.name: one.annotation for one in signals.values()}
    if len(taken) > len(set(map(repr, taken.values()))):
        raise ConfigurationError(f"Two signals of flow {name!r} take one type.")
    return steps, signals


def _annotation(call: Any, name: str) -> tuple[Any, bool]:
    """Return the type of a step's argument, and whether the step takes `Answers` of
    that type."""
    if not inspect.isfunction(call) or inspect.iscoroutinefunction(call):
        raise ConfigurationError(
            f"{call!r} of flow {name!r} is not a plain method: a step runs in a "
            "transaction, so it must not wait."
        )
    _, *taken = signature_of(call).parameters.values()
    if not taken:
        return NOTHING, False
    if len([one for one in taken if one.default is one.empty]) > 1:
        raise ConfigurationError(
            f"{path_of(call)} takes {len(taken)} arguments; a step takes one, or none."
        )
    found = accepted(types.MethodType(call, call))
    if found is None:
        raise ConfigurationError(
            f"{path_of(call)} does not say what it takes: annotate {taken[0].name!r} "
            f"with a type that JSON carries."
        )
    joins = typing.get_origin(found) is Answers
    if joins:
        (found,) = typing.get_args(found)
    codecs.reader(found)
    return found, joins


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
