"""The lake: a directory with a marker, and tables in it.

An empty mount point looks like a place without a lake. The marks in the databases show
whether a lake should be there.
"""

from __future__ import annotations

import json
import uuid
from contextlib import closing

from pyarrow import fs
from pyspark.sql import types as t

from .connection import connect_plain
from .errors import EnvironmentFault
from .laketable import LakeTable
from .marks import Marks
from .schemas import LAKE_VERSION, TABLES
from .spec import JobSpec, LakeSpec
from .storage import MARKER, place_of, sync


class NoLake(EnvironmentFault):
    """There is no lake at this address."""


class Lake:
    """A lake at a URI. With `create`, a lake is created if the place is empty."""

    def __init__(self, spec: LakeSpec, *, create: bool = False) -> None:
        self.spec = spec
        self.place = place_of(spec)
        self.files, self.root = self.place.files, self.place.root
        self._check_marker(create)

    def _check_marker(self, create: bool) -> None:
        path = f"{self.root}/{MARKER}"
        if self.files.get_file_info(path).type == fs.FileType.File:
            with self.files.open_input_stream(path) as stream:
                try:
                    version = json.loads(stream.read())["version"]
                except (ValueError, KeyError) as error:
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


class NotMounted(EnvironmentFault):
    """There is no lake at the address, although rows were archived into it."""


def is_mounted(spec: JobSpec) -> bool:
    """Return whether a lake exists at the specified address. Raises NotMounted if it
    does not, although rows of these services were archived into it."""
    lake = spec.lake_spec()
    try:
        Lake(lake)
    except NoLake as missing:
        if known := _archived_into(spec, lake.uri):
            raise NotMounted(
                f"There is nothing at {lake.uri}, and {known!r} has archived rows into "
                "the lake there: mount it, or bring its newest backup back, and run "
                "again. If it is gone for good, say so: archive --accept-loss."
            ) from missing
        return False
    return True


def _archived_into(spec: JobSpec, uri: str) -> str:
    """Return the name of a service that has archived rows into this lake."""
    for source in spec.services:
        try:
            with closing(connect_plain(source)) as connection:
                for table in TABLES:
                    for mark in Marks(connection, table).read():
                        if mark.lake == uri and mark.purged_through:
                            return source.service
        except EnvironmentFault:
            # The database is away, which the job will report, or the role may read only
            # the log.
            continue
    return ""
