"""The batches contained in the table of journeys, by its log, and whether that is still
true.

A settled batch does not change, unless its lake or its database is restored from a
backup: then rows may leave it (`amended`), or other rows may have its number. What
`erase` and `sweep --keep` remove from the archive they remove from the journeys, too.
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

#: The definition of a journey and its format. Journeys of another version are rebuilt.
VERSION = 3
#: Operations of the Delta library that do not change a table's content.
_HARMLESS = frozenset(["ADD COLUMN", "OPTIMIZE", "VACUUM START", "VACUUM END"])


class Standing(Enum):
    """What a run does with the existing journeys."""

    GOOD = "good"
    ANEW = "anew"
    OTHER = "other"
    """They belong to more services, or contain more than the queried databases: a
    replica that lags behind, or a backup whose archive has not run yet. They are left
    alone."""


@dataclass(frozen=True)
class Looked:
    """A table of the archive at one version of its log. `batches` has the last batch of
    each service whose rows are in the lake only."""

    lake_id: str
    version: int
    at: int
    """When that version's entry was made, in milliseconds: after a backup, a version
    may exist twice."""
    batches: Mapping[str, int]


#: The tables from which journeys are built, by name.
Tables = Mapping[str, Looked]


def batches(tables: Tables) -> dict[str, list[int]]:
    """Return only the last batches."""
    return {
        name: [last for _, last in sorted(one.batches.items())]
        for name, one in tables.items()
    }


def looked_at(log: WholeLog, name: str) -> Looked:
    """Read a table of the archive. For a service whose files do not all name their
    batches, or whose marks cannot be read, no batch counts as only in the lake."""
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
    """Return the log's entry about a service's journeys."""
    said = {name: asdict(one) for name, one in tables.items()}
    return {"version": VERSION, "service": service, "tables": said}


def brought(delta: DeltaTable, service: str) -> Tables:
    """Return the contents of a service's journeys, by the table's log; nothing if it
    has no entry, or if something else has changed them since."""
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
    """Return whether journeys built from `known` still match the archive."""
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
    """Return whether the batches of that version still have the same rows."""
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
    """Return the metadata that our own code added to the entry, or None."""
    return json.loads(entry["txmsg"]) if entry.get("txmsg") else None
