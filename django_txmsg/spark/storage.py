"""Where a lake lies: file systems by their URIs, and what is brought to the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from .errors import EnvironmentFault


def is_local(uri: str) -> bool:
    """Whether a lake's URI names a place on this machine's file system."""
    return uri.startswith(("file:", "/"))


def filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a URI and the path in it. Raises EnvironmentFault."""
    try:
        files, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, OSError) as error:
        raise EnvironmentFault(
            f"The lake's address {uri!r} is not understood: {error}. Give an absolute "
            "path or a URI such as file:///var/lake."
        ) from error
    return files, path.rstrip("/")


def sync(files: fs.FileSystem, root: str, paths: Iterable[str]) -> None:
    """Bring files, and the directories on their way from `root`, to the disk, where
    that is ours to do."""
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
