"""Rewrites a file of the lake without some of its rows, and proves it by reading it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from ..errors import VerificationRefused
from ..lakefile import LakeFile, parquet_writer, rows_of
from ..lakelog import Named


def rewritten(
    files: fs.FileSystem,
    root: str,
    file: Named,
    keep: Callable[[pa.RecordBatch], pa.RecordBatch],
    checksum: Callable[[pa.RecordBatch], int],
) -> LakeFile:
    """Write the rows that `keep` selects from a file into a new file beside it, and
    return that file, which no log names yet. Raises VerificationRefused if it differs
    from what was written."""
    path = str(PurePosixPath(file.path).with_name(f"{uuid.uuid4()}-0.parquet"))
    rows = total = 0
    writer: Any = None
    with files.open_output_stream(f"{root}/{path}") as stream:
        for batch in rows_of(files, f"{root}/{file.path}"):
            kept = keep(batch)
            # The file's counts include the rows that are removed.
            writer = writer or parquet_writer(stream, batch.schema.remove_metadata())
            writer.write_batch(kept)
            rows += kept.num_rows
            total += checksum(kept)
        writer.close()
    again = sum(checksum(one) for one in rows_of(files, f"{root}/{path}"))
    if again != total:
        raise VerificationRefused(f"{path} does not hold what was written into it.")
    info = files.get_file_info(f"{root}/{path}")
    modified = int(info.mtime.timestamp() * 1000) if info.mtime else 0
    return LakeFile(
        path, file.service, file.day, info.size, rows, modified, file.batches
    )
