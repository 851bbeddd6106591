"""Which PySpark there is: the pipeline runs on 4.0, but for what insists on more."""

from __future__ import annotations

import re

import pyspark

from .errors import EnvironmentFault


def installed() -> tuple[int, ...]:
    """Return PySpark's version, to compare with others."""
    return _parsed(pyspark.__version__)


def insist_on(since: str, what: str) -> None:
    """Raise EnvironmentFault where PySpark is older than what something needs."""
    if installed() < _parsed(since):
        raise EnvironmentFault(
            f"{what} needs PySpark {since} or newer, and {pyspark.__version__} is "
            f"installed: pip install 'pyspark[sql]>={since}'."
        )


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
