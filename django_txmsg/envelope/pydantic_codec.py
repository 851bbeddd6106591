"""The codec for dataclasses, TypedDicts and pydantic models.

This is the only module that uses pydantic (the extra `typed`). pydantic is imported
when the first body needs it. The codec validates in strict JSON mode. The lax mode
accepts "yes" as True and numbers as dates. pydantic reads the number of a Decimal field
as a float, which would turn `12345678901234567.89` into `…568`. Therefore the codec
marks Decimal fields in the type's JSON Schema, and gives pydantic their numbers as
text.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ..errors import ConfigurationError, DecodeError
from ..lazy_imports import needs
from .codec import Codec, Misfit, from_json, to_json
from .kept_values import FieldName, changes

#: Schema key: a Decimal is read here.
MARK = "x-txmsg-decimal"
#: Schema key of a field: the paths from which it is also read, besides its name.
ALIASES = "x-txmsg-aliases"


def with_aliases(schema: Any) -> Any:
    """Return a schema in which each object also lists its fields under their
    aliases."""
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
    """Return a schema of objects and arrays in which the value at `path` has the schema
    `schema`."""
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
        """Return a parsed body in which the numbers of Decimal fields are text. Return
        the same object if there are no such numbers."""
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
        """Return the schemas of a union's members. If a discriminator in the value
        selects a member, return only the schema of that member."""
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


#: Replaces a part of a path that the type does not name: a key in a dict is a value.
HIDDEN = "*"
#: pydantic's labels for members of a union that have no name of their own.
_KINDS = frozenset(
    {
        "[key]", "bool", "bytes", "date", "datetime", "decimal", "enum", "float", "int",
        "none", "str", "time", "timedelta", "uuid",
    }
)  # fmt: skip


@dataclass
class Marked:
    """A type's JSON Schema with its Decimals marked.

    `decimals` says whether the type contains any Decimal.
    """

    schema: dict[str, Any]
    decimals: bool

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all fields and classes in the type."""
        return frozenset(_names(self.schema)) | _KINDS

    def path(self, location: tuple[Any, ...]) -> str:
        """Return the path of an error as text. Names that are in the body but not in
        the type are hidden."""
        steps = (
            str(one)
            if isinstance(one, int | FieldName) or one in self.names
            else HIDDEN
            for one in location
        )
        return ".".join(steps) or "$"


@cache
def _adapter(annotation: Any) -> Any:
    with needs("A typed message", "typed", "pydantic", error=ConfigurationError):
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    try:
        adapter = TypeAdapter(annotation)
        adapter.rebuild(raise_errors=True)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ConfigurationError(
            f"pydantic cannot read {annotation!r}: {error.message}"
        ) from error
    return adapter


@cache
def _marked(annotation: Any) -> Marked:
    """Return the marked schema of a type."""
    from pydantic.errors import PydanticInvalidForJsonSchema
    from pydantic.json_schema import GenerateJsonSchema

    seen = {"decimals": False}

    class Marking(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> Any:
            seen["decimals"] = True
            return {MARK: True}

        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
            return {}

        def generate_inner(self, schema: Any) -> Any:
            return _aliased(super().generate_inner(schema), schema)

    try:
        # By field names: aliases, of which there may be many, are listed separately.
        schema = _adapter(annotation).json_schema(
            schema_generator=Marking, by_alias=False
        )
    except PydanticInvalidForJsonSchema:
        schema = {}
    return Marked(with_aliases(schema), **seen)


def _aliased(found: Any, field: Any) -> Any:
    alias = field.get("validation_alias")
    if alias is None:
        return found
    paths = [[alias]] if isinstance(alias, str) else alias
    return {**found, ALIASES: paths if isinstance(paths[0], list) else [paths]}


def _names(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _names(one)
    elif isinstance(schema, dict):
        for name in ("properties", "$defs", "mapping"):
            if isinstance(schema.get(name), dict):
                yield from schema[name]
        if isinstance(schema.get("title"), str):
            yield schema["title"]
        for name, one in schema.items():
            if name not in ("const", "default", "enum", "examples"):
                yield from _names(one)


#: Matches any number with a fraction or an exponent; may match more, never fewer.
_FRACTION = re.compile(rb"[:\[,\s][-\d]\d*[.eE]")
_DIGITS = ("max_digits", "decimal_places")
_NUMBERS = ("int", "float", "decimal", "bool")
_TIMES = ("date", "time", "datetime", "timedelta")
_LIMITS = ("gt", "ge", "lt", "le", "now_op", "tz_constraint")

_FIELD = re.compile(r"field_name='([^']+)'")


class PydanticCodec(Codec):
    """Reads and writes bodies with pydantic's `TypeAdapter`."""

    def handles(self, annotation: Any) -> bool:
        """Return whether pydantic can handle the annotation.

        Raises ConfigurationError if pydantic is not installed, or if pydantic cannot
        read the annotation.
        """
        return _adapter(annotation) is not None

    def decode(self, annotation: Any, body: bytes) -> Any:
        marks = _marked(annotation)
        if b"NaN" in body or b"Infinity" in body:
            from_json(body)  # pydantic accepts these words, although they are not JSON
        if marks.decimals and (body[:1] in b"-0123456789" or _FRACTION.search(body)):
            # The numbers of Decimal fields are replaced by their texts, so that no
            # digit is lost.
            value = from_json(body)
            exact = _Exact(marks.schema.get("$defs", {})).walk(value, marks.schema)
            if exact is not value:
                try:
                    return self._validated(annotation, to_json(exact))
                except Misfit:
                    pass  # a union, perhaps, whose other member has a float there
        return self._validated(annotation, body)

    def encode(self, annotation: Any, value: Any) -> bytes:
        adapter = _adapter(annotation)
        wrong: list[tuple[str, str]] = []
        options: dict[str, Any] = {"by_alias": True, "round_trip": True}
        try:
            # The adapter's own method looks up a dozen options first.
            body: bytes = adapter.serializer.to_json(value, warnings="error", **options)
        except ValueError as error:  # PydanticSerializationError is one
            # It names a field, but also the value.
            named = _FIELD.findall(str(error))
            wrong = [(field, "unexpected_type") for field in named]
            wrong = wrong or [("$", "unexpected_type")]
            try:
                body = adapter.dump_json(value, warnings="none", **options)
            except Exception:
                raise Misfit(wrong) from None
        try:
            read = self.decode(annotation, body)
        except DecodeError:
            raise Misfit(wrong or [("$", "json_invalid")]) from None
        if not wrong and (found := changes(value, read)):
            marks = _marked(annotation)
            wrong = [(marks.path(at), what) for at, what in found]
        if wrong:
            raise Misfit(wrong)
        return body

    def schema(self, annotation: Any) -> dict[str, Any] | None:
        from pydantic.json_schema import GenerateJsonSchema
        from pydantic_core import to_jsonable_python

        class Telling(GenerateJsonSchema):
            """Generates JSON schemas with additional details. Pydantic alone generates
            the same schema for some different types, such as Decimals with different
            numbers of digits. The details make these schemas differ."""

            def generate_inner(self, schema: Any) -> Any:
                found = super().generate_inner(schema)
                if schema["type"] not in _TIMES:
                    return found
                limits = {k: schema[k] for k in _LIMITS if k in schema}
                return found | {
                    f"x-{k.replace('_', '-')}": to_jsonable_python(limits[k])
                    for k in limits
                }

            def decimal_schema(self, schema: Any) -> Any:
                found = super().decimal_schema(schema)
                digits = {k: schema[k] for k in _DIGITS if k in schema}
                for one in found.get("anyOf", [found]):
                    one.update({f"x-{k.replace('_', '-')}": digits[k] for k in digits})
                    if one.get("type") == "string":
                        one["format"] = "decimal"
                return found

            def dict_schema(self, schema: Any) -> Any:
                found = super().dict_schema(schema)
                keys = schema.get("keys_schema", {}).get("type")
                if keys in _NUMBERS:
                    found.setdefault("propertyNames", {"format": keys})
                return found

        adapter = _adapter(annotation)
        found: dict[str, Any] = adapter.json_schema(schema_generator=Telling)
        return found

    def _validated(self, annotation: Any, body: bytes) -> Any:
        try:
            return _adapter(annotation).validator.validate_json(body, strict=True)
        except ValueError as error:
            from pydantic_core import ValidationError

            if not isinstance(error, ValidationError):
                raise
            found = error.errors(
                include_url=False, include_context=False, include_input=False
            )
        if any(one["type"] == "json_invalid" for one in found):
            from_json(body)  # raises the error in our own words
        marks = _marked(annotation)
        raise Misfit([(marks.path(one["loc"]), one["type"]) for one in found])
