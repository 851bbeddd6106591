"""Data files of the lake: pyarrow writes them in a Spark task, and reads them.

The rows never enter the JVM. PySpark from PyPI has no file system for `s3://` and other
object stores. Each attempt to write a file uses another file name. If an attempt fails,
the lake's log does not list the file of this attempt, and `sweep` removes the file
later.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import types as t

from .errors import VerificationRefused, spoilt
from .rowhash import row_hashes
from .schemas import Column, Table, arrow_schema
from .storage import Place
from .tally import Tallying

#: Most open files of one task. Rows in the order of their ids need one or two at a
#: time.
MAX_OPEN = 64
#: Rows, and bytes, of a row group, which is written and read back as a unit.
GROUP_ROWS = 32_768
GROUP_BYTES = 64 << 20
_DAY = 86_400_000_000
_FIRST_DAY = dt.date(1970, 1, 1)
#: The day of a file's rows, and whether they are those with files of their own.
_Part = tuple[dt.date, bool]


#: The columns that no file has: the log has them.
PARTITIONS = ["service", "day"]


@dataclass(frozen=True)
class LakeFile:
    """A written and closed data file: its path within the table, and facts about its
    contents."""

    path: str
    service: str
    day: dt.date
    size: int
    rows: int
    #: When it was written, for its log entry.
    modified_ms: int = field(default=0, compare=False)
    #: The lowest and highest archive batch of its rows, if the log has them.
    batches: tuple[int, int] | None = None

    @classmethod
    def of(cls, facts: dict[str, Any]) -> LakeFile:
        """Return the file that a task has described by `facts()`."""
        day, batches = dt.date.fromisoformat(facts["day"]), facts["batches"]
        return cls(**facts | {"day": day, "batches": batches and tuple(batches)})

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a task to describe a file."""
        return asdict(self) | {"day": self.day.isoformat()}

    def reaches(self, after: int, until: int = 2**62) -> bool:
        """Return whether the file may have rows of the batches after `after`, up to and
        including `until`."""
        if self.batches is None:
            return True
        lowest, highest = self.batches
        return lowest <= until and highest > after


def directory_of(service: str, day: dt.date | None = None) -> str:
    """Return the directory of a service, or of one of its days. Unsafe characters of
    the service's name are replaced; only the log has the exact name. No two services
    share a directory, because `sweep` removes files by directory."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", service)
    if plain != service:
        plain += "-" + hashlib.sha256(service.encode()).hexdigest()[:8]
    return f"service={plain}" + (f"/day={day.isoformat()}" if day else "")


class DayFiles:
    """Writes batches of one service, into one file for each day.

    `clock` is either the column with the instant that determines a row's day, or one
    day for all rows. `apart` names a column. Rows in which this column is true are
    written into separate files, with counts in their footers.
    """

    def __init__(
        self,
        place: Place,
        table: str,
        service: str,
        clock: str | dt.date,
        name: str,
        apart: str = "",
    ) -> None:
        self.place, self.service = place, service
        self.files, self.root = place.files, f"{place.root}/{table}"
        self.clock, self.name, self.apart = clock, name, apart
        self.rows = 0
        self._open: dict[_Part, tuple[str, Any, Tallying]] = {}
        self._closed: list[LakeFile] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Small batches are buffered, and written together."""
        self.rows += batch.num_rows
        # A batch may itself be larger than a row group should be.
        step = max(1, batch.num_rows * GROUP_BYTES // max(batch.nbytes, GROUP_BYTES))
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
                self._flush()

    def close(self) -> list[LakeFile]:
        """Close all files and return them."""
        self._flush()
        for key in list(self._open):
            self._close(key)
        return self._closed

    def prove(self, table: Table | None) -> int:
        """Read the closed files back, and return the sum of the checksums of their
        rows. Raises VerificationRefused if the files do not have as many rows as were
        written. A table of results (None) has no checksums."""
        found = total = 0
        for one in self._closed:
            for batch in rows_of(self.files, f"{self.root}/{one.path}"):
                found += batch.num_rows
                total += checksum(batch, table)
        if found != self.rows:
            paths = ", ".join(one.path for one in self._closed)
            raise VerificationRefused(
                f"{self.rows} rows were written, and {found} are read back from "
                f"{paths}."
            )
        return total

    def _flush(self) -> None:
        """Write the buffered rows, grouped by day."""
        if not self._waiting_rows:
            return
        rows = pa.Table.from_batches(self._waiting)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        if isinstance(self.clock, dt.date):
            self._write((self.clock, False), rows)
            return
        days = pa.array(
            rows[self.clock].cast(pa.int64()).to_numpy() // _DAY, pa.int32()
        )
        unique = pc.unique(days)
        for number in unique.to_pylist():
            day = _FIRST_DAY + dt.timedelta(days=number)
            part = rows
            if len(unique) > 1:
                part = rows.filter(pc.equal(days, number))
            if not self.apart:
                self._write((day, False), part)
                continue
            apart = part[self.apart]
            self._write((day, True), part.filter(apart))
            self._write((day, False), part.filter(pc.invert(apart)))

    def _write(self, key: _Part, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if key not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            self.place.insist()
            directory = directory_of(self.service, key[0])
            path = (
                f"{directory}/{self.name}-{len(self._closed) + len(self._open)}.parquet"
            )
            self.files.create_dir(f"{self.root}/{directory}", recursive=True)
            writer = pq.ParquetWriter(
                f"{self.root}/{path}", rows.schema, filesystem=self.files,
                compression="zstd", compression_level=1,
                use_dictionary=[one for one in rows.schema.names if one not in _UNIQUE],
                write_statistics=True,
                # A flipped bit is found when its page is read.
                write_page_checksum=True,
            )  # fmt: skip
            self._open[key] = (path, writer, Tallying())
        _, writer, tallying = self._open[key]
        writer.write_table(rows)
        if key[1]:
            tallying.add(rows)

    def _close(self, key: _Part) -> None:
        path, writer, tallying = self._open.pop(key)
        if key[1]:
            writer.add_key_value_metadata(tallying.footer())
        writer.close()
        full = f"{self.root}/{path}"
        with (
            self.files.open_input_file(full) as written,
            pq.ParquetFile(written) as found,
        ):
            rows = found.metadata.num_rows
            # prove() converts the columns to their types before it compares the rows.
            # Spark does not, and cannot read a column whose type is another one.
            if not found.schema_arrow.equals(writer.schema):
                raise VerificationRefused(
                    f"{full} has other columns than were written."
                )
        info = self.files.get_file_info(full)
        at = int(info.mtime.timestamp() * 1000) if info.mtime else 0
        file = LakeFile(path, self.service, key[0], info.size, rows, at)
        self._closed.append(file)


#: The columns that mostly have a different value in each row: dictionary encoding would
#: save no space.
_UNIQUE = frozenset(
    ["id", "message_id", "headers", "body", "created_at", "due_at", "dispatched_at"]
)


def checksum(batch: pa.RecordBatch, table: Table | None) -> int:
    """Return the sum of the checksums of these archived rows."""
    if table is None:
        return 0
    return sum(sum(row_hashes(*one)) for one in kept_rows(batch, table))


def kept_rows(
    batch: pa.RecordBatch, table: Table
) -> Iterator[tuple[pa.RecordBatch, list[Column]]]:
    """Yield rows with the columns that the lake stored for them. A lake may store no
    bodies, and a file may be older than a column."""
    if not batch.num_rows:
        return
    there = [one for one in table.columns if one.name in batch.schema.names]
    bodies = [one for one in there if one.kind == "bytes"]
    if not any(batch.column(one.name).null_count for one in bodies):
        yield _cast(batch, there), there
        return
    missing = pc.is_null(batch.column(bodies[0].name))
    without = [one for one in there if one not in bodies]
    for rows, columns in (
        (batch.filter(pc.invert(missing)), there),
        (batch.filter(missing), without),
    ):
        if rows.num_rows:
            yield _cast(rows, columns), columns


def _cast(rows: pa.RecordBatch, columns: list[Column]) -> pa.RecordBatch:
    names = [one.name for one in columns]
    schema = pa.schema([one.arrow.with_nullable(True) for one in columns])
    return rows.select(names).cast(schema)


def rows_of(
    files: fs.FileSystem,
    path: str,
    names: Sequence[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches of limited size, with the columns `names` in
    this order, or all columns. Columns that the file does not have are left out.

    Raises SpoiltFile if the file is missing, or if its bytes have changed since it was
    written.
    """
    try:
        with files.open_input_file(path) as stream:
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            if names is not None:
                names = [one for one in names if one in parquet.schema_arrow.names]
            for group in range(parquet.num_row_groups):
                described = parquet.metadata.row_group(group)
                rows, size = described.num_rows, max(1, described.total_byte_size)
                most = max(1, min(GROUP_ROWS, rows * GROUP_BYTES // size))
                # A task has one core, and must not use the others.
                for batch in parquet.iter_batches(
                    batch_size=most,
                    row_groups=[group],
                    columns=names,
                    use_threads=False,
                ):
                    batch = _plain(batch)
                    rows -= batch.num_rows
                    yield batch if names is None else batch.select(names)
                # The header of a page has no checksum.
                if rows:
                    raise ValueError(
                        f"row group {group} does not have as many rows as it declares"
                    )
    except (OSError, pa.ArrowException, ValueError) as error:
        raise spoilt(path, error) from error


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without view types. The Delta library writes such types when it
    changes rows, but Arrow cannot filter them."""
    fields = [one.with_type(_VIEWS.get(one.type, one.type)) for one in batch.schema]
    return batch.cast(pa.schema(fields)) if fields != list(batch.schema) else batch


_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


#: Even for a file without any of the requested columns, the rows are counted.
_ANY = ["id", "run_id"]


def rows_as(
    files: fs.FileSystem, root: str, struct: t.StructType, named: Iterable[LakeFile]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files as batches of a table's current schema. A column that is
    newer than a file is null. Service and day are taken from the log."""
    schema = arrow_schema(struct)
    wanted = [name for name in schema.names if name not in PARTITIONS]
    for one in named:
        constants = {"service": one.service, "day": one.day}
        path = f"{root}/{one.path}"
        for batch in rows_of(files, path, wanted or _ANY):
            arrays = []
            for column in schema:
                place = batch.schema.get_field_index(column.name)
                if column.name in constants:
                    value = pa.scalar(constants[column.name], column.type)
                    arrays.append(pa.repeat(value, batch.num_rows))
                elif place < 0:
                    arrays.append(pa.nulls(batch.num_rows, column.type))
                else:
                    arrays.append(batch.column(place).cast(column.type))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def in_parts(named: Sequence[LakeFile], parts: int) -> list[LakeFile]:
    """Return the files in another order. The caller cuts the returned list into `parts`
    slices, one for each task, with the same number of files in each slice. Because of
    the order, all slices have about the same number of bytes."""
    by_size = sorted(named, key=lambda one: -one.size)
    return [one for first in range(parts) for one in by_size[first::parts]]
