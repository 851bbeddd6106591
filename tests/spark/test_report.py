"""The page of `analyze`: what it writes and draws, also on a phone."""

from __future__ import annotations

import datetime as dt
import os
import re
from pathlib import Path
from typing import Any

import pytest

from django_txmsg.spark.report import Findings, render
from tests.admin.browser import PHONE, WIDE, browser, missing

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
    line = re.findall(r'<polyline points="([^"]+)"', page)[0]
    heights = [float(point.partition(",")[2]) for point in line.split()]
    assert heights == sorted(set(heights), reverse=True)


#: Returns the height of each chart that is shown, the sizes of its labels, and the
#: labels that are cut off at its edges.
_SHOWN = """
const size = (text) =>
  text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize);
const cut = (text) => {
  const [inner, outer] = [text, text.ownerSVGElement].map(
    (one) => one.getBoundingClientRect());
  const hidden = getComputedStyle(text.ownerSVGElement).overflow !== "visible";
  return hidden && (inner.right > outer.right || inner.left < outer.left);
};
return [...document.querySelectorAll("svg[viewBox]:not(.spark)")]
  .map((one) => [one.getBoundingClientRect().height,
    [...one.querySelectorAll("text")].map(size),
    [...one.querySelectorAll("text")].filter(cut).map((text) => text.textContent)])
  .filter((one) => one[0] > 0);
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
def test_charts_are_readable(tmp_path: Path, size: tuple[int, int]) -> None:
    absent = missing()
    if absent and os.environ.get("CI") != "true":
        pytest.skip(absent)
    hours = [*DAY, NOW]  # the last one has a label, too
    stored = [100.0 * (hour % 7) for hour in range(25)]
    found = Findings(["shop"], DAY[0], NOW, hours=hours, backlog=stored)
    found.throughput = dict.fromkeys(("stored", "dispatched", "processed"), stored)
    found.critical = dict.fromkeys(("p50", "p95", "p99"), stored)
    page = tmp_path / "report.html"
    page.write_text(render(found))

    with browser("") as seen:
        seen.look(size=size)
        seen.open(page.as_uri())
        charts: list[Any] = seen.driver.execute_script(_SHOWN)
        wide = seen.overflows()

    assert len(charts) == 3
    assert all(height >= 180 and min(labels) >= 10 for height, labels, _ in charts)
    assert [cut for _, _, cut in charts] == [[], [], []]
    assert not wide
