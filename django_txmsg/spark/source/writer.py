"""Writes a DataFrame into an outbox, as messages.

A message needs an id, a destination and a body. Other values have defaults if they are
missing or null. Each task writes its rows to a staging table. Then the driver moves the
rows of successful tasks into the outbox in one transaction. If a task or the whole run
is repeated, each message is still stored only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from ... import wire
from ..errors import UsageError
from ..schemas import STAGED, arrow_schema
from ..spec import SourceSpec
from ..staging import Brought, Staging, attempt_key

#: The required columns of a DataFrame, and the defaults of the others.
NEEDED = ("message_id", "destination", "body")
DEFAULTS = {
    "broker": "default",
    "key": "",
    "correlation_id": "",
    "headers": "{}",
    "content_type": wire.JSON,
}


@dataclass
class StagedTask(WriterCommitMessage):
    """The rows that one attempt of a task has written to the staging table."""

    brought: Brought


class OutboxWriter(DataSourceArrowWriter):
    """Stores the messages of one run. The run's name makes the run idempotent: it is
    stored in each row as `replay_id`, and the pair of `replay_id` and message id is
    unique."""

    def __init__(self, spec: SourceSpec, options: Mapping[str, str]) -> None:
        run = options.get("run", "")
        if not 0 < len(run) <= 64:
            raise UsageError(
                'Writing messages needs the option "run", a name of at most 64 '
                "characters: the same name again stores nothing twice."
            )
        self.spec, self.run = spec.resolved(), run
        self.rate = float(options.get("rate", 0))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        """Write the rows of one attempt of a Spark task to the staging table."""
        messages = (_complete(batch) for batch in iterator)
        return StagedTask(self._staging().stage(attempt_key(), messages))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Move the rows of the successful task attempts into the outbox."""
        tasks = [one.brought for one in messages if isinstance(one, StagedTask)]
        self._staging().merge(tasks, rate=self.rate)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete this run's rows from the staging table."""
        self._staging().clear()

    def _staging(self) -> Staging:
        return Staging(self.spec, self.run)


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
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
