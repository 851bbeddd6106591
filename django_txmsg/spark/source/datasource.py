"""The data source `format("txmsg")`. It creates the readers and streams that Spark
requests, and writes messages into an outbox.

Options for all: `url`, `service`, `table` (outbox, inbox, attempts, dead_letters),
`passwordEnv` (the *name* of the environment variable with the password). For reads:
`partitions`, `snapshot` (see `snapshot.snapshot()`), and `since` and `until`, which are
compared with the table's clock. `spark.sql.python.filterPushdown.enabled` must stay on:
Spark refuses these readers without it. For streams: `follow` (stored or changed),
`maxRowsPerBatch`, and `stuckAfter` (the seconds for which an open transaction may block
the stream). For writes: `run` and `rate`.

For a lake: `lake` (its URI), `table` (any table of the lake), and the options of an
object store as `storage.NAME`, if the environment does not contain them.

A written message needs an id, a destination and a body. Other values have defaults if
they are missing or null. Each task writes its rows to a staging table. Then the driver
moves the rows of successful tasks into the outbox in one transaction. If a task or the
whole run is repeated, each message is still stored only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from ... import wire
from ...rules.outbox import wrong_run
from ..engine import attempt_key, insist_on, installed
from ..errors import UsageError
from ..schemas import STAGED, TABLES, Table, arrow_schema
from ..spec import SourceSpec
from ..staging import Brought, Staging
from .batch import BatchReader, LakeReader, lake_table
from .stream import LogStream

#: The required columns of a DataFrame, and the defaults of the others.
NEEDED = ("message_id", "destination", "body")
DEFAULTS = {
    "broker": "default",
    "key": "",
    "correlation_id": "",
    "headers": "{}",
    "content_type": wire.JSON,
}


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
        if "lake" in self.given:
            return LakeReader(lake_table(self.given), schema)
        return BatchReader(self.spec, self.table, schema, self.given)

    def streamReader(self, schema: StructType) -> LogStream:  # noqa: N802 - Spark's name
        """Return a reader of new rows."""
        if installed() >= (4, 2):
            from .stream import LimitedStream

            return LimitedStream(self.spec, self.table, schema, self.given)
        stream = LogStream(self.spec, self.table, schema, self.given)
        if stream.most:
            insist_on("4.2", 'The option "maxRowsPerBatch" of a stream')
        return stream

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
        if name not in TABLES:
            raise UsageError(
                f"There is no table {name!r} in the message log; there are "
                f"{', '.join(TABLES)}."
            )
        return TABLES[name]

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


class OutboxWriter(DataSourceArrowWriter):
    """Stores the messages of one run. The run's name makes the run idempotent: it is
    stored in each row as `replay_id`, and the pair of `replay_id` and message id is
    unique."""

    def __init__(self, spec: SourceSpec, options: Mapping[str, str]) -> None:
        run = options.get("run", "")
        if wrong := wrong_run(run):
            raise UsageError(
                'Writing messages needs the option "run", a name: the same name again '
                f"stores nothing twice. {run!r} is none: {wrong}."
            )
        self.staging = Staging(spec.resolved(), run)
        self.rate = float(options.get("rate", 0))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Brought:
        """Write the rows of one attempt of a Spark task to the staging table."""
        return self.staging.stage(attempt_key(), map(_complete, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Move the rows of the successful task attempts into the outbox."""
        tasks = [one for one in messages if isinstance(one, Brought)]
        self.staging.merge(tasks, rate=self.rate)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete this run's rows from the staging table."""
        self.staging.clear()


def _complete(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add missing columns of STAGED to a batch."""
    schema = arrow_schema(STAGED)
    arrays = []
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        values = pa.nulls(batch.num_rows) if place < 0 else batch.column(place)
        values = values.cast(field.type)
        if field.name in DEFAULTS:
            values = pc.fill_null(values, DEFAULTS[field.name])
        if values.null_count and not field.nullable:
            raise UsageError(f"A message without {field.name} cannot be stored.")
        arrays.append(values)
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    # The database parses them, and no relay could send other JSON.
    if not all(one.lstrip().startswith("{") for one in whole["headers"].to_pylist()):
        raise UsageError("The headers of a message are a JSON object.")
    return whole
