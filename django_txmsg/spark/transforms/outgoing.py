"""Rows for an outbox: replayed messages, and new messages from a dataset.

The ids of new messages are derived from the run and the row. So a repeated run stores
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, Window

from ... import wire
from ..errors import UsageError

_PLACE = re.compile(r"\{([^{}]+)\}")
#: How a body is written: with nulls, and with all digits of an instant.
_WHOLE = {
    "ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}  # fmt: skip


def derived_uuid(name: Column) -> Column:
    """Return the version 5 UUID of a name in our namespace, like `uuid.uuid5`."""
    space = sf.unhex(sf.lit(wire.NAMESPACE.hex))
    digest = sf.sha1(sf.concat(space, sf.encode(name, "UTF-8")))
    variant = sf.translate(
        sf.substring(digest, 17, 1), "0123456789abcdef", "89ab89ab89ab89ab"
    )
    return sf.concat_ws(
        "-", sf.substring(digest, 1, 8), sf.substring(digest, 9, 4),
        sf.concat(sf.lit("5"), sf.substring(digest, 14, 3)),
        sf.concat(variant, sf.substring(digest, 18, 3)), sf.substring(digest, 21, 12),
    )  # fmt: skip


def to_outbox_rows(
    archived: DataFrame, *, run: str, mode: Literal["same", "copy"]
) -> DataFrame:
    """Return STAGED rows from archived outbox rows.

    With the mode `same`, messages keep their ids, so an inbox that still knows an id
    drops the message. With the mode `copy`, new ids are derived from the run and the
    original ids. The link to the predecessor is left out: it belongs to the original.
    """
    original = sf.col("message_id")
    copied = derived_uuid(sf.concat(sf.lit(f"replay/{run}/"), original))
    return archived.select(
        (original if mode == "same" else copied).alias("message_id"),
        sf.coalesce("broker", sf.lit("default")).alias("broker"),
        "destination",
        sf.coalesce("key", sf.lit("")).alias("key"),
        sf.coalesce("correlation_id", sf.lit("")).alias("correlation_id"),
        _headers(mode).alias("headers"),
        sf.when(sf.col("content_type") != "", sf.col("content_type"))
        .otherwise(wire.BYTES)
        .alias("content_type"),
        "body",
        sf.col("created_at").alias("position"),
        sf.col("id").alias("sequence"),
    )


def _headers(mode: Literal["same", "copy"]) -> Column:
    """Return the headers, as JSON, for a message that is stored again. A flow's request
    keeps its deadline, so that no stage executes the request after its flow has gone
    on."""
    stored = sf.col("headers")
    headers = sf.from_json(stored, "map<string,string>")
    at = sf.date_format("expires_at", "yyyy-MM-dd'T'HH:mm:ss.SSSSSSxxx")
    dated = sf.map_concat(headers, sf.create_map(sf.lit(wire.EXPIRES), at))
    asks = [sf.map_contains_key(headers, one) for one in (wire.TICKET, wire.REPLY_TO)]
    # In a row that was stored again, the deadline is a header already.
    kept = sf.when(sf.col("expires_at").isNull(), stored)
    kept = kept.when(asks[0] & asks[1], sf.to_json(dated)).otherwise(stored)
    if mode == "same":
        return kept
    linked = sf.contains(stored, sf.lit(wire.AFTER))
    without = sf.map_filter(
        sf.from_json(kept, "map<string,string>"), lambda name, _: name != wire.AFTER
    )
    return sf.when(linked, sf.to_json(without)).otherwise(kept)


def from_dataset(
    rows: DataFrame, *, run: str, destination: str, template: Any, key: str = "",
    headers: Mapping[str, str] | None = None, identity: str = "",
    broker: str = "default",
) -> DataFrame:  # fmt: skip
    """Return STAGED rows: one message for each row of a dataset.

    `{column}` is replaced by the value of that column. Such a placeholder may stand in
    `destination`, in `key`, in the values of `headers`, and in the strings of
    `template`. The body is made from `template`. If a string of `template` consists
    only of `{column}`, the value keeps its type.

    `identity` names the columns that identify a row. Without `identity`, a row is
    identified by its content, and equal rows are numbered.
    """
    identities = [_known(one, rows) for one in identity.split(",") if one]
    itself = _identity(sf.struct(*identities or "*"))
    if not identities:
        rows = rows.withColumn("_content", itself)
        among = Window.partitionBy("_content").orderBy(sf.lit(1))
        rows = rows.withColumn("_number", sf.row_number().over(among))
        itself = sf.concat_ws("/", "_content", "_number")
    body = sf.to_json(_built(template, rows), _WHOLE)
    given = {k: _text(value, rows) for k, value in (headers or {}).items()}
    pairs = [part for k, value in given.items() for part in (sf.lit(k), value)]
    there = sf.map_filter(sf.create_map(*pairs), lambda _, value: value.isNotNull())
    return rows.select(
        derived_uuid(sf.concat(sf.lit(f"send/{run}/"), itself)).alias("message_id"),
        sf.lit(broker).alias("broker"),
        _text(destination, rows).alias("destination"),
        sf.coalesce(_text(key, rows), sf.lit("")).alias("key"),
        sf.lit("").alias("correlation_id"),
        (sf.to_json(there) if pairs else sf.lit("{}")).alias("headers"),
        sf.lit(wire.JSON).alias("content_type"),
        sf.encode(body, "UTF-8").alias("body"),
        sf.lit(None).cast("timestamp").alias("position"),
        sf.lit(None).cast("long").alias("sequence"),
    )


def _identity(columns: Column) -> Column:
    """Return the text that identifies a row. For instants of whole milliseconds, it is
    the text of earlier releases, so that a repeated run still stores nothing."""
    earlier = sf.to_json(columns, {"ignoreNullFields": "false"})
    cut = {k: v.replace("SSSSSS", "SSS'000'") for k, v in _WHOLE.items()}
    whole = sf.to_json(columns, _WHOLE)
    return sf.when(whole == sf.to_json(columns, cut), earlier).otherwise(whole)


def parse_template(text: str) -> Any:
    """Parse a template from JSON. Raises UsageError if it is invalid."""
    try:
        template = json.loads(text)
    except ValueError as error:
        raise UsageError(f"The template is not JSON: {error}.") from error
    if not isinstance(template, dict | list):
        raise UsageError("A template is a JSON object or array.")
    return template


def _built(template: Any, rows: DataFrame) -> Column:
    """Return a column with the template's value for each row."""
    if isinstance(template, dict):
        return sf.struct(*[_built(v, rows).alias(k) for k, v in template.items()])
    if isinstance(template, list):
        return sf.array(*[_built(one, rows) for one in template])
    if isinstance(template, str):
        whole = _PLACE.fullmatch(template)
        return _known(whole[1], rows) if whole else _text(template, rows)
    return sf.lit(template)


def _text(template: str, rows: DataFrame) -> Column:
    pieces = _PLACE.split(template)
    parts = [
        _known(piece, rows).cast("string") if index % 2 else sf.lit(piece)
        for index, piece in enumerate(pieces)
    ]
    return sf.concat(*parts)


def _known(name: str, rows: DataFrame) -> Column:
    if name not in rows.columns:
        raise UsageError(
            f"The dataset has no column {name!r}; it has {', '.join(rows.columns)}."
        )
    return sf.col(f"`{name}`")
