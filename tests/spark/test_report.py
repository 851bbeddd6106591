"""The page of `analyze`: what it writes and draws, also on a phone."""

from __future__ import annotations

import datetime as dt
import re

from django_txmsg.spark.report import Findings, render

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone.utc)
DAY = [NOW - dt.timedelta(hours=hour) for hour in range(24, 0, -1)]


def test_times_below_a_millisecond_are_written_and_drawn() -> None:
    stage = {
        "receiver": "shop", "stage": "pay", "messages": 2, "received": 2,
        "redelivered": 0, "negative": 0, "handler_p95": 0.0004,
        "p50": 0.00164, "p95": 0.0099996, "p99": 0.0123,
    }  # fmt: skip
    times = [0.0002 + 0.00001 * hour for hour in range(24)]

    found = Findings(["shop"], DAY[0], NOW, hours=DAY, stages=[stage])
    found.critical = dict.fromkeys(("p50", "p95", "p99"), times)

    page = render(found)

    cells = re.findall(r"[\d.]+ ms(?=</td>)", page)
    assert cells == ["1.64 ms", "10 ms", "12 ms", "0.4 ms"]
    [line] = set(re.findall(r'<polyline points="([^"]+)"', page))
    heights = [float(point.partition(",")[2]) for point in line.split()]
    assert heights == sorted(set(heights), reverse=True)
