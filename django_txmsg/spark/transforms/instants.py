"""Python instants in Spark expressions."""

from __future__ import annotations

import datetime as dt

import pyspark.sql.functions as sf
from pyspark.sql import Column


def timestamp(value: dt.datetime) -> Column:
    """Return an aware datetime as a timestamp, whatever the session's time zone."""
    return sf.timestamp_micros(sf.lit(int(value.timestamp() * 1_000_000)))
