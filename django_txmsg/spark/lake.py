"""The lake: a directory with a marker, and tables in it.

A table consists of Parquet files and a Delta log. Only the files that the log names
belong to the table. Tasks write files with unique names (`lakefile`). Then the driver
adds all of them with one atomic log entry. Readers use the log, never a directory
listing.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import deltalake
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as t

from .engine import parallelism, spread
from .errors import EnvironmentFault, reason
from .lakefile import PARTITIONS, LakeFile, directory_of, in_parts, rows_as
from .schemas import LAKE_VERSION, arrow_schema
from .spec import LakeSpec
from .storage import MARKER, Place, insist_on, place_of, sync

_KEY = "txmsg"


class Overtaken(EnvironmentFault):
    """Another process has removed a file that was to be replaced, or has committed
    under the same name."""


class LakeTable:
    """A table of the lake: the Delta table at `<lake>/<name>`."""

    def __init__(self, place: Place, name: str, struct: t.StructType) -> None:
        self.place, self.name, self.struct = place, name, struct
        self.files = place.files
        self.root = f"{place.root}/{name}"
        #: For the Delta library.
        self.uri = Path(self.root).as_uri() if place.local else f"{place.uri}/{name}"
        self.options = dict(place.spec.storage_options) or None

    def load(self) -> DeltaTable | None:
        """Return the current version of the table. Returns None if the table does not
        exist.

        Raises EnvironmentFault if the table has a newer schema, or uses Delta features
        that this package does not support.
        """
        try:
            delta = DeltaTable(self.uri, storage_options=self.options)
        except TableNotFoundError:
            return None
        except (OSError, deltalake.exceptions.DeltaError) as error:
            raise EnvironmentFault(
                f"{self.uri} cannot be read: {reason(error)}."
            ) from error
        version = int(delta.metadata().configuration.get("txmsg.version", 0))
        if not version:
            raise EnvironmentFault(f"{self.uri} is a Delta table, but not one of ours.")
        if version > LAKE_VERSION:
            raise EnvironmentFault(
                f"{self.uri} has schema version {version}, and this django_txmsg knows "
                f"{LAKE_VERSION}: upgrade it."
            )
        features = set(delta.protocol().reader_features or ())
        if features & {"deletionVectors", "columnMapping"}:
            raise EnvironmentFault(
                f"{self.uri} uses {', '.join(sorted(features))}, which only a full "
                "Delta reader can honour. Rewrite the table without them."
            )
        return delta

    def existing(self) -> DeltaTable:
        """Return the current version of a table that is known to exist."""
        delta = self.load()
        assert delta is not None
        return delta

    def ensure(self) -> DeltaTable:
        """Create the table if it does not exist, add missing columns, and return the
        table."""
        delta = self.load()
        wanted = arrow_schema(self.struct)
        if delta is None:
            self.place.insist()
            delta = DeltaTable.create(
                self.uri,
                schema=wanted,
                mode="ignore",
                partition_by=PARTITIONS,
                name=self.name,
                configuration={
                    "txmsg.version": str(LAKE_VERSION),
                    # The log outlives erased rows, so it must not contain their
                    # contents.
                    "delta.dataSkippingStatsColumns": "batch_id",
                    # It lists the existing batches, so none may be removed.
                    "delta.setTransactionRetentionDuration": "interval 36500 days",
                },
                storage_options=self.options,
                raise_if_key_not_exists=False,
            )
            self._sync_log([0])
        present = {field.name for field in delta.schema().fields}
        fresh = [field for field in wanted if field.name not in present]
        if fresh:
            fields = deltalake.Schema.from_arrow(pa.schema(fresh)).fields
            delta.alter.add_columns(fields)
            delta = self.existing()
            self._sync_log([delta.version()])
        return delta

    def commit(
        self,
        delta: DeltaTable,
        files: Iterable[LakeFile],
        *,
        metadata: dict[str, Any],
        app: tuple[str, int] | None = None,
        replaced: Iterable[LakeFile] = (),
        same_rows: bool = False,
    ) -> None:
        """Add `files` to the table, and remove the `replaced` files, in one log entry.
        `delta` is the version that the caller has seen.

        `app` is the name and the number of the commit. `same_rows` means that `files`
        contain exactly the rows of the `replaced` files.

        Raises Overtaken if another process has committed under the same name since
        `delta` was loaded, or has removed one of the `replaced` files.
        """
        files, replaced = list(files), set(replaced)

        number = delta.transaction_version(app[0]) if app else None

        def usable(version: DeltaTable) -> bool:
            alone = not app or version.transaction_version(app[0]) == number
            return alone and (not replaced or replaced <= set(self.named(version)))

        before: int = delta.version()
        there = {f"{self.root}/{one.path}": one.size for one in files}
        insist_on(self.files, there)
        sync(self.files, self.place.root, there)
        # Its writer may have been killed before it synced this entry.
        self._sync_log([before])
        now = int(dt.datetime.now(dt.timezone.utc).timestamp() * 1000)
        actions: list[Any] = [_added(one, same_rows) for one in files]
        actions += [_removed(one, now, same_rows) for one in replaced]
        # The caller may have read the replaced files from an older version.
        tried, why = -1, "a file was replaced"
        while delta.version() != tried and usable(delta):
            try:
                delta.create_write_transaction(
                    actions,
                    mode="append",
                    schema=delta.schema(),
                    partition_by=PARTITIONS,
                    commit_properties=CommitProperties(
                        custom_metadata={_KEY: json.dumps(metadata)},
                        app_transactions=[Transaction(*app, None)] if app else None,
                        # The Delta library does not see what a merge has removed.
                        max_commit_retries=0,
                    ),
                )
                break
            except CommitFailedError as error:
                tried, why = delta.version(), reason(error)
                delta = self.ensure()
        else:
            raise Overtaken(
                f"{self.uri} was changed by another process ({why}). Run again."
            )
        after = self.existing()
        # One of these is ours; others may have committed at the same time.
        self._sync_log(range(before + 1, after.version() + 1))
        # Checked through the log, as every reader reads it: these very files, still
        # existing.
        named = {f"{self.root}/{one.path}" for one in self.named(after)}
        if missing := sorted(there.keys() - named):
            raise EnvironmentFault(
                f"{self.uri} should name {missing[0]}, but does not: the log of this "
                "table is another's, or the file was removed at once."
            )
        insist_on(self.files, there)

    def _sync_log(self, versions: Iterable[int]) -> None:
        log = f"{self.root}/_delta_log"
        paths = [f"{log}/{number:020}.json" for number in versions]
        sync(self.files, self.place.root, paths)

    def last(self, delta: DeltaTable, job: str, service: str) -> int:
        """Return the number of the last commit of a job for a service, under its
        present name or a former one. Returns 0 if there is none."""
        apps = (app_name(job, one, self.name) for one in self.place.names(service))
        return max(delta.transaction_version(one) or 0 for one in apps)

    def named(
        self, delta: DeltaTable | None = None, service: str = ""
    ) -> list[LakeFile]:
        """Return the files of `service` (by default, of all services) that the log
        names at the version `delta` (by default, the current version). A service has
        its present name, even if it had another name when it archived."""
        delta = delta or self.load()
        if delta is None:
            return []
        actions = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
        found = [_named(row, self.place.spec.former) for row in actions]
        return [one for one in found if not service or one.service == service]

    def of_batches(self, service: str, after: int, until: int) -> list[LakeFile]:
        """Return a service's files that may contain rows of the batches after `after`,
        up to and including `until`."""
        return [one for one in self.named(service=service) if one.reaches(after, until)]

    def read(
        self,
        spark: SparkSession,
        *,
        services: Sequence[str] = (),
        since: dt.date | None = None,
        named: Sequence[LakeFile] | None = None,
        columns: Sequence[str] = (),
    ) -> DataFrame:
        """Return the committed rows of these services, by default of all. `since` is
        the first day. `named` are the files of a version that was read before.
        `columns` are the requested columns, by default all.

        A column that is newer than a file is null. Service and day are taken from the
        log, not from directory names.
        """
        struct = self.struct
        if columns:
            struct = t.StructType([struct[name] for name in columns])
        chosen = [
            one
            for one in (self.named() if named is None else named)
            if (not services or one.service in services)
            and (since is None or one.day >= since)
        ]
        if not chosen:
            return spark.createDataFrame([], struct)
        if self.place.local:
            return self._read_by_spark(spark, struct, chosen)
        parts = min(len(chosen), 2 * parallelism(spark))
        rows = partial(rows_as, self.files, self.root, struct)
        return spread(spark, rows, in_parts(chosen, parts), struct, parts)

    def _read_by_spark(
        self, spark: SparkSession, struct: t.StructType, chosen: Sequence[LakeFile]
    ) -> DataFrame:
        inner = t.StructType([f for f in struct.fields if f.name not in PARTITIONS])
        frames = []
        for service in sorted({one.service for one in chosen}):
            paths = sorted(one.path for one in chosen if one.service == service)
            # The path is used literally, whatever characters the lake's own path has.
            reader = spark.read.schema(inner).option("__globPaths__", "false")
            reader = reader.option("parquet.page.verify-checksum.enabled", "true")
            frame = reader.parquet(
                *(f"{self.place.uri}/{self.name}/{one}" for one in paths)
            )
            path = sf.col("_metadata.file_path")
            # The lake's own address may contain a day, too.
            day = sf.regexp_extract(path, r"/day=([\d-]+)/[^/]*$", 1)
            known = {"service": sf.lit(service), "day": sf.to_date(day)}
            frames.append(frame.withColumns(known))
        return reduce(DataFrame.unionByName, frames).select(*struct.fieldNames())

    def vacuum(self, hours: int, *, dry_run: bool) -> list[str]:
        """Delete the files that were removed from the table more than `hours` hours
        ago."""
        vacuum = self.existing().vacuum
        return vacuum(hours, dry_run=dry_run, enforce_retention_duration=False)

    def orphans(self, service: str, before: dt.datetime) -> list[str]:
        """Return files of a service that are older than `before` and that the log has
        never named. Files of other services are left out, because they may belong to a
        running job. (The Delta library's own clean-up would delete files of other
        services, too.)"""
        delta = self.existing()
        would = partial(delta.vacuum, 0, dry_run=True, enforce_retention_duration=False)
        unnamed = set(would(full=True)) - set(would())  # which it has once named
        own = {
            one
            for name in self.place.names(service)
            for one in (directory_of(name), f"service={name}")
        }
        paths = [
            f"{self.root}/{path}"
            for path in sorted(unnamed)
            if (first := path.partition("/")[0]) in own or unquote(first) in own
        ]
        return [
            info.path
            for info in self.files.get_file_info(paths)
            if info.mtime is not None and info.mtime < before
        ]

    @contextmanager
    def discarding(self, service: str, names: Sequence[str]) -> Iterator[None]:
        """If the block fails, delete the files that the block has written, so that a
        full disk has room again. The block has written a file of this service if the
        file's name begins with one of `names`. Files that the log names are kept."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # The first error is the one to report.
                named = {f"{self.root}/{one.path}" for one in self.named()}
                own = f"{self.root}/{directory_of(service)}"
                below = fs.FileSelector(own, allow_not_found=True, recursive=True)
                for info in self.files.get_file_info(below):
                    unnamed = info.path not in named
                    if unnamed and info.base_name.startswith(tuple(names)):
                        self.files.delete_file(info.path)
            raise


def _added(file: LakeFile, same_rows: bool) -> AddAction:
    """Return the log action that adds a file. Readers use its statistics to skip
    files."""
    stats: dict[str, Any] = {"numRecords": file.rows}
    if file.batches is not None:
        low, high = file.batches
        stats |= {"minValues": {"batch_id": low}, "maxValues": {"batch_id": high}}
        stats["nullCount"] = {"batch_id": 0}
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=_partition(file),
        modification_time=file.modified_ms,
        data_change=not same_rows,
        stats=json.dumps(stats),
    )


def _removed(file: LakeFile, now_ms: int, same_rows: bool) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=not same_rows,
        deletion_timestamp=now_ms,
        partition_values=_partition(file),
        size=file.size,
    )


def _partition(file: LakeFile) -> dict[str, str | None]:
    return {"service": file.service, "day": file.day.isoformat()}


def _named(row: dict[str, Any], former: Mapping[str, str]) -> LakeFile:
    low, high = row.get("min.batch_id"), row.get("max.batch_id")
    return LakeFile(
        # The log always has it URI-encoded.
        path=unquote(row["path"]),
        service=former.get(row["partition.service"], row["partition.service"]),
        day=row["partition.day"],
        size=row["size_bytes"],
        rows=row["num_records"] or 0,
        batches=None if low is None or high is None else (low, high),
    )


def touched(files: Iterable[LakeFile]) -> list[list[int]]:
    """Return the ranges of batches that these files contain, as stored in the log."""
    return [list(one) for one in sorted({f.batches for f in files if f.batches})]


def app_name(job: str, service: str, table: str) -> str:
    """Return the name under which a job commits to a table."""
    return f"txmsg-{job}/{service}/{table}"


class NoLake(EnvironmentFault):
    """There is no lake at this address."""


class Lake:
    """A lake at a URI. With `create`, a lake is created if the place is empty."""

    def __init__(self, spec: LakeSpec, *, create: bool = False) -> None:
        self.spec = spec
        self.place = place_of(spec)
        self.files, self.root = self.place.files, self.place.root
        path = f"{self.root}/{MARKER}"
        if self.files.get_file_info(path).type == fs.FileType.File:
            with self.files.open_input_stream(path) as stream:
                try:
                    version = int(json.loads(stream.read())["version"])
                except (ValueError, KeyError, TypeError) as error:
                    raise EnvironmentFault(
                        f"{self.spec.uri}: {MARKER} is damaged ({error})."
                    ) from error
            if version > LAKE_VERSION:
                raise EnvironmentFault(
                    f"The lake at {self.spec.uri} has version {version}, and this "
                    f"django_txmsg knows {LAKE_VERSION}: upgrade it."
                )
            return
        entries = self.files.get_file_info(
            fs.FileSelector(self.root, allow_not_found=True)
        )
        others = [one for one in entries if not one.base_name.startswith(MARKER)]
        if others and self.files.get_file_info(path).type == fs.FileType.NotFound:
            raise EnvironmentFault(
                f"{self.spec.uri} is not a lake of django_txmsg: it has no {MARKER}, "
                f"but {len(others)} other entries. Name an empty place."
            )
        if not create:
            raise NoLake(
                f"There is no lake at {self.spec.uri} yet. `archive` creates it."
            )
        # Others may be creating it as well: no reader may see half a marker.
        self.files.create_dir(self.root, recursive=True)
        whole = f"{path}.{uuid.uuid4().hex}"
        with self.files.open_output_stream(whole) as stream:
            stream.write(json.dumps({"version": LAKE_VERSION}).encode())
        self.files.move(whole, path)
        sync(self.files, self.root, [path])

    def names(self) -> list[str]:
        """Return the names of the existing tables."""
        entries = self.files.get_file_info(fs.FileSelector(self.root))
        return sorted(
            one.base_name for one in entries if one.type == fs.FileType.Directory
        )

    def table(self, name: str, struct: t.StructType) -> LakeTable:
        """Return a table of the lake. The table may not exist yet."""
        return LakeTable(self.place, name, struct)
