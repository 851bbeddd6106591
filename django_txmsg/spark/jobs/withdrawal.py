"""A refused batch leaves the lake whole, and its rows that differ are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..lakefile import hashes_of
from ..laketable import LakeTable
from ..ledger import Batch
from ..schemas import Column


def withdraw(place: LakeTable, app: str, batch: Batch) -> None:
    """Take a batch out of the log, if it is there: nothing of it was deleted."""
    delta = place.load()
    files = [one for one in place.named(delta) if batch.token in one.path]
    if delta is not None and files:
        place.commit(
            delta,
            (),
            replaced=files,
            metadata={"withdrawn": batch.token, "batch": batch.id},
            app=(f"{app}/{batch.token}", 1),
        )


def differences(
    place: LakeTable, batch: Batch, columns: Sequence[Column], here: Mapping[int, int]
) -> str:
    """Name the rows that are not as the lake has them; `here` are the checksums of
    those that the database has."""
    there: dict[int, int] = {}
    for one in place.named():
        if batch.token in one.path:
            path = f"{place.root}/{one.path}"
            for part, hashes in hashes_of(place.lake.files, path, columns):
                ids = part.column(part.schema.get_field_index("id")).to_pylist()
                there.update(zip(ids, hashes, strict=True))
    ids = sorted(
        one for one in there.keys() | here.keys() if there.get(one) != here.get(one)
    )
    listed = ", ".join(map(str, ids[:20])) + (", …" if len(ids) > 20 else "")
    return f"{len(ids)} rows differ: id {listed}."
