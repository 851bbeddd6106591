"""Up to which batches the table of journeys goes, as its log tells, and whether that is
still so.

A settled batch does not change, unless its lake or its database comes from a backup:
then rows may leave it (`amended`), or other rows may have its number. What `erase` and
`sweep --keep` take out of the archive they take out of the journeys, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from deltalake import DeltaTable

from ..laketable import app_name
from .reading import WholeLog

#: What a journey is, and how it is told. Those of another version are made anew.
VERSION = 2
#: What the Delta library does with a table without changing what is in it.
_HARMLESS = frozenset(["ADD COLUMN", "OPTIMIZE", "VACUUM START", "VACUUM END"])


class Standing(Enum):
    """What a run makes of the journeys that are there."""

    GOOD = "good"
    ANEW = "anew"
    OTHER = "other"
    """They are of more services, or know more than the databases that are asked: a
    replica that is behind, or a backup whose archive has not run yet. Let them be."""


@dataclass(frozen=True)
class Looked:
    """A table of the archive at some version of its log: each service's last batch that
    is in the lake alone."""

    lake_id: str
    version: int
    at: int
    """When that version's entry was made, in milliseconds: a version may come twice,
    after a backup."""
    batches: Mapping[str, int]


#: The tables that journeys are made of, by name.
Tables = Mapping[str, Looked]


def batches(tables: Tables) -> dict[str, list[int]]:
    """Return the last batches alone."""
    return {
        name: [last for _, last in sorted(one.batches.items())]
        for name, one in tables.items()
    }


def looked_at(log: WholeLog, name: str) -> Looked:
    """Look at a table of the archive. Of a service whose files do not all say their
    batches, or whose marks cannot be read, none is in the lake alone."""
    delta, named = log.files_of(name)
    services = [one.service for one in log.live]
    if delta is None:
        return Looked("", 0, 0, dict.fromkeys(services, 0))
    [entry] = delta.history(1)
    lake_id = str(delta.metadata().id)
    silent = {one.service for one in named if one.batches is None}
    last = {
        one: 0
        if one in silent
        else min(
            log.settled.get((one, name, lake_id), 0),
            delta.transaction_version(app_name("archive", one, name)) or 0,
        )
        for one in services
    }
    return Looked(lake_id, entry["version"], entry["timestamp"], last)


def told(service: str, tables: Tables) -> dict[str, Any]:
    """Return what the log is to say of the journeys that a service keeps."""
    said = {name: asdict(one) for name, one in tables.items()}
    return {"version": VERSION, "service": service, "tables": said}


def brought(delta: DeltaTable, service: str) -> Tables:
    """Return what the journeys of a service are made of, by the table's log; nothing if
    it does not say, or somebody else has changed them since."""
    for entry in delta.history():
        said = _said(entry)
        if said is None and entry["operation"] not in _HARMLESS:
            return {}
        mine = (said or {}).get("journeys", {})
        if mine.get("service") == service:
            tables = mine["tables"] if mine["version"] == VERSION else {}
            return {name: Looked(**one) for name, one in tables.items()}
    return {}


def stands(log: WholeLog, known: Tables, present: Tables) -> Standing:
    """Return whether journeys that are made of `known` are those of the archive now."""
    if not known:
        return Standing.ANEW
    ours = {one.service for one in log.live}
    theirs = {service for one in known.values() for service in one.batches}
    if ours != theirs:
        return Standing.OTHER if ours < theirs else Standing.ANEW
    standing = Standing.GOOD
    for name, now in present.items():
        then = known[name]
        if not any(then.batches.values()):
            continue
        delta, _ = log.files_of(name)
        if delta is None or then.lake_id != now.lake_id or not _as_it_was(delta, then):
            return Standing.ANEW
        if any(then.batches[one] > now.batches[one] for one in ours):
            standing = Standing.OTHER
    return standing


def _as_it_was(delta: DeltaTable, then: Looked) -> bool:
    """Return whether no batch that was seen then has lost or won a row since."""
    count = delta.version() - then.version + 1
    entries = delta.history(count) if count > 0 else []
    if not entries or (entries[-1]["version"], entries[-1]["timestamp"]) != (
        then.version, then.at,
    ):  # fmt: skip
        return False
    return not any(_changes(one, then.batches) for one in entries[:-1])


def _changes(entry: Mapping[str, Any], seen: Mapping[str, int]) -> bool:
    said = _said(entry)
    if said is None:
        return entry["operation"] not in _HARMLESS
    if "amended" not in said:
        return False
    last = seen.get(said["service"], 0)
    return any(low <= last for low, _ in said["touched"])


def _said(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what our own code has said of its entry."""
    return json.loads(entry["txmsg"]) if entry.get("txmsg") else None
