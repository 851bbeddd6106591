"""The lake: a directory with a marker, and tables in it."""

from __future__ import annotations

import json
import uuid

from pyarrow import fs
from pyspark.sql import types as t

from .errors import EnvironmentFault
from .laketable import LakeTable
from .schemas import LAKE_VERSION
from .spec import LakeSpec
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
