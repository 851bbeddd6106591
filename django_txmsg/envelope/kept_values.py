"""Finds values that a receiver would get in another form, without an error. Examples
are asterisks in place of a secret, a default in place of a field that is not written,
and text in place of a date.

This module does not compare containers by `==`: `==` treats True, 1 and 1.0 as equal,
and a dataclass may exclude a field. Pure: no Django, no I/O.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import Any

#: The path of the change, from the outside in, and a description of it.
Change = tuple[tuple[Any, ...], str]
#: A comparison of two values of a class: None if equal, else where they differ.
Found = Sequence[Change] | bool
Comparison = Callable[[Any, Any], Found]


class FieldName(str):
    """A step of a path: the name of a class's field. An error's text may contain this
    name, but no key of a dict, because a key may be personal data."""

    __slots__ = ()


def changes(sent: Any, read: Any) -> Sequence[Change]:
    """Return the places at which `read` differs from `sent`, in value or in type.
    `read` is the object that a receiver gets."""
    if sent is read:
        return ()
    kind: type = type(sent)
    arrived: Any = type(read)
    if kind is not arrived and not _will_do(sent, read):
        if kind is float and read is None and not math.isfinite(sent):
            return [((), "finite_number")]
        return [((), f"{kind.__name__} would arrive as {arrived.__name__}")]
    found = _comparison(arrived)(sent, read)
    if isinstance(found, bool):
        return () if found else [((), f"another {arrived.__name__} would arrive")]
    return found


def _will_do(sent: Any, read: Any) -> bool:
    """Return whether a value may arrive as another type than it has. An int may arrive
    as a float, and a subclass of str or of a number as its base class, because only the
    text or the number is sent. A generic model may arrive as an equal model."""
    arrived = type(read)
    if arrived is float:
        return type(sent) is int
    if isinstance(sent, bool) or not _replaces_its_value(sent):
        return False
    if arrived in _PLAIN:
        return isinstance(sent, arrived)
    # A generic model created without its parameters equals the same one with them:
    # pydantic's == compares the classes of models, too.
    return _is_model(arrived) and isinstance(read, type(sent)) and _equal(sent, read)


def _is_model(kind: type) -> bool:
    return hasattr(kind, "model_fields") and hasattr(kind, "__private_attributes__")


def _replaces_its_value(sent: Any) -> bool:
    """Return whether a value behaves like its plain text or number. All values do,
    except members of an Enum whose `str()` differs from their value. Members of
    Django's choices, IntEnum and StrEnum behave like their values."""
    if not isinstance(sent, enum.Enum) or isinstance(sent, int):
        return True
    return isinstance(sent, str) and str(sent) == sent.value


def _inside(
    steps: Iterable[Any], sent: Iterable[Any], read: Iterable[Any]
) -> Sequence[Change]:
    found: Sequence[Change] = ()
    for step, one, other in zip(steps, sent, read, strict=False):
        # The common case, without a call.
        if one is other or (
            type(one) is type(other) and type(one) in _ATOMS and one == other
        ):
            continue
        if inner := changes(one, other):
            found = [*found, *(((step, *at), what) for at, what in inner)]
    return found


def _equal(sent: Any, read: Any) -> bool:
    try:
        return bool(sent == read)
    except Exception:
        return False  # a class of the user's


def _same_decimal(sent: Any, read: Any) -> bool:
    return bool(sent == read and sent.same_quantum(read))


def _same_number(sent: Any, read: Any) -> bool:
    return bool(sent == read) or (math.isnan(sent) and math.isnan(read))


def _same_time(sent: Any, read: Any) -> bool:
    # The offset travels, the name of the zone does not.
    local = sent.replace(tzinfo=None) == read.replace(tzinfo=None)
    return bool(local and sent.utcoffset() == read.utcoffset())


def _same_items(sent: Any, read: Any) -> Found:
    if len(sent) != len(read):
        return False
    return _inside(count(), sent, read)


def _same_elements(sent: Any, read: Any) -> bool:
    own = {one: one for one in sent}
    return len(own) == len(read) and all(
        one in own and not changes(own[one], one) for one in read
    )


def _same_entries(sent: Any, read: Any) -> Found:
    if sent.keys() != read.keys():
        return False
    if not all(type(key) is str for key in sent) and not _same_elements(sent, read):
        return False
    return _inside(sent, sent.values(), map(read.__getitem__, sent))


def _same_attributes(names: Sequence[str], *, by_value: bool = False) -> Comparison:
    steps = [FieldName(one) for one in names]

    def values(of: Any) -> Iterable[Any]:
        # An attribute may be deleted, or not set yet.
        found = [getattr(of, one, _MISSING) for one in names]
        return map(_value_of, found) if by_value else found

    return lambda sent, read: _inside(steps, values(sent), values(read))


def _same_model(kind: Any) -> Comparison:
    """Return a function that compares two pydantic models, including private attributes
    and extra values."""
    names = [*kind.model_fields, *kind.__private_attributes__, "model_extra"]
    # With this option, fields hold the values of members, except defaults, which
    # pydantic does not validate.
    by_value = bool(kind.model_config.get("use_enum_values"))
    return _same_attributes(names, by_value=by_value)


def _value_of(one: Any) -> Any:
    return one.value if isinstance(one, enum.Enum) else one


def _same_secret(sent: Any, read: Any) -> Sequence[Change]:
    return () if _equal(sent, read) else [((), "masked_secret")]


def _same_object(sent: Any, read: Any) -> Found:
    return _same_entries(vars(sent), vars(read))


@cache
def _comparison(kind: Any) -> Comparison:
    """Return the function that compares two objects of a class."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _same_attributes([one.name for one in dataclasses.fields(kind)])
    if _is_model(kind):
        return _same_model(kind)
    if hasattr(kind, "get_secret_value"):
        return _same_secret
    for base in (dict, list, tuple, deque, set, frozenset):
        if issubclass(kind, base):
            return _PLAIN[base]
    if kind.__eq__ is object.__eq__ and hasattr(kind, "__dict__"):
        return _same_object
    return _equal


_MISSING = object()
#: Classes whose `==` is exact between two objects of the very same class.
_ATOMS = frozenset({str, int, bool, bytes, uuid.UUID, dt.date, dt.timedelta})
#: The types of JSON itself and of Python's built-ins.
_PLAIN: dict[type, Comparison] = {
    **dict.fromkeys(_ATOMS, _equal),
    float: _same_number,
    decimal.Decimal: _same_decimal,
    **dict.fromkeys((dt.datetime, dt.time), _same_time),
    dict: _same_entries,
    **dict.fromkeys((list, tuple, deque), _same_items),
    **dict.fromkeys((set, frozenset), _same_elements),
}
