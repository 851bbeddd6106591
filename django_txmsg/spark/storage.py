"""The location of a lake: its file system, and syncing to disk.

Two clients use a lake: pyarrow for data files, and the Delta library for the log. An
address that they might interpret differently is refused before anything is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from .errors import EnvironmentFault
from .spec import LakeSpec

#: The file that marks a place as a lake.
MARKER = "_txmsg.json"

#: The Delta library's name for an option of S3, and pyarrow's.
_S3 = {
    "access_key_id": "access_key", "secret_access_key": "secret_key",
    "session_token": "session_token", "region": "region", "default_region": "region",
    "endpoint_url": "endpoint_override", "endpoint": "endpoint_override",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The root of a lake. pyarrow needs a file system and a path, the Delta library a
    URI and the options of `spec`."""

    files: fs.FileSystem
    root: str
    uri: str
    spec: LakeSpec
    local: bool

    def names(self, service: str) -> list[str]:
        """Return all names under which a service has archived: its present name, then
        former ones."""
        former = self.spec.former
        return [service, *(old for old in former if former[old] == service)]

    def insist(self) -> None:
        """Raise EnvironmentFault unless the lake exists. Call this before creating a
        file: a file below an unmounted mount point would be hidden after mounting."""
        if self.files.get_file_info(f"{self.root}/{MARKER}").type != fs.FileType.File:
            raise EnvironmentFault(
                f"The lake at {self.uri} has disappeared during the run: mount it, "
                "and run again."
            )


def place_of(spec: LakeSpec) -> Place:
    """Return the location of a lake. Raises EnvironmentFault for an invalid address,
    and for an address that pyarrow and the Delta library might interpret
    differently."""
    if spec.uri.startswith("/"):
        return _local(spec.uri, spec)
    parts = urlsplit(spec.uri)
    if not parts.scheme:
        raise EnvironmentFault(
            f"The lake's address {spec.uri!r} is not understood. Give an absolute path "
            "or a URI such as file:///var/lake."
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        # The text does not contain the address, which may contain a password.
        raise EnvironmentFault(
            "The lake's address contains credentials, a query or a fragment, and it is "
            "recorded. Credentials and options belong in STORAGE_OPTIONS of "
            'TXMSG["LAKE"], or into the environment.'
        )
    # In file://var/lake, var is a host, and the path would be /lake.
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return _local(unquote(parts.path), spec)
    uri = spec.uri.rstrip("/")
    if parts.scheme in ("s3", "s3a") and parts.netloc:
        # This name works for pyarrow and the Delta library; Hadoop has another.
        uri = "s3://" + uri.partition("://")[2]
        path = unquote(f"{parts.netloc}{parts.path}").rstrip("/")
        return Place(_s3(spec.storage_options), path, uri, spec, local=False)
    try:
        files, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, OSError) as error:
        raise EnvironmentFault(
            f"The lake's address {spec.uri!r} is not understood: {error}. Addresses "
            "look like file:///var/lake or s3://bucket/lake."
        ) from error
    return Place(files, path.rstrip("/"), uri, spec, local=False)


def _local(path: str, spec: LakeSpec) -> Place:
    if re.search(r"%[0-9A-Fa-f]{2}|\\", path):
        raise EnvironmentFault(
            f"The lake's address {spec.uri!r} means the path {path!r}, and the log of "
            "a table cannot lie where a path has a backslash or a percent sign before "
            "two digits. Name another place."
        )
    root = path.rstrip("/")
    return Place(fs.LocalFileSystem(), root, f"file://{root}", spec, local=True)


def _s3(options: Mapping[str, str]) -> fs.FileSystem:
    plain = {name.lower().removeprefix("aws_"): options[name] for name in options}
    known = (name for name in plain if name in _S3)
    return fs.S3FileSystem(**{_S3[name]: plain[name] for name in known})


def insist_on(files: fs.FileSystem, sizes: Mapping[str, int]) -> None:
    """Raise EnvironmentFault unless these files exist with these sizes."""
    infos = files.get_file_info(list(sizes))
    for path, info in zip(sizes, infos, strict=True):
        if info.type != fs.FileType.File or info.size != sizes[path]:
            found = "is gone" if info.size is None else f"has {info.size} bytes"
            raise EnvironmentFault(
                f"The lake's file {path} was written with {sizes[path]} bytes, and "
                f"{found}: it was removed or changed. Run again."
            )


def sync(files: fs.FileSystem, root: str, paths: Iterable[str]) -> None:
    """Sync files, and their directories below `root`, to disk. Does nothing for an
    object store."""
    if not isinstance(files, fs.LocalFileSystem):
        return
    paths = list(paths)
    directories = {
        str(directory)
        for path in paths
        for directory in Path(path).parents
        if directory.is_relative_to(root)
    }
    for path in [*paths, *sorted(directories, reverse=True)]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
