"""Keeps the digits of numbers that are read as Decimals, by passing them as text.

pydantic reads a number through a float, and `12345678901234567.89` becomes `…568`. A
marked JSON Schema shows where the Decimals are. Pure: no Django, no I/O.
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from typing import Any

#: Schema key: a Decimal is read here.
MARK = "x-txmsg-decimal"
#: Schema key of a field: the paths from which it is also read, besides its name.
ALIASES = "x-txmsg-aliases"


def with_exact_numbers(value: Any, schema: dict[str, Any]) -> Any:
    """Return a parsed body with each number that is read as a Decimal turned into text;
    the same object if there is none."""
    return _Exact(schema.get("$defs", {})).walk(value, schema)


def with_aliases(schema: Any) -> Any:
    """Return a schema in which each object lists its fields by their aliases too."""
    if isinstance(schema, list):
        return [with_aliases(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_aliases(one) for name, one in schema.items()}
    fields = found.get("properties")
    if isinstance(fields, dict):
        for field in list(fields.values()):
            paths = field.get(ALIASES, ()) if isinstance(field, dict) else ()
            for first, *rest in paths:
                inner = _within(rest, field)
                known = fields.get(first)
                if len(paths) > 1 or rest:
                    inner = {"allOf": [inner, *([known] if known else ())]}
                fields[first] = inner
    return found


def _within(path: Sequence[str | int], schema: Any) -> Any:
    """Return a schema whose value at a path has another schema."""
    for step in reversed(path):
        if isinstance(step, str):
            schema = {"properties": {step: schema}}
        else:
            schema = {"prefixItems": [*[{}] * step, schema]}
    return schema


class _Exact:
    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions

    def walk(self, value: Any, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return value
        while "$ref" in schema:
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        if MARK in schema:
            return str(value) if isinstance(value, decimal.Decimal) else value
        for member in self._members(value, schema):
            value = self.walk(value, member)
        if isinstance(value, dict):
            return self._walk_object(value, schema)
        if isinstance(value, list):
            return self._walk_array(value, schema)
        return value

    def _members(self, value: Any, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas of a union: the one that the value names, or all."""
        named = schema.get("discriminator")
        if named is not None and isinstance(value, dict):
            # The mapping has numbers as text.
            one = named["mapping"].get(str(value.get(named["propertyName"])))
            if one is not None:
                return [{"$ref": one}]
        unions = (schema.get(name, ()) for name in ("anyOf", "oneOf", "allOf"))
        return [one for union in unions for one in union]

    def _walk_object(self, value: dict[str, Any], schema: dict[str, Any]) -> Any:
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties")
        if "patternProperties" in schema:
            others = {"allOf": list(schema["patternProperties"].values())}
        changed = {}
        for name, one in value.items():
            exact = self.walk(one, fields.get(name, others))
            if exact is not one:
                changed[name] = exact
        return value | changed if changed else value

    def _walk_array(self, value: list[Any], schema: dict[str, Any]) -> Any:
        first = schema.get("prefixItems", [])
        rest = schema.get("items")
        exact = [
            self.walk(one, first[index] if index < len(first) else rest)
            for index, one in enumerate(value)
        ]
        same = all(new is old for new, old in zip(exact, value, strict=True))
        return value if same else exact
