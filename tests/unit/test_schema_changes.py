"""Each change of a body's class breaks readers, writers or neither, as the table in the
docs says."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest
from pydantic import Field
from typing_extensions import NotRequired, TypeAliasType, TypedDict

from django_txmsg.envelope.pydantic_codec import PydanticCodec
from django_txmsg.envelope.schema_reader import faults
from tests.docs.pages import ROOT


@dataclass
class Base:
    number: str


@dataclass
class WithDefault:
    number: str
    currency: str = "EUR"


@dataclass
class WithRequired:
    number: str
    currency: str


@dataclass
class WithInt:
    number: int


@dataclass
class WithFloat:
    number: float


@dataclass
class WithNull:
    number: str | None


@dataclass
class Renamed:
    order: str


@dataclass
class TwoValues:
    kind: Literal["a", "b"]


@dataclass
class ThreeValues:
    kind: Literal["a", "b", "c"]


@dataclass
class Bounded:
    number: Annotated[str, Field(max_length=10)]


@dataclass
class WiderBounded:
    number: Annotated[str, Field(max_length=20)]


class Forbidding(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    number: str


class Ignoring(pydantic.BaseModel):
    number: str


class Keeping(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    number: str


@dataclass
class Dated:
    at: dt.datetime


@dataclass
class WithZone:
    at: pydantic.AwareDatetime


@dataclass
class Since:
    at: Annotated[dt.datetime, Field(ge=dt.datetime(2000, 1, 1))]


@dataclass
class SinceEarlier:
    at: Annotated[dt.datetime, Field(ge=dt.datetime(1999, 1, 1))]


@dataclass
class Either:
    amount: int | Decimal


@dataclass
class EitherBounded:
    amount: Annotated[int | Decimal, Field(ge=0)]


@dataclass
class Lines:
    lines: list[Base]


@dataclass
class OtherLines:
    lines: list[WithRequired]


class Omitting(TypedDict):
    number: NotRequired[str]


class Requiring(TypedDict):
    number: str


#: The change, the class before, the class after, and whether it breaks new code that
#: reads old messages, and old code that reads new ones.
CHANGES: list[tuple[str, Any, Any, bool, bool]] = [
    ("nothing", Base, Base, False, False),
    ("a field with a default is added", Base, WithDefault, False, False),
    ("a field without a default is added", Base, WithRequired, True, False),
    ("a field with a default is removed", WithDefault, Base, False, False),
    ("a field without a default is removed", WithRequired, Base, False, True),
    ("a field is renamed", Base, Renamed, True, True),
    ("a field gets a default", WithRequired, WithDefault, False, False),
    ("a field loses its default", WithDefault, WithRequired, True, False),
    ("a required field becomes optional", Requiring, Omitting, False, True),
    ("a field's type becomes wider (`int` to `float`)", WithInt, WithFloat, False,
     True),
    ("a field's type becomes narrower (`float` to `int`)", WithFloat, WithInt, True,
     False),
    ("a field's type becomes another", Base, WithInt, True, True),
    ("a field also accepts null", Base, WithNull, False, True),
    ("a field no longer accepts null", WithNull, Base, True, False),
    ("a value is added to an enumeration", TwoValues, ThreeValues, False, True),
    ("a value is removed from an enumeration", ThreeValues, TwoValues, True, False),
    ("a bound becomes wider", Bounded, WiderBounded, False, True),
    ("a bound becomes narrower", WiderBounded, Bounded, True, False),
    ("a bound is added", Base, Bounded, True, False),
    ("a date, a time or a duration gets a bound", Dated, Since, True, False),
    ("the bound of a date, a time or a duration changes", Since, SinceEarlier, True,
     True),
    ("a datetime needs a time zone (`datetime` to `AwareDatetime`)", Dated, WithZone,
     True, False),
    ("a union gets a bound", Either, EitherBounded, True, False),
    ("unknown fields are forbidden", Ignoring, Forbidding, True, False),
    ("unknown fields are no longer forbidden", Forbidding, Ignoring, False, False),
    ("unknown fields are sent too (`extra=\"allow\"`), and old code forbids them",
     Forbidding, Keeping, False, True),
    ("a field without a default is added to a nested class", Lines, OtherLines, True,
     False),
]  # fmt: skip

codec = PydanticCodec()


def schema(cls: Any) -> dict[str, Any]:
    found = codec.schema(cls)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("before", "after", "old_messages", "old_readers"),
    [row[1:] for row in CHANGES],
    ids=[row[0] for row in CHANGES],
)
def test_a_change_breaks_one_direction_or_the_other(
    before: Any, after: Any, old_messages: bool, old_readers: bool
) -> None:
    old, new = schema(before), schema(after)

    assert bool(faults(new, old)) is old_messages
    assert bool(faults(old, new, ours=True)) is old_readers


def test_the_docs_have_the_same_table() -> None:
    page = (ROOT / "docs" / "how-to" / "contracts.md").read_text()
    rows = {
        what: (old.strip(), new.strip())
        for what, old, new in re.findall(
            r"^\| ([^|]+) \| (fits|\*\*breaks\*\*) \| (fits|\*\*breaks\*\*) \|$",
            page,
            re.MULTILINE,
        )
    }
    words = {False: "fits", True: "**breaks**"}

    assert rows == {
        what: (words[old], words[new]) for what, _, _, old, new in CHANGES[1:]
    }


@dataclass
class Tree:
    value: Decimal
    children: list[Tree] = field(default_factory=list)
    parent: Optional[Tree] = None  # noqa: UP045 - what older code writes


Nested = TypeAliasType("Nested", "Annotated[int | list[Nested], Field(le=9)]")


@dataclass
class Shapes:
    one: dict[str, Decimal]
    two: tuple[int, str]
    three: Base | WithInt | None
    four: dict[str, Base] = field(default_factory=dict)


@pytest.mark.parametrize("cls", [Tree, Shapes, Base | Renamed, Nested])
def test_every_type_reads_itself(cls: Any) -> None:
    assert faults(schema(cls), schema(cls)) == []


@pytest.mark.parametrize(
    "writer", [dict[str, int], dict[Annotated[str, Field(pattern="x")], int]]
)
def test_a_writer_of_any_name_does_not_fit_a_reader_that_forbids_unknown_fields(
    writer: Any,
) -> None:
    reader = {"type": "object", "additionalProperties": False}
    assert faults(reader, schema(writer), ours=True) == [("$", "unknown fields")]


def test_a_fault_names_the_place() -> None:
    assert faults(schema(OtherLines), schema(Lines)) == [
        ("$.lines[].currency", "missing")
    ]
    assert faults(schema(Bounded), schema(Base)) == [("$.number", "maxLength")]


@pytest.mark.parametrize(
    ("reader", "writer", "kinds"),
    [
        ({}, {"type": "string"}, []),
        ({"type": "string"}, {}, ["type"]),
        (False, {"type": "string"}, ["not allowed"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}},
         {"type": "object", "additionalProperties": {"type": "string"}}, ["type"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}},
         {"type": "object"}, ["type"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}]},
         {"type": "array", "prefixItems": [{"type": "string"}]}, ["type"]),
        ({"type": "array", "items": {"type": "integer"}}, {"type": "array"}, ["type"]),
        ({"type": ["string", "null"]}, {"type": "null"}, []),
        ({"const": 1}, {"enum": [1, 2]}, ["values"]),
        ({"enum": [1]}, {"type": "integer"}, ["values"]),
        ({"type": "string", "format": "date"}, {"type": "string"}, ["format"]),
        ({"type": "string", "x-new": 1}, {"type": "string"}, ["x-new"]),
        ({"type": "string", "title": "A"}, {"type": "string"}, []),
        ({"type": "object", "properties": {"a": {"type": "integer"}}},
         {"type": "object"}, ["type"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "string"},
         ["type"]),
        ({"anyOf": [{"type": "integer"}], "ge": 0}, {"type": "integer"}, ["ge"]),
        ({"anyOf": [{"type": "integer"}], "ge": 0},
         {"anyOf": [{"type": "integer"}], "ge": 0}, []),
        ({"anyOf": [{"type": "string", "maxLength": 3}], "maxLength": 5},
         {"type": "string", "maxLength": 4},
         ["maxLength", "maxLength of the union"]),
        ({"$ref": "#/$defs/A", "ge": 2, "$defs": {"A": {"enum": [1, 2]}}},
         {"$ref": "#/$defs/A", "$defs": {"A": {"enum": [1, 2]}}}, ["ge"]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, {"type": "integer"}, ["allOf"]),
    ],
)  # fmt: skip
def test_an_undecidable_comparison_is_a_fault(
    reader: Any, writer: Any, kinds: list[str]
) -> None:
    assert [fault.kind for fault in faults(reader, writer)] == kinds


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (str, Decimal),
        (dt.datetime, Decimal),
        (Decimal, Annotated[Decimal, Field(max_digits=4, decimal_places=2)]),
        (str, pydantic.Json[int]),
        (dict[str, int], dict[int, int]),
        (dict[str, int], dict[uuid.UUID, int]),
        (dict[str, int], dict[Literal["a"], int]),
        (dt.datetime, pydantic.NaiveDatetime),
        (dt.datetime, pydantic.FutureDatetime),
        (dt.date, pydantic.PastDate),
        (dt.time, Annotated[dt.time, Field(lt=dt.time(12))]),
        (dt.timedelta, Annotated[dt.timedelta, Field(gt=dt.timedelta(0))]),
        (dt.date | None, Annotated[dt.date | None, Field(le=dt.date(2000, 1, 1))]),
    ],
)
def test_types_that_look_alike_on_the_wire_differ_in_the_schema(
    old: Any, new: Any
) -> None:
    codec = PydanticCodec()
    assert faults(codec.schema(new), codec.schema(old))  # type: ignore[arg-type]
    for one in (old, new):
        assert faults(codec.schema(one), codec.schema(one)) == []  # type: ignore[arg-type]
