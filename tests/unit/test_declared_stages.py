"""`@stage` refuses invalid names, and handlers that cannot be called."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.apps import apps

from django_txmsg import Destination, Message, stage
from django_txmsg.errors import ConfigurationError
from django_txmsg.stages import all_stages, find, unregister


@dataclass
class Placing:
    number: str


class Instance:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, message: Message) -> None:
        self.call(message)


class Asynchronous:
    async def __call__(self, message: Message) -> None: ...


class Unbound:
    def place(self, message: Message) -> None: ...

    @staticmethod
    def static(message: Message) -> None: ...

    @classmethod
    def of_class(cls, message: Message) -> None: ...


def nothing() -> None: ...
def unannotated(order, message): ...  # type: ignore[no-untyped-def]
def message_first(message: Message, order: Placing) -> None: ...
def three(order: Placing, message: Message, more: int) -> None: ...
def keyword(message: Message, *, more: int) -> None: ...
def only_keywords(*, message: Message) -> None: ...
def typed_keyword(order: Placing, *, message: Message) -> None: ...
async def asynchronous(message: Message) -> None: ...
async def asynchronous_generator(message: Message) -> AsyncIterator[int]:
    yield 1


def generator(message: Message) -> Iterator[int]:
    yield 1


def typed_generator(order: Placing) -> Iterator[int]:
    yield 1


@functools.wraps(generator)
def wrapped(*args: Any) -> Any:
    return generator(*args)


def plain(message: Message) -> None: ...
def untyped(message): ...  # type: ignore[no-untyped-def]
def anything(*args: Any, **kwargs: Any) -> None: ...
def with_default(message: Message, attempts: int = 3) -> None: ...
def typed(order: Placing) -> None: ...
def typed_with_message(order: Placing, message: Message) -> None: ...
def typed_with_default(order: Placing, more: int = 1) -> None: ...
def two(order: Placing, more: int) -> None: ...


def with_a_repository(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the argument `repository` to any call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, repository="r", **kwargs)

    return call


def for_a_message(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds an argument after the message."""

    @functools.wraps(function)
    def call(message: Message) -> Any:
        return function(message, repository="r")

    return call


def for_a_body(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds an argument after the body and its message."""

    @functools.wraps(function)
    def call(order: Placing, message: Message) -> Any:
        return function(order, message, repository="r")

    return call


def without_the_message(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that calls the function without the message."""

    @functools.wraps(function)
    def call(message: Message) -> Any:
        return function()

    return call


def message_and_more(message: Message, repository: str) -> str:
    return repository


def body_and_more(order: Placing, repository: str) -> str:
    return f"{order.number}{repository}"


def both_and_more(order: Placing, message: Message, repository: str) -> str:
    return f"{order.number}{message.destination}{repository}"


def keyword_and_more(order: Placing, *, repository: str) -> str:
    return f"{order.number}{repository}"


#: Decorators that add arguments, or take some away, and what the handler returns.
DECORATED: dict[str, tuple[Any, Any, str | None]] = {
    "a message": (for_a_message(message_and_more), None, "r"),
    "a message, handed on": (with_a_repository(message_and_more), None, "r"),
    "a body, handed on": (with_a_repository(body_and_more), Placing("1"), "1r"),
    "a keyword": (with_a_repository(keyword_and_more), Placing("1"), "1r"),
    "both": (for_a_body(both_and_more), Placing("1"), "1tests.decoratedr"),
    "both, handed on": (
        with_a_repository(both_and_more), Placing("1"), "1tests.decoratedr",
    ),
    "nothing": (without_the_message(nothing), None, None),
}  # fmt: skip


REFUSED: dict[str, tuple[Any, str]] = {
    "no function": (7, "cannot be a handler"),
    "None": (None, "cannot be a handler"),
    "a class": (Placing, "cannot be a handler"),
    "no argument": (nothing, "takes one argument, the Message"),
    "two without types": (unannotated, "with its type"),
    "the message first": (message_first, r"\(order: Order, message: Message\)"),
    "three": (three, "3 arguments"),
    "a keyword that is needed": (keyword, "more"),
    "keywords only": (only_keywords, "can never be called"),
    "a body and a keyword": (typed_keyword, "message"),
    "a method of no instance": (Unbound.place, "can never be called"),
    "a coroutine function": (asynchronous, "async_to_sync"),
    "a partial of one": (functools.partial(asynchronous), "async_to_sync"),
    "an asynchronous instance": (Asynchronous(), "async_to_sync"),
    "an asynchronous generator": (asynchronous_generator, "yield"),
    "a generator function": (generator, "yield"),
    "a typed one": (typed_generator, "yield"),
    "one in a decorator": (wrapped, "yield"),
}

ACCEPTED: dict[str, Any] = {
    "a function": plain,
    "without types": untyped,
    "any arguments": anything,
    "a default": with_default,
    "a body": typed,
    "a body and its message": typed_with_message,
    "a body and a default": typed_with_default,
    "a body and something else": two,
    "an instance": Instance(plain),
    "a method": Instance(plain).__call__,
    "a static method": Unbound.static,
    "a class method": Unbound.of_class,
    "a partial": functools.partial(keyword, more=1),
    "a built-in": [].append,
    "a lambda": lambda message: None,
    "async_to_sync": lambda message: asyncio.run(asynchronous(message)),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = {one.name for one in all_stages()}
    yield
    for one in all_stages():
        if one.name not in before:
            unregister(one.name)


@pytest.mark.parametrize(
    "name", [Destination("orders", Placing), 42, "n" * 256, "a\0b"]
)
def test_a_name_that_the_inbox_cannot_store_is_refused(name: Any) -> None:
    """`@stage` refuses a name that the inbox cannot store. A message of such a stage
    could neither be processed nor buried."""
    with pytest.raises(ConfigurationError, match="is not a text of at most 255"):
        stage("orders.place", name=name)


@pytest.mark.parametrize("case", REFUSED)
def test_a_handler_that_can_never_do_its_work_is_refused(case: str) -> None:
    handler, said = REFUSED[case]
    with pytest.raises(ConfigurationError, match=said):
        stage("tests.refused")(handler)
    assert "tests.refused" not in {one.name for one in all_stages()}


@pytest.mark.parametrize("case", ACCEPTED)
def test_callable_handlers_are_declared(case: str) -> None:
    handler = ACCEPTED[case]
    assert stage("tests.accepted")(handler) is handler


@pytest.mark.parametrize("case", DECORATED)
def test_a_decorator_may_change_the_arguments(case: str) -> None:
    handler, body, returned = DECORATED[case]
    stage("tests.decorated")(handler)
    [declared] = find(["tests.decorated", "tests.decorated"])

    message = Message(id=uuid.uuid4(), destination="tests.decorated", body=body)
    assert declared.handler(message) == returned


@pytest.mark.parametrize(
    "destination", [None, 7, 1.5, b"orders", ["orders"], True, plain, Placing, object()]
)
def test_a_destination_is_a_name_or_a_destination(destination: Any) -> None:
    with pytest.raises(ConfigurationError, match="for its destination"):
        stage(destination)


def made(factor: int) -> Callable[[Message], int]:
    def handle(message: Message) -> int:
        return factor

    return handle


#: Functions of one dotted path that do different work.
TWINS: dict[str, list[Callable[[Message], Any]]] = {
    "lambdas": [lambda message: 1, lambda message: 2],
    "a factory": [made(1), made(2)],
    "a loop": [lambda message, factor=one: factor for one in (1, 2)],
    "methods": [Instance(plain).__call__, Instance(plain).__call__],
}


@pytest.mark.parametrize("case", TWINS)
def test_a_second_function_of_a_name_is_refused_at_the_start(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise only the second function would run."""
    first, second = TWINS[case]
    with monkeypatch.context() as starting:
        starting.setattr(apps, "ready", False)
        stage("tests.twins")(first)
        stage("tests.twins")(first)
        with pytest.raises(ConfigurationError, match="Two stages are named"):
            stage("tests.twins")(second)
    # In a notebook, say, which runs a changed cell again.
    stage("tests.twins")(second)
    assert find(["tests.twins"])[0].handler is second


def test_a_second_function_of_a_queue_is_refused() -> None:
    stage("tests.twins")(plain)
    with pytest.raises(ConfigurationError, match="or call both from one handler"):
        stage("tests.twins")(untyped)


def test_without_parentheses_it_says_what_to_write() -> None:
    with pytest.raises(
        ConfigurationError, match=r'Write @stage\("orders.place"\) above plain\(\)'
    ):
        stage(plain)  # type: ignore[call-overload]


def test_a_destination_is_taken_as_it_is() -> None:
    stage(Destination("tests.accepted", Placing))(typed)


@pytest.mark.parametrize("number", ["4", 1.5, None, True, 0, -1])
@pytest.mark.parametrize("option", ["concurrency", "batch"])
def test_numbers_must_be_positive_integers(option: str, number: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}={number!r} is not a whole"):
        stage("tests.refused", **{option: number})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("redelivery", 3, r"like RedeliveryPolicy\(max_redeliveries=3\)"),
        ("redelivery", {"max_redeliveries": 3}, "is not a RedeliveryPolicy"),
        ("isolation", 3, "is not an isolation level"),
        ("using", ["default"], "is not an alias of DATABASES"),
        ("broker", 3, "is not an alias of TXMSG"),
        ("undoes", 3, "is not a Destination"),
        ("timeout", "3", "is not a number of seconds"),
        ("timeout", dt.timedelta(seconds=3), "is not a number of seconds"),
        ("timeout", True, "is not a number of seconds"),
        ("batch", 5001, "is more than 5000"),
        ("name", 0, "is not a text"),
        ("name", False, "is not a text"),
    ],
)
def test_an_option_of_another_type_is_refused(
    option: str, value: Any, said: str
) -> None:
    """`@stage` refuses an option of a wrong type. Otherwise `check`, or the first
    message, would fail with a traceback."""
    with pytest.raises(ConfigurationError, match=f"^{option}=.*{said}"):
        stage("tests.refused", **{option: value})


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("retries", 3, r"redelivery=RedeliveryPolicy\(max_redeliveries=3\)"),
        ("jitter", 0.5, r"redelivery=RedeliveryPolicy\(jitter=0.5\)"),
        ("time_limit", 30, r"Did you mean timeout=\?"),
        ("concurency", 2, r"Did you mean concurrency=\?"),
        ("xyz", 1, "It takes name, transaction, redelivery, "),
    ],
)
def test_an_unknown_option_names_the_right_one(
    name: str, value: Any, hint: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"takes no {name}=.*{hint}"):
        stage("orders.place", **{name: value})
