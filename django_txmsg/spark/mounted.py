"""Whether the lake into which a database was archived is present: an empty mount point
looks like a lake that was not created yet."""

from __future__ import annotations

from contextlib import closing

from .connection import connect_plain
from .errors import EnvironmentFault
from .lake import Lake, NoLake
from .marks import Marks
from .schemas import TABLES
from .spec import JobSpec


class NotMounted(EnvironmentFault):
    """A lake with rows of ours is missing."""


def is_mounted(spec: JobSpec) -> bool:
    """Return whether there is a lake at the specification's address. Raises NotMounted
    if there is none, and rows of its services were archived into it."""
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
    """Return a service whose rows are in the lake."""
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
