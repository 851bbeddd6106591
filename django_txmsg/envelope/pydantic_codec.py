"""The codec for dataclasses, TypedDicts and pydantic models, which pydantic reads.

The one home of pydantic (the extra `typed`), imported when a first body needs it. It
reads in strict JSON mode: the lax one takes "yes" for True and numbers for dates.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigurationError
from .codec import Codec, Misfit, from_json, to_json
from .exact_numbers import MARK, with_exact_numbers

INSTALL = 'pip install "django_txmsg[typed]"'

#: A number with a fraction or an exponent, where none is overlooked.
_FRACTION = re.compile(rb"[:\[,\s][-\d]\d*[.eE]|^\s*-?\d")
_DIGITS = ("max_digits", "decimal_places")
_NUMBERS = ("int", "float", "decimal", "bool")

_FIELD = re.compile(r"field_name='([^']+)'")


class PydanticCodec(Codec):
    """Reads and writes by pydantic's `TypeAdapter`."""

    def __init__(self) -> None:
        self._adapters: dict[Any, Any] = {}
        self._marked: dict[Any, dict[str, Any] | None] = {}

    def handles(self, annotation: Any) -> bool:
        """Return whether pydantic can make sense of it.

        Raises ConfigurationError where pydantic is missing, or says why not.
        """
        return self._adapter(annotation) is not None

    def decode(self, annotation: Any, body: bytes) -> Any:
        decimals = self._marked_schema(annotation) is not None and _FRACTION.search(
            body
        )
        if decimals or b"NaN" in body or b"Infinity" in body:
            return self._exactly(annotation, from_json(body), body)
        return self._validated(self._adapter(annotation), body)

    def decode_value(self, annotation: Any, value: Any) -> Any:
        return self._exactly(annotation, value, None)

    def _exactly(self, annotation: Any, value: Any, body: bytes | None) -> Any:
        """Validate a parsed body, or its bytes where they will do."""
        adapter, schema = self._adapter(annotation), self._marked_schema(annotation)
        exact = value if schema is None else with_exact_numbers(value, schema)
        if exact is not value:
            try:
                return self._validated(adapter, to_json(exact))
            except Misfit:
                pass  # a union, perhaps, whose other member has a float there
        return self._validated(adapter, to_json(value) if body is None else body)

    def encode(self, annotation: Any, value: Any) -> bytes:
        adapter = self._adapter(annotation)
        wrong: list[tuple[str, str]] = []
        options: dict[str, Any] = {"by_alias": True, "round_trip": True}
        try:
            # The adapter's own method looks up a dozen options first.
            body: bytes = adapter.serializer.to_json(value, warnings="error", **options)
        except ValueError as error:  # PydanticSerializationError is one
            # It names a field, and the value too.
            named = _FIELD.findall(str(error))
            wrong = [(field, "unexpected_type") for field in named]
            wrong = wrong or [("$", "unexpected_type")]
            try:
                body = adapter.dump_json(value, warnings="none", **options)
            except Exception:
                raise Misfit(wrong) from None
        self._validated(adapter, body)
        if wrong:
            raise Misfit(wrong)
        return body

    def schema(self, annotation: Any) -> dict[str, Any] | None:
        from pydantic.json_schema import GenerateJsonSchema

        class Telling(GenerateJsonSchema):
            """Tells apart what pydantic's own schemas leave alike."""

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

        adapter = self._adapter(annotation)
        found: dict[str, Any] = adapter.json_schema(schema_generator=Telling)
        return found

    def _validated(self, adapter: Any, body: bytes) -> Any:
        try:
            return adapter.validator.validate_json(body, strict=True)
        except ValueError as error:
            from pydantic_core import ValidationError

            if not isinstance(error, ValidationError):
                raise
            found = error.errors(
                include_url=False, include_context=False, include_input=False
            )
        if any(one["type"] == "json_invalid" for one in found):
            from_json(body)  # says so in our own words
        raise Misfit([(_path(one["loc"]), one["type"]) for one in found])

    def _adapter(self, annotation: Any) -> Any:
        try:
            return self._adapters[annotation]
        except (KeyError, TypeError):
            pass
        if find_spec("pydantic") is None:
            raise ConfigurationError(
                f"Typed messages need pydantic, which is not installed. Run: {INSTALL}"
            )
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        try:
            adapter = TypeAdapter(annotation)
            adapter.rebuild(raise_errors=True)
        except PydanticUserError as error:
            raise ConfigurationError(
                f"pydantic cannot read {annotation!r}: {error.message}"
            ) from error
        self._adapters[annotation] = adapter
        return adapter

    def _marked_schema(self, annotation: Any) -> dict[str, Any] | None:
        """Return the type's schema with its Decimals marked; None where it has none."""
        if annotation not in self._marked:
            from pydantic.errors import PydanticInvalidForJsonSchema
            from pydantic.json_schema import GenerateJsonSchema

            class Marking(GenerateJsonSchema):
                found = False

                def decimal_schema(self, schema: Any) -> Any:
                    type(self).found = True
                    return {MARK: True}

            try:
                schema = self._adapter(annotation).json_schema(schema_generator=Marking)
            except PydanticInvalidForJsonSchema:
                schema = None
            self._marked[annotation] = schema if Marking.found else None
        return self._marked[annotation]


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "$"
