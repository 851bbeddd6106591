"""Checks whether code with one JSON Schema can read the bodies that code with another
JSON Schema writes.

Pure: no Django, no I/O. If the comparison cannot decide, the result is "no". A wrong
"no" costs a developer some time, whereas a wrong "yes" loses messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

#: Bounds of a value: for the first group greater is narrower, for the second smaller.
_AT_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_AT_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
#: Keywords that require nothing.
_FREE = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "default", "deprecated", "description",
        "discriminator", "example", "examples", "externalDocs", "readOnly", "title",
        "writeOnly",
    }
)  # fmt: skip
#: Keywords that require nothing, or that are compared separately. For all other
#: keywords of the reader, the writer must have exactly the same.
_COMPARED = frozenset(
    {
        *_FREE, *_AT_LEAST, *_AT_MOST, "additionalProperties", "const", "enum", "items",
        "prefixItems", "properties", "required", "type",
    }
)  # fmt: skip


class Fault(NamedTuple):
    """A path at which the reader's schema rejects a body, and the kind of fault."""

    path: str
    kind: str


def faults(reader: Schema, writer: Schema, *, ours: bool = False) -> list[Fault]:
    """Return the places at which the reader's schema rejects bodies that the writer's
    schema permits.

    `ours` means that the writer uses this package. Such a writer writes every default,
    and writes no field that its schema lacks.
    """
    return list(_Comparison(reader, writer, ours).compare(reader, writer, "$"))


class _Comparison:
    def __init__(self, reader: Schema, writer: Schema, ours: bool) -> None:
        self._roots = reader, writer
        self._ours = ours
        self._open: set[tuple[int, int]] = set()
        #: The alternatives of a schema, by its id. `_open` has the ids of alternatives.
        self._found: dict[int, list[Any]] = {}

    def compare(self, reader: Any, writer: Any, path: str) -> Iterator[Fault]:
        reader = _resolved(reader, self._roots[0])
        writer = _resolved(writer, self._roots[1])
        both = id(reader), id(writer)
        if both in self._open:
            return  # a type that holds itself
        if isinstance(reader, Mapping) and isinstance(writer, Mapping):
            self._open.add(both)
        if reader is True or reader == {} or writer is False:
            return
        if reader is False:
            yield Fault(path, "not allowed")
            return
        if writer is True:
            writer = {}
        choices = self._choices(writer, self._roots[1])
        if choices:
            for one in choices:
                yield from self.compare(reader, one, path)
            return
        choices = self._choices(reader, self._roots[0])
        if choices:
            yield from self._one_of(choices, writer, path)
            return
        yield from self._plain(reader, writer, path)

    def _choices(self, schema: Schema, root: Schema) -> list[Any]:
        """Return the alternatives of a schema. Each also has the keywords that the
        schema has beside its alternatives."""
        if id(schema) in self._found:
            return self._found[id(schema)]
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            found = schema.get(name)
            if name == "$ref" and found:
                found = [{"$ref": found}]
            if found and (name != "allOf" or len(found) == 1):
                beside = {
                    key: value
                    for key, value in schema.items()
                    if key != name and key not in _FREE
                }
                both = [_both(_resolved(one, root), beside) for one in found]
                return self._found.setdefault(id(schema), both)
        return []

    def _one_of(self, choices: list[Any], writer: Any, path: str) -> Iterator[Fault]:
        found: list[list[Fault]] = []
        for one in choices:
            opened = set(self._open)
            found.append(list(self.compare(one, writer, path)))
            self._open = opened
            if not found[-1]:
                return
        # The closest alternative gives the most useful reason.
        best = min(found, key=lambda one: ("type" in {f.kind for f in one}, len(one)))
        yield from best

    def _plain(self, reader: Schema, writer: Schema, path: str) -> Iterator[Fault]:
        if not _types(writer) <= _wider(_types(reader)):
            yield Fault(path, "type")
            return
        yield from _values(reader, writer, path)
        yield from _bounds(reader, writer, path)
        yield from self._fields(reader, writer, path)
        yield from self._items(reader, writer, path)

    def _fields(self, reader: Schema, writer: Schema, path: str) -> Iterator[Fault]:
        read, written = reader.get("properties", {}), writer.get("properties", {})
        always = set(writer.get("required", ()))
        if self._ours:
            always |= {name for name, one in written.items() if "default" in one}
        for name in reader.get("required", ()):
            if name not in always:
                kind = "required" if name in written else "missing"
                yield Fault(f"{path}.{name}", kind)
        others = reader.get("additionalProperties", True)
        # Our writer adds no field to those that it declares, unless the schema says so.
        usual = not (self._ours and "properties" in writer)
        open_ended = writer.get("additionalProperties", usual) is not False
        if others is False and open_ended:
            yield Fault(path, "unknown fields")
        for name, one in written.items():
            if name in read:
                yield from self.compare(read[name], one, f"{path}.{name}")
            elif others is False:
                yield Fault(f"{path}.{name}", "unknown field")
            elif isinstance(others, Mapping):
                yield from self.compare(others, one, f"{path}.{name}")
        any_name = writer.get("additionalProperties", "properties" not in writer)
        if any_name is not False and "object" in _types(writer):
            for name in read.keys() - written.keys():
                yield from self.compare(read[name], any_name, f"{path}.{name}")
        if isinstance(others, Mapping) and "object" in _types(writer):
            # A writer that declares its fields adds no others.
            rest = writer.get("additionalProperties", bool(not written))
            if rest is not False:
                yield from self.compare(others, rest, f"{path}.*")

    def _items(self, reader: Schema, writer: Schema, path: str) -> Iterator[Fault]:
        first, written = reader.get("prefixItems", []), writer.get("prefixItems", [])
        for index in range(max(len(first), len(written))):
            one = first[index] if index < len(first) else reader.get("items", True)
            two = written[index] if index < len(written) else writer.get("items", True)
            yield from self.compare(one, two, f"{path}[{index}]")
        if "items" in reader and "array" in _types(writer):
            rest = writer.get("items", not written)
            yield from self.compare(reader["items"], rest, f"{path}[]")


def _values(reader: Schema, writer: Schema, path: str) -> Iterator[Fault]:
    known = _enumerated(reader)
    if known is None:
        return
    given = _enumerated(writer)
    if given is None or any(one not in known for one in given):
        yield Fault(path, "values")


def _bounds(reader: Schema, writer: Schema, path: str) -> Iterator[Fault]:
    for name in _AT_LEAST:
        if name in reader and writer.get(name, float("-inf")) < reader[name]:
            yield Fault(path, name)
    for name in _AT_MOST:
        if name in reader and writer.get(name, float("inf")) > reader[name]:
            yield Fault(path, name)
    for name in reader:
        if name not in _COMPARED and writer.get(name) != reader[name]:
            yield Fault(path, name)


def _enumerated(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found: list[Any] | None = schema.get("enum")
    return found


_ALL = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})


def _types(schema: Schema) -> frozenset[str]:
    given = schema.get("type")
    if given is None:
        values = _enumerated(schema)
        if values is not None:
            return frozenset(map(_type_of, values))
        return _ALL
    return frozenset([given] if isinstance(given, str) else given)


def _wider(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _type_of(value: object) -> str:
    for kind, name in (
        (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"),
        (list, "array"), (dict, "object"),
    ):  # fmt: skip
        if isinstance(value, kind):
            return name
    return "null"


def _both(one: Any, beside: Schema) -> Any:
    """Return a schema that requires what `one` and `beside` require."""
    if one is False:
        return False
    one = {} if one is True else one
    # Two different values of a keyword both hold. The second one is not compared, so it
    # must be equal.
    added = {
        f"{name} of the union" if name in one else name: value
        for name, value in beside.items()
        if name not in one or one[name] != value
    }
    return {**one, **added} if added else one


def _resolved(schema: Any, root: Schema) -> Any:
    """Follow a schema's references, up to one with other keywords beside it."""
    while isinstance(schema, Mapping) and schema.keys() - _FREE == {"$ref"}:
        # In a document, the type's name follows its own `$defs`.
        name = schema["$ref"].rpartition("/$defs/")[2]
        schema = root.get("$defs", {}).get(name, True)
    return schema
