"""Numbers for Decimals keep their digits: they are handed on as text.

pydantic reads a number's digits by way of a float, and `12345678901234567.89` becomes
`…568`. A marked JSON Schema tells where the Decimals are. Pure: no Django, no I/O.
"""

from __future__ import annotations

import decimal
from typing import Any

#: In a schema: a Decimal is read here.
MARK = "x-txmsg-decimal"


def with_exact_numbers(value: Any, schema: dict[str, Any]) -> Any:
    """Return a parsed body with each Decimal that is read as one turned to text; the
    very value where there is none."""
    return _Exact(schema.get("$defs", {})).walk(value, schema)


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
            tag = value.get(named["propertyName"])
            one = named["mapping"].get(tag) if isinstance(tag, str) else None
            return [] if one is None else [{"$ref": one}]
        unions = (schema.get(name, ()) for name in ("anyOf", "oneOf", "allOf"))
        return [one for union in unions for one in union]

    def _walk_object(self, value: dict[str, Any], schema: dict[str, Any]) -> Any:
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties")
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
