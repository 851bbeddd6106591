"""Facts about a type beyond pydantic's validation: where its Decimals are, and which
parts of an error's path are the type's own names.

Imported only where pydantic is. No Django, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .exact_numbers import ALIASES, MARK, with_aliases
from .kept_values import FieldName

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

    `decimals` says whether there are any.
    """

    schema: dict[str, Any]
    decimals: bool

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the type's fields and of the classes in it."""
        return frozenset(_names(self.schema)) | _KINDS

    def path(self, location: tuple[Any, ...]) -> str:
        """Return the path of an error without names that were only in the body."""
        steps = (
            str(one)
            if isinstance(one, int | FieldName) or one in self.names
            else HIDDEN
            for one in location
        )
        return ".".join(steps) or "$"


def marked(adapter: Any) -> Marked:
    """Return the marked schema of a pydantic adapter's type."""
    from pydantic.errors import PydanticInvalidForJsonSchema
    from pydantic.json_schema import GenerateJsonSchema

    seen = {"decimals": False}

    class Marking(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> Any:
            seen["decimals"] = True
            return {MARK: True}

        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
            return {}

        def model_field_schema(self, schema: Any) -> Any:
            return _aliased(super().model_field_schema(schema), schema)

        def dataclass_field_schema(self, schema: Any) -> Any:
            return _aliased(super().dataclass_field_schema(schema), schema)

        def typed_dict_field_schema(self, schema: Any) -> Any:
            return _aliased(super().typed_dict_field_schema(schema), schema)

    try:
        # By field names: aliases, of which there may be many, are listed separately.
        schema = adapter.json_schema(schema_generator=Marking, by_alias=False)
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
