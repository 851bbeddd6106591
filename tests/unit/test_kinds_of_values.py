"""Every kind of value arrives unchanged, or the send refuses it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import ipaddress
import pathlib
import re
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
import pytest
from django.db.models import IntegerChoices, TextChoices
from django.utils.safestring import mark_safe
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr
from typing_extensions import NotRequired, TypedDict

from django_txmsg import codecs
from django_txmsg.errors import InvalidMessage

NOW = dt.datetime(2026, 11, 24, 17, 30, 1, 250, tzinfo=dt.timezone.utc)
T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"


class Status(str, enum.Enum):
    NEW = "new"


class Level(enum.IntEnum):
    LOW = 1


class Paid(TextChoices):
    YES = "yes"


class Size(IntegerChoices):
    SMALL = 77


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Leaf:
    name: str


@dataclass
class Twig(Leaf):
    length: int = 0


@dataclass
class Box:
    """A dataclass with one field of the given type."""

    value: Any


@dataclass
class NoInit:
    name: str
    number: int = field(init=False, default=7)


@dataclass
class NotCompared:
    number: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Frozen:
    name: str


@dataclass
class WithSlots:
    __slots__ = ("name",)
    name: str


class Model(BaseModel):
    name: str = "n"


class Sub(Model):
    more: int = 0


class Aliased(BaseModel):
    """A field that is written under one name, and read under another name."""

    model_config = ConfigDict(populate_by_name=True)
    amount: int = Field(0, validation_alias="amount_in", serialization_alias="out")


class BothWays(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    amount: int = Field(0, alias="sum")


class Excluded(BaseModel):
    amount: int = Field(0, exclude=True)


class Stripped(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    name: str


class Lowered(BaseModel):
    name: Annotated[str, pydantic.StringConstraints(to_lower=True)]


class WithPrivate(BaseModel):
    name: str = "n"
    _note: str = PrivateAttr("")


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")


class Values(BaseModel):
    model_config = ConfigDict(use_enum_values=True)
    colour: Colour = Colour.RED
    status: Status = Status.NEW


class NoExtra(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = "n"


class Secret(BaseModel):
    password: SecretStr


class Written(BaseModel):
    """A field with a serializer that the user has written."""

    name: str

    @pydantic.field_serializer("name")
    def short(self, name: str) -> str:
        return name[:3]


class Counting(BaseModel):
    """A field whose validator changes the value each time."""

    number: int

    @pydantic.field_validator("number")
    @classmethod
    def more(cls, number: int) -> int:
        return number + 1


class Computed(BaseModel):
    one: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def two(self) -> int:
        return self.one * 2


class Root(pydantic.RootModel[list[int]]):
    pass


class Page(BaseModel, Generic[T]):
    items: list[T]


class Entry(TypedDict):
    name: str
    more: NotRequired[int]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    ratio: float


Tagged = Annotated[Cat | Dog, Field(discriminator="kind")]


def private(note: str) -> WithPrivate:
    found = WithPrivate()
    found._note = note
    return found


def not_init(number: int) -> NoInit:
    found = NoInit("n")
    found.number = number
    return found


OFFSET = dt.timezone(dt.timedelta(hours=1, seconds=30))
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")

#: Arrives as it was.
KEPT: dict[str, tuple[Any, Any]] = {
    "str": (str, "text\0\ud7ff💶"),
    "int": (int, 10**30),
    "a negative int": (int, -1),
    "float": (float, 0.1),
    "minus nought": (float, -0.0),
    "a large float": (float, 1.7976931348623157e308),
    "bool": (bool, True),
    "None": (None, None),
    "bytes": (bytes, b"text"),
    "Decimal": (Decimal, Decimal("9.90")),
    "a long Decimal": (Decimal, Decimal("12345678901234567890.123456789")),
    "a Decimal with an exponent": (Decimal, Decimal("1E+3")),
    "date": (dt.date, NOW.date()),
    "time": (dt.time, dt.time(1, 2, 3, 4)),
    "datetime without a zone": (dt.datetime, dt.datetime(2026, 1, 1, 0, 0, 0, 1)),
    "timedelta": (dt.timedelta, dt.timedelta(days=-3, microseconds=7)),
    "UUID": (uuid.UUID, uuid.UUID(int=5)),
    "Enum": (Colour, Colour.RED),
    "str Enum": (Status, Status.NEW),
    "IntEnum": (Level, Level.LOW),
    "Flag": (Right, Right.READ),
    "Literal": (Literal["a", "b"], "a"),
    "list": (list[int], [1, 2]),
    "a list in a list": (list[list[int]], [[1], []]),
    "tuple": (tuple[int, str], (1, "a")),
    "a tuple of any length": (tuple[int, ...], (1, 2, 3)),
    "set": (set[int], {1, 2}),
    "frozenset": (frozenset[str], frozenset({"a"})),
    "deque": (deque[int], deque([1, 2])),
    "dict": (dict[str, int], {"a": 1}),
    "a dict by int": (dict[int, str], {1: "a"}),
    "a dict by date": (dict[dt.date, int], {NOW.date(): 1}),
    "a dict by UUID": (dict[uuid.UUID, int], {uuid.UUID(int=5): 1}),
    "a dict by Enum": (dict[Colour, int], {Colour.RED: 1}),
    "defaultdict": (defaultdict[str, list[int]], defaultdict(list, {"a": [1]})),
    "OrderedDict": (OrderedDict[str, int], OrderedDict(a=1)),
    "NamedTuple": (Point, Point(1, 2)),
    "dataclass": (Leaf, Leaf("a")),
    "a frozen dataclass": (Frozen, Frozen("a")),
    "a dataclass with slots": (WithSlots, WithSlots("a")),
    "a subclass that is named": (Twig, Twig("a", 3)),
    "a union of subclasses": (Leaf | Twig, Twig("a", 3)),
    "a list of dataclasses": (list[Leaf], [Leaf("a"), Leaf("b")]),
    "a dict of dataclasses": (dict[str, Leaf], {"a": Leaf("a")}),
    "a field that is not compared": (NotCompared, NotCompared(5)),
    "a default that is not set": (NoInit, NoInit("a")),
    "a model": (Model, Model(name="a")),
    "a submodel": (Sub, Sub(name="a", more=5)),
    "one alias for both ways": (BothWays, BothWays(amount=5)),
    "two aliases and the default": (Aliased, Aliased()),
    "an excluded default": (Excluded, Excluded()),
    "a stripped text": (Stripped, Stripped(name=" a ")),
    "a private attribute's default": (WithPrivate, WithPrivate(name="a")),
    "extra fields": (Extra, Extra(more=[1, {"a": None}])),  # type: ignore[call-arg]
    "no extra fields": (NoExtra, NoExtra(name="a")),
    "a computed field": (Computed, Computed(one=1)),
    "a root model": (Root, Root([1, 2])),
    "a generic model": (Page[Leaf], Page[Leaf](items=[Leaf("a")])),
    "TypedDict": (Entry, {"name": "a"}),
    "TypedDict with what is not required": (Entry, {"name": "a", "more": 1}),
    "a discriminated union": (Tagged, Dog()),
    "a nullable": (int | None, None),
    "a str in int | str": (int | str, "5"),
    "an int in int | str": (int | str, 5),
    "an int in int | float": (int | float, 1),
    "a float in int | float": (int | float, 1.5),
    "a Decimal in Decimal | str": (Decimal | str, Decimal("1.5")),
    "text in datetime | str": (dt.datetime | str, "tomorrow"),
    "Any with JSON": (Any, {"a": [1, 1.5, "b", None, True]}),
    "dict[str, Any] with JSON": (dict[str, Any], {"a": {"b": [1]}}),
    "an IP address": (ipaddress.IPv4Address, ipaddress.IPv4Address("127.0.0.1")),
    "a path": (pathlib.PurePosixPath, pathlib.PurePosixPath("/a/b")),
    "a pattern": (re.Pattern[str], re.compile("a+")),
    "a URL": (pydantic.AnyUrl, pydantic.AnyUrl("https://example.com/a?b=1")),
    "ByteSize": (pydantic.ByteSize, pydantic.ByteSize(1024)),
    "Json": (pydantic.Json[list[int]], [1, 2]),
    "a member of a union that has the field": (Cat | Model, Model(name="a")),
    "two members of a Flag": (Right, Right.READ | Right.WRITE),
}
#: Equal, though Python shows them otherwise.
EQUAL: dict[str, tuple[Any, Any]] = {
    "datetime in UTC": (dt.datetime, NOW),
    "datetime in a zone": (dt.datetime, NOW.astimezone(BERLIN)),
    "time with an offset": (dt.time, dt.time(1, 2, tzinfo=dt.timezone.utc)),
    "an int for a float": (float, 3),
    "text of a subclass": (str, mark_safe("<b>")),
    "a dict of a subclass": (dict[str, int], Counter(a=1)),
    "a mapping": (Mapping[str, int], OrderedDict(a=1)),
    "a choice of text": (str, Paid.YES),
    "a choice of numbers": (int, Size.SMALL),
    "a choice in Any": (Any, {"paid": Paid.YES}),
    "a choice for a key": (dict[str, int], {Paid.YES: 1}),
    "an IntEnum in an int": (int, Level.LOW),
    "text of a subclass for a key": (dict[str, int], {mark_safe("a"): 1}),
    "text of a subclass in a set": (set[str], {mark_safe("a"), Paid.YES}),
    "ints in a set of floats": (frozenset[float], frozenset({1, 2})),
    "a generic model without its parameters": (Page[Leaf], Page(items=[Leaf("a")])),
    "a list of them": (list[Page[int]], [Page(items=[1]), Page(items=[])]),
    "a list of a subclass": (list[int], type("Own", (list,), {})([1])),
}
#: Would arrive as something else.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "two aliases": (Aliased, Aliased(amount=77), "amount: another int"),
    "two aliases, inside": (list[Aliased], [Aliased(amount=77)], r"0\.amount: "),
    "an excluded field": (Excluded, Excluded(amount=77), "amount: another int"),
    "text like a datetime": (dt.datetime | str, "2026-01-01T00:00:00", "datetime"),
    "text like a date": (dt.date | str, "2026-01-01", "str would arrive as date"),
    "text like a UUID": (uuid.UUID | str, str(uuid.UUID(int=77)), "UUID"),
    "text like a Decimal": (Decimal | str, "77.5", "str would arrive as Decimal"),
    "text like a timedelta": (dt.timedelta | str, "P1D", "timedelta"),
    "text like a path": (pathlib.PurePosixPath | str, "/77", "PurePosixPath"),
    "a Decimal in Any": (Any, Decimal("77.5"), "Decimal would arrive as str"),
    "a date in Any": (Any, NOW.date(), "date would arrive as str"),
    "a datetime in Any": (dict[str, Any], {"a": NOW}, "datetime would arrive as str"),
    "a timedelta in Any": (Any, dt.timedelta(77), "timedelta would arrive as str"),
    "a UUID in Any": (Any, uuid.UUID(int=77), "UUID would arrive as str"),
    "a tuple in Any": (Any, (77, 1), "tuple would arrive as list"),
    "a set in Any": (Any, {77}, "set would arrive as list"),
    "an Enum in Any": (Any, Colour.RED, "Colour would arrive as str"),
    "a str Enum in Any": (Any, Status.NEW, "Status would arrive as str"),
    "bytes in Any": (Any, b"77", "bytes would arrive as str"),
    "a dataclass in Any": (Any, Leaf("77"), "Leaf would arrive as dict"),
    "a model in Any": (Any, Model(name="77"), "Model would arrive as dict"),
    "a named tuple in Any": (Any, Pair(77, 1), "Pair would arrive as list"),
    "numbers for keys in Any": (Any, {77: "a"}, "another dict"),
    "deep in Any": (dict[str, Any], {"a": [{"b": (77,)}]}, r"\*\.0\.\*: tuple"),
    "a float in Decimal | float": (Decimal | float, 77.1, "float would .* Decimal"),
    "a bool in an int": (int, True, "bool would arrive as int"),
    "a bool in a float": (float, True, "bool would arrive as float"),
    "bools in a list of ints": (list[int], [77, True], "1: bool would arrive as int"),
    "an int for a key that is a bool": (dict[int, int], {True: 77}, "int_parsing"),
    "an Enum in a str": (str, Status.NEW, "Status would arrive as str|unexpected"),
    "a bool in a set of ints": (set[int], {True, 77}, "another set"),
    "a Decimal in a set of Any": (set[Any], {Decimal("77.5")}, "another set"),
    "a generic model with another's field": (
        Page[float], Page(items=[77, True]), r"items\.1: bool|unexpected_type",
    ),
    "text that is stripped": (
        Stripped, Stripped.model_construct(name=" 77 "), "name: another str",
    ),
    "text that is lowered": (
        Lowered, Lowered.model_construct(name="A77"), "name: another str",
    ),
    "a private attribute": (WithPrivate, private("77"), "_note: another str"),
    "a dict like a dataclass": (list[Leaf | dict], [{"name": "77"}], "dict .* Leaf"),
    "a field with init=False": (NoInit, not_init(77), "number: another int"),
    "a subclass in its base's field": (list[Leaf], [Twig("a", 77)], "Twig .* Leaf"),
    "a submodel in its base's field": (list[Model], [Sub(more=77)], "Sub .* Model"),
    "an offset with seconds": (dt.datetime, NOW.astimezone(OFFSET), "another dateti"),
    "a date and time for a date": (dt.date, NOW, "date_parsing"),
    "infinity as text": (Constants, Constants(ratio=float("inf")), "float_type"),
    "NaN": (float | None, float("nan"), "finite_number"),
    "infinity in Any": (Any, [float("inf")], "0: finite_number"),
    "a secret": (Secret, Secret(password=SecretStr("77")), "password: masked_secret"),
    "a serializer that cuts": (Written, Written(name="long 77"), "name: another str"),
    "a validator that counts": (Counting, Counting(number=77), "number: another int"),
    "a sequence that is a tuple": (Sequence[int], (77,), "tuple would|unexpected"),
    "a key that no one declares": (Entry, {"name": "a", "b": 77}, "another dict"),
    "a list for a tuple": (tuple[int, ...], [77], "unexpected_type|list would"),
    "a tuple for a list": (list[int], (77,), "unexpected_type|tuple would"),
    "text for an int": (int, "77", "unexpected_type|int_type"),
    "a fraction": (Any, Fraction(77, 2), "Fraction would arrive as str"),
    "an object": (Any, SimpleNamespace(a=77), "unexpected_type"),
    "a Decimal that is NaN": (Decimal, Decimal("NaN"), "finite_number"),
    "a generator": (list[int], (n for n in [77]), "unexpected_type|generator"),
}  # fmt: skip


def sent_and_read(annotation: Any, value: Any) -> Any:
    """Return a value after it was encoded and decoded as the field of a dataclass."""
    holder = dataclasses.make_dataclass("Holder", [("value", annotation)])
    found = codecs.body_type(holder)
    inside = codecs.reader(holder).read(
        found.encode(holder(value)), "application/json", None
    )
    return inside.value


@pytest.mark.parametrize("kind", KEPT)
def test_value_arrives_as_it_was_sent(kind: str) -> None:
    annotation, value = KEPT[kind]
    read = sent_and_read(annotation, value)

    assert read == value
    assert type(read) is type(value)
    assert repr(read) == repr(value)


@pytest.mark.parametrize("kind", EQUAL)
def test_value_arrives_equal(kind: str) -> None:
    annotation, value = EQUAL[kind]
    read = sent_and_read(annotation, value)

    assert read == value
    if isinstance(value, dt.datetime | dt.time):
        assert read.utcoffset() == value.utcoffset()


def test_a_default_may_be_a_member_where_a_model_has_values() -> None:
    read = sent_and_read(Values, Values())

    assert (read.colour, read.status) == ("red", "new")


@pytest.mark.parametrize("kind", REFUSED)
def test_refusal_names_field_and_types_but_no_value(
    kind: str,
) -> None:
    annotation, value, said = REFUSED[kind]

    with pytest.raises(InvalidMessage, match=said) as caught:
        sent_and_read(annotation, value)
    assert "77" not in str(caught.value)
