"""A checksum of a row. PostgreSQL computes it in SQL, and this package computes the
same checksum from a file of the lake.

The hash covers the row in PostgreSQL's binary format (`record_send`): type id, length
and bytes of each column. So different rows never have the same encoding, and null
differs from every text. The SHA-256 is cut to 60 bits, and the hashes of several rows
are *summed*. A sum does not depend on the order. Unlike an exclusive or, it does not
cancel out two equal rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .schemas import KINDS, Column

#: Microseconds from 1970, Arrow's epoch, to 2000, PostgreSQL's.
_EPOCH = 946_684_800_000_000


def postgres_sql(columns: Sequence[Column]) -> str:
    """Return the SQL expression for the checksum of a row on PostgreSQL, as a
    bigint."""
    fields = ", ".join(one.hashed for one in columns)
    return (
        f"('x' || substr(encode(sha256(record_send(ROW({fields}))), 'hex'), 1, 15))"
        "::bit(60)::bigint"
    )


def row_hashes(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[int]:
    """Return the checksum of each row of a batch. The checksum covers `columns`."""
    if batch.num_rows == 0:
        return []
    records = _records(batch, columns)
    offsets = np.frombuffer(records.buffers()[1], dtype=np.int64)
    offsets = offsets[records.offset : records.offset + len(records) + 1].tolist()
    data = memoryview(records.buffers()[2])
    number = int.from_bytes
    return [
        number(sha256(data[start:end]).digest()[:8], "big") >> 4
        for start, end in pairwise(offsets)
    ]


def _records(batch: pa.RecordBatch, columns: Sequence[Column]) -> Any:
    """Return the binary records of all rows. They are built column by column."""
    rows = batch.num_rows
    pieces = [_flat([_repeat(struct.pack(">i", len(columns)), rows)])]
    for column in columns:
        values, kind = batch.column(column.name), KINDS[column.kind]
        if not kind.form:
            content = values.cast(pa.large_binary())
            lengths = pc.fill_null(pc.binary_length(content), -1).to_numpy()
            lengths = lengths.astype(">i4").view(np.uint8).reshape(rows, 4)
            header = _repeat(struct.pack(">i", kind.type_id), rows)
            pieces += [_flat([header, lengths]), pc.fill_null(content, b"")]
            continue
        size = np.dtype(kind.form).itemsize
        header = _repeat(struct.pack(">ii", kind.type_id, size), rows)
        known = pc.fill_null(values, _ZERO[column.kind])
        whole = _flat([header, _fixed(known, column.kind)])
        null = pa.scalar(struct.pack(">ii", kind.type_id, -1), pa.large_binary())
        pieces.append(pc.if_else(pc.is_valid(values), whole, null))
    empty = pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(*pieces, empty)


_ZERO = {
    "long": 0, "xid": 0, "int": 0, "double": 0.0, "bool": False,
    "uuid": "00000000-0000-0000-0000-000000000000",
    "instant": pa.scalar(0, pa.timestamp("us", tz="UTC")),
}  # fmt: skip


def _repeat(constant: bytes, rows: int) -> Any:
    return np.broadcast_to(np.frombuffer(constant, np.uint8), (rows, len(constant)))


def _flat(blocks: list[Any]) -> pa.Array:
    """Join blocks of bytes into an array of byte strings. String n consists of row n of
    each block."""
    joined = np.ascontiguousarray(np.hstack(blocks))
    rows, width = joined.shape
    offsets = np.arange(rows + 1, dtype=np.int64) * width
    return pa.Array.from_buffers(
        pa.large_binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    )


def _fixed(values: pa.Array, kind: str) -> Any:
    rows = len(values)
    if kind == "uuid":
        digits = pc.replace_substring(values, "-", "").cast(pa.large_binary())
        text = b"".join(digits.to_pylist())
        return np.frombuffer(bytes.fromhex(text.decode()), np.uint8).reshape(rows, 16)
    if kind == "instant":
        values = pc.subtract(values.cast(pa.int64()), _EPOCH)
    numbers = values.to_numpy(zero_copy_only=False).astype(KINDS[kind].form)
    return numbers.view(np.uint8).reshape(rows, -1)
