"""The installed PySpark version: the pipeline runs on 4.0 and newer; some features need
more."""

from __future__ import annotations

import re

import pyspark

from .errors import EnvironmentFault


def installed() -> tuple[int, ...]:
    """Return PySpark's version, for comparisons."""
    return _parsed(pyspark.__version__)


def insist_on(since: str, what: str) -> None:
    """Raise EnvironmentFault if PySpark is older than a feature needs."""
    if installed() < _parsed(since):
        raise EnvironmentFault(
            f"{what} needs PySpark {since} or newer, and {pyspark.__version__} is "
            f"installed: pip install 'pyspark[sql]>={since}'."
        )


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
