"""The codec for dataclasses, TypedDicts and pydantic models.

The only module that uses pydantic (the extra `typed`), imported when the first body
needs it. It validates in strict JSON mode: the lax one takes "yes" for True and numbers
for dates.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigurationError, DecodeError
from .codec import Codec, Misfit, from_json, to_json
from .exact_numbers import with_exact_numbers
from .kept_values import changes
from .marked_schema import Marked, marked

INSTALL = 'pip install "django_txmsg[typed]"'

#: Matches any number with a fraction or an exponent; may match more, never fewer.
_FRACTION = re.compile(rb"[:\[,\s][-\d]\d*[.eE]")
_DIGITS = ("max_digits", "decimal_places")
_NUMBERS = ("int", "float", "decimal", "bool")

_FIELD = re.compile(r"field_name='([^']+)'")


class PydanticCodec(Codec):
    """Reads and writes by pydantic's `TypeAdapter`."""

    def __init__(self) -> None:
        self._adapters: dict[Any, Any] = {}
        self._marked: dict[Any, Marked] = {}

    def handles(self, annotation: Any) -> bool:
        """Return whether pydantic can handle it.

        Raises ConfigurationError if pydantic is missing, or with pydantic's reason.
        """
        return self._adapter(annotation) is not None

    def decode(self, annotation: Any, body: bytes) -> Any:
        exactly = self._marks(annotation).decimals and _may_have_fractions(body)
        if exactly or _has_constants(body):
            return self._exactly(annotation, from_json(body), body)
        return self._validated(annotation, body)

    def decode_value(self, annotation: Any, value: Any) -> Any:
        return self._exactly(annotation, value, None)

    def _exactly(self, annotation: Any, value: Any, body: bytes | None) -> Any:
        """Validate a parsed body, or its bytes if their numbers need no exact
        reading."""
        marks = self._marks(annotation)
        exact = with_exact_numbers(value, marks.schema) if marks.decimals else value
        if exact is not value:
            try:
                return self._validated(annotation, to_json(exact))
            except Misfit:
                pass  # a union, perhaps, whose other member has a float there
        return self._validated(annotation, to_json(value) if body is None else body)

    def encode(self, annotation: Any, value: Any) -> bytes:
        adapter = self._adapter(annotation)
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
            marks = self._marks(annotation)
            wrong = [(marks.path(at), what) for at, what in found]
        if wrong:
            raise Misfit(wrong)
        return body

    def schema(self, annotation: Any) -> dict[str, Any] | None:
        from pydantic.json_schema import GenerateJsonSchema

        class Telling(GenerateJsonSchema):
            """Makes schemas differ where pydantic's own are the same."""

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

    def _validated(self, annotation: Any, body: bytes) -> Any:
        try:
            return self._adapter(annotation).validator.validate_json(body, strict=True)
        except ValueError as error:
            from pydantic_core import ValidationError

            if not isinstance(error, ValidationError):
                raise
            found = error.errors(
                include_url=False, include_context=False, include_input=False
            )
        if any(one["type"] == "json_invalid" for one in found):
            from_json(body)  # says so in our own words
        marks = self._marks(annotation)
        raise Misfit([(marks.path(one["loc"]), one["type"]) for one in found])

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
        from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

        try:
            adapter = TypeAdapter(annotation)
            adapter.rebuild(raise_errors=True)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            raise ConfigurationError(
                f"pydantic cannot read {annotation!r}: {error.message}"
            ) from error
        self._adapters[annotation] = adapter
        return adapter

    def _marks(self, annotation: Any) -> Marked:
        try:
            return self._marked[annotation]
        except KeyError:
            found = marked(self._adapter(annotation))
            return self._marked.setdefault(annotation, found)


def _may_have_fractions(body: bytes) -> bool:
    return body[:1] in b"-0123456789" or _FRACTION.search(body) is not None


def _has_constants(body: bytes) -> bool:
    """Return whether a body may contain constants of Python's JSON that are not
    JSON."""
    return b"NaN" in body or b"Infinity" in body
