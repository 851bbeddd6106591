"""The codec for dataclasses, TypedDicts and pydantic models, which pydantic reads.

The home of pydantic (the extra `typed`), imported when a first body needs it. It
reads in strict JSON mode: the lax one takes "yes" for True and numbers for dates.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigurationError, DecodeError
from .codec import Codec, Misfit, from_json, to_json
from .exact_numbers import with_exact_numbers
from .kept_values import not_kept
from .marked_schema import Marked, marked

INSTALL = 'pip install "django_txmsg[typed]"'

#: A number with a fraction or an exponent, where none is overlooked.
_FRACTION = re.compile(rb"[:\[,\s][-\d]\d*[.eE]|^\s*-?\d")
#: What pydantic writes for a secret.
_MASKED = b'"**********"'
_DIGITS = ("max_digits", "decimal_places")
_NUMBERS = ("int", "float", "decimal", "bool")

_FIELD = re.compile(r"field_name='([^']+)'")


class PydanticCodec(Codec):
    """Reads and writes by pydantic's `TypeAdapter`."""

    def __init__(self) -> None:
        self._adapters: dict[Any, Any] = {}
        self._marked: dict[Any, Marked] = {}

    def handles(self, annotation: Any) -> bool:
        """Return whether pydantic can make sense of it.

        Raises ConfigurationError where pydantic is missing, or says why not.
        """
        return self._adapter(annotation) is not None

    def decode(self, annotation: Any, body: bytes) -> Any:
        decimals = self._marks(annotation).decimals and _FRACTION.search(body)
        if decimals or _has_constants(body):
            return self._exactly(annotation, from_json(body), body)
        return self._validated(annotation, body)

    def decode_value(self, annotation: Any, value: Any) -> Any:
        return self._exactly(annotation, value, None)

    def _exactly(self, annotation: Any, value: Any, body: bytes | None) -> Any:
        """Validate a parsed body, or its bytes where they will do."""
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
            # It names a field, and the value too.
            named = _FIELD.findall(str(error))
            wrong = [(field, "unexpected_type") for field in named]
            wrong = wrong or [("$", "unexpected_type")]
            try:
                body = adapter.dump_json(value, warnings="none", **options)
            except Exception:
                raise Misfit(wrong) from None
        try:
            read = self._validated(annotation, body)
            if _has_constants(body):
                from_json(body)
        except DecodeError:
            raise Misfit(wrong or [("$", "json_invalid")]) from None
        wrong = wrong or self._not_kept(annotation, value, read, body)
        if wrong:
            raise Misfit(wrong)
        return body

    def _not_kept(
        self, annotation: Any, value: Any, read: Any, body: bytes
    ) -> list[tuple[str, str]]:
        """Return where pydantic has written something else without a word."""
        marks = self._marks(annotation)
        if not ((marks.floats and b"null" in body) or _MASKED in body):
            return []
        if _equal(value, read):
            return []
        write = self._adapter(annotation).serializer.to_python
        found = not_kept(write(value, warnings="none"), write(read, warnings="none"))
        return [(marks.path(location), kind) for location, kind in found]

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


def _equal(one: Any, other: Any) -> bool:
    """Return whether two objects of a user's are equal, as far as their class says."""
    try:
        return bool(one == other)
    except Exception:
        return False


def _has_constants(body: bytes) -> bool:
    """Return whether a body may have what Python's JSON has, and JSON has not."""
    return b"NaN" in body or b"Infinity" in body
