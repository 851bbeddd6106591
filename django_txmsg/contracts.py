"""The contract of this service, and the breaking changes of the contract.

The contract is an AsyncAPI 3.0 document. Its channels are destinations, its receive
operations are stages, and its send operations are declared `Destination`s. Each message
in the contract is a type with its JSON Schema.

A change is breaking in two cases: new code cannot read messages that are already on
their way, or old code (of other services or of running processes) cannot read new
messages. This module also finds rows that still wait for a destination or a type which
the contract no longer has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from django.db.models import Q

from . import codecs, conf, wire
from .envelope import message_type as message_types
from .envelope.message_type import declaration
from .envelope.schema_reader import Fault, faults
from .envelope.typed_body import BodyType, members
from .errors import ConfigurationError
from .models import DeadLetter, InboxMessage, OutboxMessage, QueueMessage
from .models.dead_letter import Resolution
from .models.outbox import PENDING
from .models.queue import queue_name
from .sending import destination
from .stages import all_stages

#: The two directions, as reported.
OLD_MESSAGES = "new code cannot read messages that are on their way"
OLD_READERS = "running code cannot read the new messages"
#: Of what the contract no longer has.
WAITS = "rows still wait for it"

# The committed contract: the file in the repository.


def path(given: str | None = None) -> Path:
    """Return the path of the contract's file: `given`, or TXMSG["CONTRACT"], or
    asyncapi.json in BASE_DIR."""
    return Path(given) if given else codecs.contract_path()


def read(file: Path) -> Contract:
    """Return the contract in a file. Raises ConfigurationError if the file cannot be
    read."""
    try:
        found: Contract = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"There is no contract at {file}. Write it with: manage.py txmsg "
            f"contracts export"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}.") from error
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict) or "asyncapi" not in found:
        raise ConfigurationError(f"{file} is not an AsyncAPI document.")
    return found


def write(file: Path, contract: Contract) -> bool:
    """Write the contract. Returns whether the file has changed."""
    content = text(contract)
    if file.exists() and file.read_text("utf-8") == content:
        return False
    file.write_text(content, "utf-8")
    return True


#: The version of AsyncAPI, and of JSON Schema in it.
ASYNCAPI = "3.0.0"
SCHEMA_FORMAT = "application/schema+json;version=draft-2020-12"

#: Keys of a message: the version of its type, and the oldest version that can read it.
VERSION, READABLE_FROM = "x-txmsg-version", "x-txmsg-readable-from"
#: The schemas of all older versions, by version. Bodies of each may still be on their
#: way. And readability is not transitive: if each version can read the next, the first
#: still need not be able to read the last.
READERS = "x-txmsg-readers"
#: The older versions whose bodies the exported code cannot read. The export accepted
#: these breaks, so `check` does not report them again.
UNREADABLE = "x-txmsg-unreadable"

Contract = dict[str, Any]


def build(committed: Contract | None = None) -> Contract:
    """Return the contract of all stages and destinations that this process declares.

    `committed` is the previous contract. Its schemas show which old versions of a type
    can read the type's new version. Raises ConfigurationError if no codec handles a
    type, or if two different types have one name.
    """
    return _Builder(committed or {}).build()


def text(contract: Contract) -> str:
    """Return the contract as text for its file. Equal contracts give equal texts."""
    return json.dumps(contract, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class _Builder:
    def __init__(self, committed: Contract) -> None:
        self._known = _messages(committed)
        self._messages: Contract = {}
        self._classes: dict[str, type] = {}
        self._channels: Contract = {}
        self._operations: Contract = {}

    def build(self) -> Contract:
        for one in destination.declared():
            types = codecs.reader(one.body).types
            self._operate("send", f"send.{one}", str(one), types)
        for stage in all_stages():
            if wire.is_task(stage.destination):
                continue  # no other service sends what this one enqueues
            reader = stage.reader
            self._operate(
                "receive",
                f"receive.{stage.name}",
                stage.destination,
                () if reader is None else reader.types,
            )
        service = conf.get().SERVICE
        contract: Contract = {
            "asyncapi": ASYNCAPI,
            "info": {"title": service, "version": "1.0.0"},
            "defaultContentType": wire.JSON,
            "channels": self._channels,
            "operations": self._operations,
            "components": {"messages": self._messages},
        }
        # Of a type that is only sent, `check` has reported no break of old bodies.
        for name in _named(contract, "receive"):
            if unreadable := _unreadable(name, self._messages[name]):
                self._messages[name][UNREADABLE] = unreadable
        return contract

    def _operate(
        self, action: str, name: str, address: str, types: tuple[BodyType, ...]
    ) -> None:
        channel = self._channels.setdefault(
            address, {"address": address, "messages": {}}
        )
        operation = self._operations.setdefault(
            name,
            {"action": action, "channel": {"$ref": _pointer("channels", address)}},
        )
        for message, one in _forms(address, types):
            channel["messages"][message] = {
                "$ref": _pointer("components", "messages", message)
            }
            place = {"$ref": _pointer("channels", address, "messages", message)}
            named = operation.setdefault("messages", [])
            if place not in named:
                named.append(place)
            self._describe(message, one)

    def _describe(self, name: str, body: BodyType) -> None:
        described: Contract = {"name": name, "contentType": wire.JSON}
        schema: Contract | None = {"type": "null"}
        if body.annotation is not type(None):
            schema = body.codec.schema(body.annotation)
        if schema is not None:
            within = _pointer("components", "messages", name, "payload", "schema")
            described["payload"] = {
                "schemaFormat": SCHEMA_FORMAT,
                "schema": _rooted(schema, within),
            }
        if body.name:
            older = self._older(body)
            oldest = self._oldest_reader(body, schema, older)
            described[VERSION] = body.version
            described[READABLE_FROM] = oldest
            if older:
                described[READERS] = older
            described["headers"] = {
                "type": "object",
                "properties": {wire.TYPE: {"type": "string"}},
            }
        same = self._classes.setdefault(name, body.cls) is body.cls
        known = self._messages.setdefault(name, described)
        # A class may have another description elsewhere, but no other fields.
        same = same and _alike(schema_of(known), schema)
        if body.name and known != described and not same:
            raise ConfigurationError(
                f"Two types of messages with different schemas or versions are named "
                f"{name!r}. Give one of them another name: @message_type(…)."
            )

    def _older(self, body: BodyType) -> Contract:
        """Return the schemas of a type's earlier versions, as the committed contract
        lists them."""
        known = self._known.get(body.name, {})
        version, schema = known.get(VERSION, 1), schema_of(known)
        readers: Contract = known.get(READERS, {})
        older = {one: readers[one] for one in readers if int(one) < body.version}
        if schema is not None and version < body.version:
            was = _pointer("components", "messages", body.name, "payload", "schema")
            within = _pointer("components", "messages", body.name, READERS)
            older[str(version)] = _rooted(schema, f"{within}/{version}", was)
        return older

    def _oldest_reader(
        self, body: BodyType, schema: Contract | None, older: Contract
    ) -> int:
        """Return the oldest version that can read the bodies which this code sends.
        This is the declared `readable_from`. If none is declared, this is the oldest
        version since which all changes are compatible. A change without a new version
        can only raise it: messages with this version are on their way already."""
        known = self._known.get(body.name, {})
        if not known or declaration(body.cls).readable_from is not None:
            return body.oldest_reader
        least: int = 1
        if known.get(VERSION, 1) == body.version:
            least = known.get(READABLE_FROM, body.version)
            was = _pointer("components", "messages", body.name, "payload", "schema")
            if schema is None or _rooted(schema, was) == schema_of(known):
                return least
        oldest = body.version
        while oldest > least and (reader := older.get(str(oldest - 1))):
            if schema is None or faults(reader, schema, ours=True):
                break
            oldest -= 1
        return oldest


def _forms(address: str, types: tuple[BodyType, ...]) -> Iterator[tuple[str, BodyType]]:
    """Yield the messages of these types, each with its name. The null of `cls | None`
    is a message too. So each channel shows whether it may have a null body."""
    for one in types:
        if not one.name:
            yield f"{address.replace(':', '.')}.body", one
            continue
        for form in members(one.annotation):
            if form is type(None):
                yield f"{one.name}.null", BodyType(form, one.codec)
            else:
                yield one.name, replace(one, annotation=form)


def _alike(one: Contract | None, other: Contract | None) -> bool:
    """Return whether each schema accepts the bodies of the other."""
    if one is None or other is None:
        return one is other
    return not faults(one, other) and not faults(other, one)


def _unreadable(name: str, message: Contract) -> list[int]:
    """Return the older versions whose bodies this code cannot read."""
    schema = schema_of(message)
    return sorted(
        int(version)
        for version, other in message.get(READERS, {}).items()
        if schema is not None
        and _old_faults(name, schema, message[VERSION], other, int(version))
    )


def _old_faults(
    name: str, schema: Contract, now: int, other: Contract, version: int
) -> list[Fault]:
    """Return why this code, with version `now`, cannot read bodies of an earlier
    version. An upgrader may change a body in any way, so it counts as able to."""
    if message_types.needed(name, version, now):
        return []
    return faults(schema, other)


def schema_of(message: Contract) -> Contract | None:
    """Return the JSON Schema of a message; None if its codec has none."""
    found: Contract | None = message.get("payload", {}).get("schema")
    return found


def _pointer(*names: str) -> str:
    escaped = [name.replace("~", "~0").replace("/", "~1") for name in names]
    return "#/" + "/".join(escaped)


def _rooted(schema: Any, within: str, was: str = "#") -> Any:
    """Return a schema whose references begin with `within` instead of `was`, so that
    they are valid in the whole document."""
    if isinstance(schema, dict):
        return {
            key: within + value.removeprefix(was)
            if key == "$ref" and isinstance(value, str) and value.startswith(was)
            else _rooted(value, within, was)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_rooted(one, within, was) for one in schema]
    return schema


class Change(NamedTuple):
    """One breaking change: where it is, what has changed, and what breaks."""

    where: str
    what: str
    breaks: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.breaks}"


def breaking(committed: Contract, current: Contract) -> list[Change]:
    """Return the changes from `committed` to `current` that break other code."""
    return [
        *_received(committed, current),
        *_sent(committed, current),
        *_bodies(committed, current),
    ]


def _received(old: Contract, new: Contract) -> Iterator[Change]:
    now = _of_operations(new, "receive")
    for channel, types in _of_operations(old, "receive").items():
        if channel not in now:
            yield Change(channel, "no stage consumes it any more", OLD_MESSAGES)
            continue
        if not now[channel]:
            continue  # a handler that takes every message
        gone = sorted(types - now[channel])
        for name in gone:
            yield Change(channel, f"no stage takes {name} any more", OLD_MESSAGES)
        if not types:
            what = "its stage took every message, and now takes typed ones only"
            yield Change(channel, what, OLD_MESSAGES)


def _sent(old: Contract, new: Contract) -> Iterator[Change]:
    before = _of_operations(old, "send")
    for channel, types in _of_operations(new, "send").items():
        if channel not in before:
            continue
        for name in sorted(types - before[channel]):
            yield Change(channel, f"{name} is sent to it now", OLD_READERS)


def _bodies(old: Contract, new: Contract) -> Iterator[Change]:
    received, sent = _named(new, "receive"), _named(new, "send")
    for name, message in _messages(new).items():
        before = _messages(old).get(name)
        if before is None:
            continue
        was, now = before.get(VERSION, 1), message.get(VERSION, 1)
        if now < was:
            yield Change(name, f"version {was} has become {now}", OLD_READERS)
            continue
        schema = schema_of(message)
        if schema is None:
            continue
        found: dict[tuple[Fault, str], None] = {}  # each once, in order
        accepted = before.get(UNREADABLE, ())
        oldest = message.get(READABLE_FROM, 1)
        if now == was:  # messages have the old number until the next export
            oldest = min(oldest, before.get(READABLE_FROM, 1))
        for version, other in _versions(before, was):
            if name in received and version not in accepted:
                here = _old_faults(name, schema, now, other, version)
                found |= dict.fromkeys((f, OLD_MESSAGES) for f in here)
            if name in sent and oldest <= version:
                there = faults(other, schema, ours=True)
                found |= dict.fromkeys((f, OLD_READERS) for f in there)
        for fault, breaks in found:
            yield Change(name, f"{fault.path}: {fault.kind}", breaks)


def _versions(message: Contract, version: int) -> Iterator[tuple[int, Contract]]:
    """Yield the versions of a message for which the contract has a schema, each with
    that schema, the newest version first."""
    schema = schema_of(message)
    if schema is not None:
        yield version, schema
    for older, one in sorted(
        message.get(READERS, {}).items(), key=lambda item: -int(item[0])
    ):
        yield int(older), one


def _of_operations(contract: Contract, action: str) -> dict[str, set[str]]:
    """Return the messages of all operations with this action, by channel."""
    found: dict[str, set[str]] = {}
    for operation in contract.get("operations", {}).values():
        if operation["action"] == action:
            channel = _last(operation["channel"]["$ref"])
            names = {_last(one["$ref"]) for one in operation.get("messages", ())}
            found.setdefault(channel, set()).update(names)
    return found


def _named(contract: Contract, action: str) -> set[str]:
    return set().union(*_of_operations(contract, action).values())


def _messages(contract: Contract) -> dict[str, Contract]:
    found: dict[str, Contract] = contract.get("components", {}).get("messages", {})
    return found


def _last(pointer: str) -> str:
    return pointer.rpartition("/")[2].replace("~1", "/").replace("~0", "~")


def waiting(committed: Contract, current: Contract, using: str) -> Iterator[Change]:
    """Yield each entry that the contract no longer has although rows still wait for
    it."""
    now = current["channels"]
    for channel in committed.get("channels", {}):
        if channel not in now:
            yield from _rows(channel, Q(destination=channel), using)
            queue = QueueMessage.objects.using(using).filter(
                queue=queue_name(channel, None)
            )
            yield from _counted(channel, "in the embedded broker", queue)
    here = {one.name for one in all_stages()}
    for operation in committed.get("operations", {}):
        kind, _, stage = operation.partition(".")
        if kind == "receive" and stage not in here:
            rows = InboxMessage.objects.using(using).filter(
                stage=stage, due_at__isnull=False
            )
            yield from _counted(f"stage {stage}", "parked", rows)
    types = current["components"]["messages"]
    for name in committed.get("components", {}).get("messages", {}):
        if name not in types:
            begins = Q(**{f"headers__{wire.TYPE}__startswith": f"{name};"})
            yield from _rows(name, begins, using)


def _rows(where: str, condition: Q, using: str) -> Iterator[Change]:
    pending = OutboxMessage.objects.using(using).filter(PENDING, condition)
    yield from _counted(where, "pending in the outbox", pending)
    parked = InboxMessage.objects.using(using).filter(condition, due_at__isnull=False)
    yield from _counted(where, "parked", parked)
    dead = DeadLetter.objects.using(using).filter(condition, resolution=Resolution.OPEN)
    yield from _counted(where, "open dead letters", dead)


def _counted(where: str, what: str, rows: Any) -> Iterator[Change]:
    count = rows.count()
    if count:
        yield Change(where, f"{count} {what}", WAITS)
