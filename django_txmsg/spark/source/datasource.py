"""The data source `format("txmsg")`. It creates the readers, streams and the writer
that Spark requests.

Options for all: `url`, `service`, `table` (outbox, inbox, attempts, dead_letters),
`passwordEnv` (the *name* of the environment variable with the password). For reads:
`partitions`, `snapshot` (see `snapshot.snapshot()`), and `since` and `until`, which are
compared with the table's clock. For streams: `follow` (stored or changed),
`maxRowsPerBatch`, and `stuckAfter` (the seconds for which an open transaction may block
the stream). For writes: `run` and `rate`.

For a lake: `lake` (its URI), `table` (any table of the lake), and the options of an
object store as `storage.NAME`, if the environment does not contain them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from ..errors import UsageError
from ..schemas import STAGED, TABLES, Table
from ..spec import SourceSpec
from ..versions import installed
from .batch import BatchReader
from .lake import LakeReader, lake_table
from .stream import LogStream, WholeStream
from .writer import NEEDED, OutboxWriter


class TxmsgDataSource(DataSource):
    """The message log in a service's database, or a table of a lake."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self.given = {key.lower(): value for key, value in self.options.items()}

    def __repr__(self) -> str:
        # Spark shows this in plans and in errors.
        return f"txmsg {self.given.get('table', 'outbox')}"

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "txmsg"

    def schema(self) -> StructType:
        """Return the schema of the table."""
        if "lake" in self.given:
            return lake_table(self.given).struct
        return self.table.struct()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns in `schema`. Spark may request fewer columns
        than the table has."""
        of_lake: type[LakeReader] = LakeReader
        of_log: type[BatchReader] = BatchReader
        pushes = self.given.get("pushdown", "true").lower() != "false"
        if pushes and installed() >= (4, 1):
            from .pushdown import PushingLakeReader, PushingReader

            of_lake, of_log = PushingLakeReader, PushingReader
        if "lake" in self.given:
            return of_lake(lake_table(self.given), schema)
        return of_log(self.spec, self.table, schema, self.given)

    def streamReader(self, schema: StructType) -> LogStream:  # noqa: N802 - Spark's name
        """Return a reader of new rows."""
        kind: type[LogStream] = WholeStream
        if installed() >= (4, 2):
            from .limited import LimitedStream

            kind = LimitedStream
        return kind(self.spec, self.table, schema, self.given)

    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        """Return a writer that appends to the outbox. Raises UsageError for
        `overwrite`, and for missing or unknown columns."""
        if overwrite:
            raise UsageError("Messages are added to an outbox: use .mode('append').")
        names = set(schema.fieldNames())
        missing, unknown = set(NEEDED) - names, names - set(STAGED.fieldNames())
        if missing or unknown:
            raise UsageError(
                f"An outbox takes the columns {', '.join(STAGED.fieldNames())}. "
                f"Missing: {', '.join(sorted(missing)) or 'none'}; unknown: "
                f"{', '.join(sorted(unknown)) or 'none'}."
            )
        return OutboxWriter(self.spec, self.given)

    @property
    def table(self) -> Table:
        """The table that the options name."""
        name = self.given.get("table", "outbox")
        try:
            return TABLES[name]
        except KeyError:
            raise UsageError(
                f"There is no table {name!r} in the message log; there are "
                f"{', '.join(TABLES)}."
            ) from None

    @property
    def spec(self) -> SourceSpec:
        """The service and its database that the options name."""
        if "url" not in self.given:
            raise UsageError(
                'format("txmsg") needs the option "url", for example '
                "postgresql://user@host/database or sqlite:////path."
            )
        return SourceSpec(
            service=self.given.get("service", "service"),
            url=self.given["url"],
            password_env=self.given.get("passwordenv", ""),
        )
