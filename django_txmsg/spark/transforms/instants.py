"""Instants of Python in expressions of Spark."""

from __future__ import annotations

import datetime as dt

import pyspark.sql.functions as sf
from pyspark.sql import Column


def timestamp(value: dt.datetime) -> Column:
    """Return an aware datetime as a timestamp, in whatever time zone the session is."""
    return sf.timestamp_micros(sf.lit(int(value.timestamp() * 1_000_000)))
