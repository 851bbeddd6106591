"""A table of the lake: Parquet files and a Delta log. Only the files that the log names
belong to the table.

Tasks write files with unique names (`lakefile`). Then the driver adds all of them with
one atomic log entry. Readers use the log, never a directory listing.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import deltalake
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql import types as t

from .cores import parallelism
from .errors import EnvironmentFault
from .lakefile import LakeFile, directory_of
from .lakelog import PARTITIONS, Named, added, named_by, removed
from .lakerows import LakeRows, in_parts
from .schemas import LAKE_VERSION, arrow_schema
from .storage import Place, insist_on, sync

_KEY = "txmsg"


class LakeTable:
    """A table of the lake: the Delta table at `<lake>/<name>`."""

    def __init__(self, place: Place, name: str, struct: t.StructType) -> None:
        self.place, self.name, self.struct = place, name, struct
        self.files = place.files
        self.root = f"{place.root}/{name}"
        self.uri = place.delta(name)
        self.options = dict(place.options) or None

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
            raise EnvironmentFault(f"{self.uri} cannot be read: {error}") from error
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
            delta = self.load()
            assert delta is not None
            self._sync_log([delta.version()])
        return delta

    def commit(
        self,
        delta: DeltaTable,
        files: Iterable[LakeFile],
        *,
        metadata: dict[str, Any],
        app: tuple[str, int] | None = None,
        replaced: Iterable[Named] = (),
        same_rows: bool = False,
    ) -> int:
        """Add `files` to the table, and remove the `replaced` files, in one log entry.
        Returns the new version. `delta` is the version that the caller has seen.

        `app` is the name and the number of the commit. If another process has committed
        under the same name since `delta` was loaded, CommitFailedError is raised.
        `same_rows` means that `files` contain exactly the rows of the `replaced` files.
        """
        files = list(files)
        before: int = delta.version()
        there = {f"{self.root}/{one.path}": one.size for one in files}
        insist_on(self.files, there)
        sync(self.files, self.place.root, [f"{self.root}/{f.path}" for f in files])
        now = int(dt.datetime.now(dt.timezone.utc).timestamp() * 1000)
        actions: list[Any] = [added(one, same_rows=same_rows) for one in files]
        actions += [removed(one, now, same_rows=same_rows) for one in replaced]
        delta.create_write_transaction(
            actions,
            mode="append",
            schema=delta.schema(),
            partition_by=PARTITIONS,
            commit_properties=CommitProperties(
                custom_metadata={_KEY: json.dumps(metadata)},
                app_transactions=[Transaction(*app, None)] if app else None,
            ),
        )
        after = self.load()
        assert after is not None
        version: int = after.version()
        # One of these is ours; others may have committed at the same time.
        self._sync_log(range(before + 1, version + 1))
        # Checked through the log, as every reader reads it: these very files, still
        # existing.
        named = {f"{self.root}/{one.path}" for one in self.named(after)}
        if missing := sorted(there.keys() - named):
            raise EnvironmentFault(
                f"{self.uri} should name {missing[0]}, but does not: the log of this "
                "table is another's, or the file was removed at once."
            )
        insist_on(self.files, there)
        return version

    def _sync_log(self, versions: Iterable[int]) -> None:
        log = f"{self.root}/_delta_log"
        paths = [f"{log}/{number:020}.json" for number in versions]
        sync(self.files, self.place.root, paths)

    def last(self, delta: DeltaTable, app: str) -> int:
        """Return the number of the last commit under the name `app`. Returns 0 if there
        is none."""
        return delta.transaction_version(app) or 0

    def named(self, delta: DeltaTable | None = None) -> list[Named]:
        """Return all files of the table, at the version `delta` or at the current
        version."""
        delta = delta or self.load()
        if delta is None:
            return []
        return named_by(delta)

    def of_batches(self, service: str, after: int, until: int) -> list[Named]:
        """Return a service's files that may contain rows of the batches after `after`,
        up to and including `until`."""
        return [
            one
            for one in self.named()
            if one.service == service
            and (
                one.batches is None
                or (one.batches[0] <= until and one.batches[1] > after)
            )
        ]

    def read(
        self,
        spark: SparkSession,
        *,
        services: Sequence[str] = (),
        since: dt.date | None = None,
        named: Sequence[Named] | None = None,
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
        cores = parallelism(spark)
        parts = min(len(chosen), 2 * cores)
        task = LakeRows(self.files, self.root, struct, in_parts(chosen, parts))
        return spark.range(0, len(chosen), 1, parts).mapInArrow(task, struct)

    def _read_by_spark(
        self, spark: SparkSession, struct: t.StructType, chosen: Sequence[Named]
    ) -> DataFrame:
        inner = t.StructType([f for f in struct.fields if f.name not in PARTITIONS])
        parts: dict[tuple[str, dt.date], list[str]] = {}
        for one in chosen:
            parts.setdefault((one.service, one.day), []).append(self._address(one.path))
        whole: DataFrame | None = None
        for service in sorted({service for service, _ in parts}):
            days = {
                day: paths for (name, day), paths in parts.items() if name == service
            }
            paths = sorted(path for listed in days.values() for path in listed)
            # The path is used literally, whatever characters the lake's own path has.
            reader = spark.read.schema(inner).option("__globPaths__", "false")
            reader = reader.option("parquet.page.verify-checksum.enabled", "true")
            frame = reader.parquet(*paths)
            known = {"service": sf.lit(service)}
            if "day" in struct.fieldNames():
                path = sf.col("_metadata.file_path")
                # The lake's own address may contain a day, too.
                day = sf.regexp_extract(path, r"/day=([\d-]+)/[^/]*$", 1)
                known["day"] = sf.to_date(day)
            frame = frame.withColumns(known)
            whole = frame if whole is None else whole.unionByName(frame)
        assert whole is not None
        return whole.select(*struct.fieldNames())

    def vacuum(self, hours: int, *, dry_run: bool) -> list[str]:
        """Delete the files that were removed from the table more than `hours` hours
        ago."""
        delta = self.load()
        if delta is None:
            return []
        return list(
            delta.vacuum(hours, dry_run=dry_run, enforce_retention_duration=False)
        )

    def orphans(self, service: str, before: dt.datetime) -> list[str]:
        """Return files of a service that are older than `before` and that the log has
        never named. Files of other services are left out, because they may belong to a
        running job. (The Delta library's own clean-up would delete files of other
        services, too.)"""
        delta = self.load()
        if delta is None:
            return []
        once_named = set(self._vacuumed(delta, 0, full=False))
        unnamed = set(self._vacuumed(delta, 0, full=True)) - once_named
        own = {directory_of(service), f"service={service}"}
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
        """If the block fails, delete the files that it has written, so that a full disk
        has room again. The deleted files are those of the service whose names begin
        with one of `names`, except files that the log names."""
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

    @staticmethod
    def _vacuumed(delta: DeltaTable, hours: int, *, full: bool) -> list[str]:
        return delta.vacuum(
            hours, dry_run=True, enforce_retention_duration=False, full=full
        )

    def _address(self, path: str) -> str:
        return f"{self.place.uri}/{self.name}/{path}"


def app_name(job: str, service: str, table: str) -> str:
    """Return the name under which a job commits to a table."""
    return f"txmsg-{job}/{service}/{table}"


__all__ = ["CommitFailedError", "LakeTable", "app_name"]
