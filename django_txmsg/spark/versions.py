"""The installed PySpark version. The pipeline needs 4.0, and some features need a newer
one."""

from __future__ import annotations

import re

import pyspark

from .errors import EnvironmentFault


def installed() -> tuple[int, ...]:
    """Return the PySpark version as a tuple of numbers."""
    return _parsed(pyspark.__version__)


def insist_on(since: str, what: str) -> None:
    """Raise EnvironmentFault if the installed PySpark is older than `since`, the first
    version with the feature `what`."""
    if installed() < _parsed(since):
        raise EnvironmentFault(
            f"{what} needs PySpark {since} or newer, and {pyspark.__version__} is "
            f"installed: pip install 'pyspark[sql]>={since}'."
        )


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
