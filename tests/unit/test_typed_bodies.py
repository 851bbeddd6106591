"""Typed bodies are read according to their version, and no error quotes a value."""

from __future__ import annotations

import datetime as dt
import json
import sys
import traceback
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NewType, TypeVar

import pydantic
import pytest
from typing_extensions import TypeAliasType, TypedDict

from django_txmsg import Message, codecs, message_type, upgrade
from django_txmsg.envelope.handler import accepted, bound
from django_txmsg.envelope.typed_body import BodyReader, TypeHeader
from django_txmsg.errors import (
    ConfigurationError,
    DecodeError,
    InvalidMessage,
    NewerCodeNeeded,
)
from django_txmsg.flows import Flow, step
from tests.forgetting import forget_upgraders
from tests.running import txmsg
from tests.shelved_flows import shelved

JSON = "application/json"


@message_type("typed.Order", version=3)
@dataclass
class Order:
    number: str
    amount: Decimal
    currency: str = "EUR"
    lines: list[Decimal] = field(default_factory=list)


@message_type("typed.Note")
class Note(pydantic.BaseModel):
    kind: Literal["note"] = "note"
    text: str
    when: dt.date | None = None


class Paid(TypedDict):
    order: str
    cents: int


@message_type("typed.Tagged")
@dataclass
class Tagged:
    kind: Literal["tagged"]
    price: float


@dataclass
class Plain:
    number: int = 0


Either = Annotated[Note | Tagged, pydantic.Field(discriminator="kind")]


@dataclass
class Placed:
    number: str


@dataclass
class Cancelled:
    number: str


T = TypeVar("T")


@message_type("typed.Wrap", version=2)
@dataclass
class Wrap(Generic[T]):
    item: T


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Größe(pydantic.BaseModel):
    zahl: int


class One(pydantic.BaseModel):
    kind: Literal[1]
    amount: Decimal


class Two(pydantic.BaseModel):
    kind: Literal[2]
    amount: float


class Foreign:
    """A class for which pydantic has no schema."""


class Elsewhere(pydantic.BaseModel):
    """A model with decimals in places that its JSON schema does not show directly."""

    model_config = pydantic.ConfigDict(
        populate_by_name=True, arbitrary_types_allowed=True
    )

    tagged: Annotated[One | Two, pydantic.Field(discriminator="kind")] | None = None
    matching: dict[Annotated[str, pydantic.Field(pattern="^a")], Decimal] = {}
    named: Decimal = pydantic.Field(Decimal(0), alias="called")
    chosen: Decimal = pydantic.Field(
        Decimal(0), validation_alias=pydantic.AliasChoices("first", "second")
    )
    inside: Decimal = pydantic.Field(
        Decimal(0), validation_alias=pydantic.AliasPath("deep", 1, "er")
    )
    foreign: Foreign | None = None


class Lossy(pydantic.BaseModel):
    ratio: float | None = None
    anything: Any = None
    password: pydantic.SecretStr | None = None
    huge: int = 0
    by_name: dict[str, int] = {}


class Constant(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(ser_json_inf_nan="constants")

    ratio: float


class Raising(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def refuse(cls, number: int) -> int:
        raise {1: SystemExit, 2: GeneratorExit, 3: KeyboardInterrupt}[number]("secret")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget_upgraders("typed.Order")
    forget_upgraders("typed.Wrap")
    codecs.forget()


def read(
    annotation: Any, body: object, header: str | None = None, content_type: str = JSON
) -> Any:
    given = body if isinstance(body, bytes) else json.dumps(body).encode()
    return codecs.reader(annotation).read(given, content_type, header)


def refused(*given: Any) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        read(*given)
    return caught.value


def test_body_is_read_as_the_annotated_type() -> None:
    order = read(Order, {"number": "A-1", "amount": "9.90", "unknown": [1]})

    assert order == Order("A-1", Decimal("9.90"))
    assert read(Note, {"text": "a", "when": "2026-02-01"}).when == dt.date(2026, 2, 1)
    assert read(Paid, {"order": "A-1", "cents": 5}) == {"order": "A-1", "cents": 5}
    assert read(list[int], [1, 2], "anything.Else;v=7;min=7") == [1, 2]
    assert read(Order | None, None) is None


@pytest.mark.parametrize(
    "digits", ["12345678901234567.89", "9.90", "1E+3", "0.1000000000000000055511151231"]
)
def test_a_number_for_a_decimal_keeps_its_digits(digits: str) -> None:
    body = f'{{"number": "1", "amount": {digits}, "lines": [{digits}, "1.50", 7]}}'

    order = read(Order, body.encode())

    assert str(order.amount) == str(Decimal(digits))
    assert [str(one) for one in order.lines] == [str(Decimal(digits)), "1.50", "7"]


def test_a_float_beside_a_decimal_stays_one() -> None:
    both = read(dict[str, Order | Tagged | float], {"a": 1.5})

    assert both == {"a": 1.5}
    assert read(Either, {"kind": "tagged", "price": 9.9}).price == 9.9


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ({"amount": "secret"}, "number: missing; amount: decimal_parsing"),
        ({"number": 1, "amount": 2}, "number: string_type"),
        ({"number": "1", "amount": 1, "lines": [1, None]}, "lines.1: decimal_type"),
        (["secret"], "$: dataclass_type"),
        (None, "$: dataclass_type"),
    ],
)
def test_misfit_reports_path_and_kind(body: object, errors: str) -> None:
    error = refused(Order, body)

    assert (error.reason, str(error)) == ("invalid_body", errors)


def test_nothing_of_the_value_is_in_the_error_or_its_traceback() -> None:
    error = refused(Order, {"number": 1, "amount": "secret"})

    assert "secret" not in "".join(traceback.format_exception(error))


def test_lax_readings_are_refused() -> None:
    assert "bool_type" in str(refused(dict[str, bool], {"a": "yes"}))
    assert "date_type" in str(refused(dict[str, dt.date], {"a": 1}))


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"number": NaN}', b"[" * 100_000])
def test_invalid_json_is_undecodable(body: bytes) -> None:
    assert refused(Order, body).reason == "undecodable_body"


def test_text_and_bytes_that_say_nothing_of_themselves_are_read_as_json() -> None:
    for content_type in ("application/octet-stream", "text/plain; charset=utf-8"):
        assert read(Plain, {"number": 5}, None, content_type) == Plain(5)

    assert "image/png" in str(refused(Plain, {"number": 5}, None, "image/png"))


def test_an_older_body_is_upgraded_step_by_step() -> None:
    @upgrade("typed.Order", from_version=1)
    def from_cents(body: dict[str, Any]) -> dict[str, Any]:
        return {"number": body["number"], "total": Decimal(body["cents"]) / 100}

    @upgrade("typed.Order", from_version=2)
    def from_total(body: dict[str, Any]) -> dict[str, Any]:
        return {"number": body["number"], "amount": body["total"]}

    first = read(Order, {"number": "1", "cents": 990}, "typed.Order;v=1;min=1")
    second = read(Order, {"number": "1", "total": 9.25}, "typed.Order;v=2;min=2")

    assert (first.amount, second.amount) == (Decimal("9.9"), Decimal("9.25"))
    # Without the header it is what the annotation says.
    assert "amount: missing" in str(refused(Order, {"number": "1", "cents": 990}))


def test_an_upgrader_that_fails_shows_nothing() -> None:
    @upgrade("typed.Order", from_version=2)
    def broken(body: dict[str, Any]) -> dict[str, Any]:
        raise KeyError(body["number"])

    error = refused(Order, {"number": "secret"}, "typed.Order;v=2")

    assert str(error) == "upgrade from 2: KeyError"
    assert "secret" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("x"), NewerCodeNeeded("typed.Order", 9, 3),
        DecodeError("undecodable_body", "x"),
    ],
)  # fmt: skip
def test_an_upgrader_that_raises_an_error_of_the_package_has_failed(
    error: Exception,
) -> None:
    @upgrade("typed.Order", from_version=2)
    def broken(body: dict[str, Any]) -> dict[str, Any]:
        raise error

    found = refused(Order, {}, "typed.Order;v=2")

    assert (found.reason, type(found)) == ("invalid_body", DecodeError)
    assert str(found) == f"upgrade from 2: {type(error).__name__}"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), Decimal("NaN")])
def test_an_upgrader_that_returns_no_json_has_failed(number: object) -> None:
    upgrade("typed.Order", from_version=2)(lambda body: body | {"amount": number})

    error = refused(Order, {"number": "1"}, "typed.Order;v=2")

    assert (error.reason, str(error)) == ("invalid_body", "upgrade from 2: ValueError")


def test_a_newer_body_is_read_as_far_as_its_sender_says() -> None:
    body = {"number": "1", "amount": "1", "new": True}

    assert read(Order, body, "typed.Order;v=9;min=3").number == "1"
    with pytest.raises(NewerCodeNeeded) as caught:
        read(Order, body, "typed.Order;v=9;min=4")
    assert (caught.value.name, caught.value.version) == ("typed.Order", 4)


@pytest.mark.parametrize(
    "header",
    [
        "typed.Order;v=0", "typed.Order;v=1001;min=1", "typed.Order;v=x", "",
        "typed.Order;v=2;min=3", "typed.Order;v=-1", ";v=1", "a b;v=1",
        "typed.Order;v=99999999999999999999", "typed.Order;v=²",
    ],
)  # fmt: skip
def test_an_absurd_version_is_dead(header: str) -> None:
    assert refused(Order, {}, header).reason == "invalid_body"


def test_a_header_may_hold_the_name_alone_and_what_comes_later() -> None:
    assert TypeHeader.parse("a.B") == TypeHeader("a.B", None, 1)
    assert TypeHeader.parse("a.B;v=3") == TypeHeader("a.B", 3, 3)
    assert TypeHeader.parse("a.B; v=3; min=2; new=x") == TypeHeader("a.B", 3, 2)
    assert str(TypeHeader("a.B", 3, 2)) == "a.B;v=3;min=2"


def test_long_headers_take_little_memory() -> None:
    tracemalloc.start()
    for number in range(300):
        TypeHeader.parse(f"a.B;v=1;new={number}{'x' * 120_000}")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    TypeHeader.parse.cache_clear()

    assert kept < 20_000_000


def test_the_header_selects_the_member_of_a_union() -> None:
    union = Note | Order

    assert isinstance(read(union, {"text": "a"}, "typed.Note;v=1;min=1"), Note)
    unknown = refused(union, {"text": "a"}, "typed.Other;v=1;min=1")
    assert str(unknown) == (
        "txmsg-type: 'typed.Other' is unknown here; known: typed.Note, typed.Order"
    )
    assert "one of typed.Note, typed.Order" in str(refused(union, {"text": "a"}))


def test_without_the_header_a_union_needs_a_discriminator() -> None:
    assert read(Either, {"kind": "note", "text": "a"}) == Note(text="a")
    assert "union_tag_invalid" in str(refused(Either, {"kind": "other"}))


def test_a_union_whose_members_have_no_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="told apart by the names"):
        codecs.reader(Order | dict[str, int])


def test_names_come_from_the_declaration_or_the_module() -> None:
    assert codecs.body_type(Order).header == "typed.Order;v=3;min=1"
    assert codecs.body_type(Plain).header == "tests.Plain;v=1;min=1"

    class Heir(Note):
        pass

    assert codecs.body_type(Heir).name == "tests.Heir"


def test_readable_from_defaults_to_the_version_after_the_last_upgrader() -> None:
    upgrade("typed.Order", from_version=1)(dict)
    said = message_type("typed.Order", version=3, readable_from=3)(
        dataclass(type("Order", (), {"__annotations__": {"a": int}}))
    )

    assert codecs.body_type(Order).oldest_reader == 2
    assert codecs.body_type(said).oldest_reader == 3


@pytest.mark.parametrize(
    "given",
    [{"version": 0}, {"version": 1001}, {"version": 1, "readable_from": 2},
     {"name": "a b"}, {"name": "a;v=1"}, {"name": "x" * 300}],
)  # fmt: skip
def test_an_impossible_declaration_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        message_type(**given)


def test_two_upgraders_of_one_version_are_refused() -> None:
    upgrade("typed.Order", from_version=1)(dict)
    with pytest.raises(ConfigurationError, match="both upgrade"):
        upgrade("typed.Order", from_version=1)(list)


@pytest.mark.parametrize(
    ("value", "errors"),
    [
        (Order(1, Decimal(1)), "number: string_type"),  # type: ignore[arg-type]
        (Order("1", 9.9), "amount: unexpected_type"),  # type: ignore[arg-type]
        (Order("1", Decimal("NaN")), "amount: finite_number"),
    ],
)
def test_what_is_sent_is_validated_at_the_call(value: object, errors: str) -> None:
    found = codecs.type_of(value)
    assert found is not None

    with pytest.raises(InvalidMessage, match=errors) as caught:
        found.encode(value)
    assert "9.9" not in "".join(traceback.format_exception(caught.value))


def test_what_is_sent_is_plain_json_that_reads_back() -> None:
    order = Order("A-1", Decimal("12345678901234567.890"))
    found = codecs.type_of(order)
    assert found is not None

    body = found.encode(order)

    assert json.loads(body)["amount"] == "12345678901234567.890"
    assert read(Order, body) == order


class Colour:
    def __init__(self, name: str) -> None:
        self.name = name


class ColourCodec(codecs.Codec):
    """A codec that a project might write."""

    def handles(self, annotation: Any) -> bool:
        return annotation is Colour

    def decode(self, annotation: Any, body: bytes) -> Any:
        name = json.loads(body)
        if not isinstance(name, str):
            raise codecs.Misfit([("$", "no_colour")])
        return Colour(name)

    def encode(self, annotation: Any, value: Any) -> bytes:
        return json.dumps(value.name).encode()


def test_codecs_of_the_settings_come_first() -> None:
    assert codecs.type_of(Colour("red")) is None
    with txmsg(CODECS=[f"{__name__}.ColourCodec"]):
        found = codecs.type_of(Colour("red"))
        assert found is not None
        assert found.encode(Colour("red")) == b'"red"'
        assert read(Colour, "blue", "tests.Colour;v=1;min=1").name == "blue"
        assert str(refused(Colour, 5)) == "$: no_colour"


def test_json_values_need_no_codec() -> None:
    for value in ({}, [], "", 1, 1.5, None, True, b"", Decimal(1), dt.date.max):
        assert codecs.type_of(value) is None


def of_the_message(message: Message) -> object:
    return message


def of_anything(message) -> object:  # type: ignore[no-untyped-def]
    return message


def of_a_body(order: Order) -> object:
    return order


def of_both(order: Order, message: Message) -> object:
    return order, message


def of_a_body_with_more(order: Order, retries: int = 3) -> object:
    return order, retries


class Calling:
    def __call__(self, order: Order) -> object:
        return order


def of_nothing_known(order: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """A handler whose annotation cannot be resolved."""


@pytest.mark.parametrize("handler", [of_the_message, of_anything, lambda message: 1])
def test_a_handler_of_the_message_is_not_wrapped(handler: Callable[..., Any]) -> None:
    assert accepted(handler) is None
    assert bound(handler) is handler


@pytest.mark.parametrize(
    ("handler", "given"),
    [
        (of_a_body, "body"),
        (of_both, ("body", "message")),
        (of_a_body_with_more, ("body", 3)),
        (Calling(), "body"),
    ],
)
def test_a_handler_gets_what_it_asks_for(
    handler: Callable[..., Any], given: object
) -> None:
    class Fake:
        body = "body"

    message: Any = Fake()
    got = bound(handler)(message)

    assert accepted(handler) is Order
    assert got == (("body", message) if given == ("body", "message") else given)


#: Handlers and a flow's step in a module that imports classes under TYPE_CHECKING.
FOR_TYPE_CHECKERS = """
def of_the_message(message: Message) -> Missing: return message
def of_a_body(order: Order, clock: Missing = None) -> Missing: return order
def of_both(order: Order, message: Message) -> Missing: return order, message
def in_quotes(order: "Order", message: "Message") -> Missing: return order, message
def of_a_quoted_message(message: "Message") -> Missing: return message
def of_a_missing_one(order: list[Missing]) -> None: ...
def of_a_wrong_one(order: "Order" | None) -> None: ...
class Shown(Flow[Order, int], name="typed.shown", within=None):
    @step
    def start(self, order: Order) -> Missing: ...
"""


@pytest.mark.parametrize(
    "first_line",
    # From Python 3.14 on, no module needs this line.
    ["from __future__ import annotations", *[""] * (sys.version_info >= (3, 14))],
)
def test_names_for_type_checkers_need_not_exist(first_line: str) -> None:
    names: dict[str, Any] = {one.__name__: one for one in (Order, Flow, step)}
    names["__name__"] = __name__
    source = f"{first_line}\n{FOR_TYPE_CHECKERS}"
    exec(compile(source, __name__, "exec", dont_inherit=True), names)
    given = Message(id=uuid.uuid4(), destination="orders", body="body")

    assert bound(names["of_the_message"])(given) is given
    assert accepted(names["of_a_body"]) is Order
    assert bound(names["of_a_body"])(given) == "body"
    assert bound(names["of_both"])(given) == ("body", given)
    assert accepted(names["in_quotes"]) is Order
    assert bound(names["in_quotes"])(given) == ("body", given)
    assert bound(names["of_a_quoted_message"])(given) is given
    with pytest.raises(ConfigurationError, match="'Missing' is not defined"):
        codecs.reader(accepted(names["of_a_missing_one"]))
    with pytest.raises(ConfigurationError, match="unsupported operand"):
        accepted(names["of_a_wrong_one"])
    assert shelved(names["Shown"]).destination.body is Order


def test_an_annotation_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Missing"):
        accepted(of_nothing_known)


def test_a_reader_says_what_it_reads() -> None:
    reader = codecs.reader(Note | Order)

    assert isinstance(reader, BodyReader)
    assert reader.reads == (("typed.Note", 1), ("typed.Order", 3))


@pytest.mark.parametrize(
    "union",
    [
        TypeAliasType("Event", Placed | Cancelled),
        TypeAliasType("Outer", TypeAliasType("Inner", Placed | Cancelled)),  # type: ignore[misc]
        Note | TypeAliasType("Event", Placed | Cancelled),
        Annotated[
            TypeAliasType("Both", Note | Tagged), pydantic.Field(discriminator="kind")
        ],
    ],
)
def test_the_header_selects_the_member_of_a_named_union(union: Any) -> None:
    for one in codecs.reader(union).types:
        kind = {Tagged: {"kind": "tagged", "price": 1.5}, Note: {"text": "a"}}
        body = kind.get(one.cls, {"number": "1"})

        assert type(read(union, body, one.header)) is one.cls
    assert len(codecs.reader(union).types) > 1


def test_another_name_of_a_class_and_a_generic_one_have_its_versions() -> None:
    upgrade("typed.Wrap", from_version=1)(lambda body: {"item": body["old"]})
    Told = NewType("Told", Cancelled)

    assert codecs.reader(Told).reads == (("tests.Cancelled", 1),)
    assert read(Wrap[int], {"old": 5}, "typed.Wrap;v=1;min=1") == Wrap(5)
    with pytest.raises(NewerCodeNeeded):
        read(Wrap[int], {"item": 5}, "typed.Wrap;v=3;min=3")
    assert "item: int_type" in str(refused(Wrap[int], {"item": "5"}))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Page[Plain](items=[Plain(1)]), "tests.Page-Plain"),
        (Page[dict[str, int]](items=[{"a": 1}]), "tests.Page-dict-str-int"),
        (Größe(zahl=1), "tests.Grxf6xdfe"),
    ],
)
def test_what_is_sent_under_the_name_of_a_class_is_read(value: Any, name: str) -> None:
    found = codecs.type_of(value)
    assert found is not None

    assert found.name == name
    assert read(type(value), found.encode(value), found.header) == value


def test_a_class_whose_name_is_too_long_is_to_get_one() -> None:
    with pytest.raises(ConfigurationError, match="@message_type"):
        codecs.body_type(dataclass(type("X" * 200, (), {})))


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ('{"tagged": {"kind": 1, "amount": %s}}', lambda one: one.tagged.amount),
        ('{"matching": {"ab": %s}}', lambda one: one.matching["ab"]),
        ('{"named": %s}', lambda one: one.named),
        ('{"called": %s}', lambda one: one.named),
        ('{"first": %s}', lambda one: one.chosen),
        ('{"second": %s}', lambda one: one.chosen),
        ('{"deep": [0.5, {"er": %s}]}', lambda one: one.inside),
    ],
)
def test_a_decimal_keeps_its_digits_wherever_it_is_read_from(
    body: str, at: Callable[[Any], Decimal]
) -> None:
    digits = "12345678901234567.89"

    assert str(at(read(Elsewhere, (body % digits).encode()))) == digits
    other = {"tagged": {"kind": 2, "amount": 1.5}}
    assert read(Elsewhere, other).tagged.amount == 1.5


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (Lossy(ratio=float("nan")), "ratio: finite_number"),
        (Lossy(anything=[1, {"secret": float("inf")}]), r"anything\.1\.\*: finite_n"),
        (Lossy(password=pydantic.SecretStr("secret")), "password: masked_secret"),
        (Lossy(huge=10**5000), "json_invalid"),
        (Constant(ratio=float("inf")), "json_invalid"),
    ],
)
def test_body_that_would_arrive_changed_is_refused(value: Any, error: str) -> None:
    found = codecs.type_of(value)
    assert found is not None

    with pytest.raises(InvalidMessage, match=error) as caught:
        found.encode(value)
    assert "secret'" not in str(caught.value)


def test_what_is_kept_is_sent_with_its_nulls_and_asterisks() -> None:
    found = codecs.body_type(Lossy)
    value = Lossy(ratio=1.5, anything=["**********", None, "NaN"])

    assert read(Lossy, found.encode(value)) == value


def test_a_key_in_a_body_is_not_in_the_error() -> None:
    body = {"by_name": {"jane@example.com": "x", "a\0b": "x"}}

    assert str(refused(Lossy, body)) == "by_name.*: int_type; by_name.*: int_type"


@pytest.mark.parametrize("number", [1, 2])
def test_a_validator_that_ends_programs_ends_no_worker(number: int) -> None:
    upgrade("typed.Order", from_version=2)(lambda body: exit(5))

    assert str(refused(Raising, {"number": number})).startswith("$: ")
    assert "upgrade from 2: SystemExit" in str(refused(Order, {}, "typed.Order;v=2"))
    with pytest.raises(KeyboardInterrupt):
        read(Raising, {"number": 3})
    with ThreadPoolExecutor(1) as elsewhere:  # as a worker does, and no Ctrl-C comes
        error = elsewhere.submit(refused, Raising, {"number": 3}).result()
    assert str(error) == "$: KeyboardInterrupt"


def test_an_annotation_that_cannot_be_hashed_is_refused_in_plain_words() -> None:
    annotation = Annotated[Order, {"unit": "EUR"}]
    with pytest.raises(ConfigurationError, match="unhashable type: 'dict'"):
        codecs.reader(annotation)


def test_an_annotation_of_what_pydantic_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'Nowhere' is not defined"):
        codecs.reader(list["Nowhere"])  # type: ignore[name-defined]  # noqa: F821
