"""The ticks of recurring messages, also when clocks change."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from django_txmsg.envelope.cron import UTC, Cron
from django_txmsg.errors import ConfigurationError

BERLIN = ZoneInfo("Europe/Berlin")
#: The nights in which Berlin's clocks go from 2 to 3, and from 3 to 2.
SPRING = dt.datetime(2026, 3, 28, 23, tzinfo=UTC)
AUTUMN = dt.datetime(2026, 10, 24, 22, tzinfo=UTC)
NIGHT = dt.timedelta(hours=6)


def ticks(expression: str, night: dt.datetime) -> list[str]:
    """Return the ticks in Berlin from midnight to about six, each with its UTC
    offset."""
    found = Cron(expression, "Europe/Berlin").between(night - SECOND, night + NIGHT)
    return [tick.astimezone(BERLIN).strftime("%H:%M%z")[:-2] for tick in found]


SECOND = dt.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("expression", "spring", "autumn"),
    [
        # A time that is skipped comes right after; one that comes twice, at its first.
        ("30 2 * * *", ["03:00+02"], ["02:30+02"]),
        ("0 3 * * *", ["03:00+02"], ["03:00+01"]),
        ("15 1,2 * * *", ["01:15+01", "03:00+02"], ["01:15+02", "02:15+02"]),
        # What goes by the hour goes by real time.
        (
            "0 * * * *",
            ["00:00+01", "01:00+01", "03:00+02", "04:00+02", "05:00+02", "06:00+02",
             "07:00+02"],
            ["00:00+02", "01:00+02", "02:00+02", "02:00+01", "03:00+01", "04:00+01",
             "05:00+01"],
        ),
        (
            "*/30 1-2 * * *",
            ["01:00+01", "01:30+01"],
            ["01:00+02", "01:30+02", "02:00+02", "02:30+02", "02:00+01", "02:30+01"],
        ),
    ],
)  # fmt: skip
def test_a_change_of_the_clock_is_taken_as_cron_takes_it(
    expression: str, spring: list[str], autumn: list[str]
) -> None:
    assert ticks(expression, SPRING) == spring
    assert ticks(expression, AUTUMN) == autumn


@pytest.mark.parametrize("night", [SPRING, AUTUMN])
@pytest.mark.parametrize(
    "expression",
    ["*/7 * * * *", "30 2 * * *", "0 3 * * *", "15 1-3 * * *", "*/20 2 * * *",
     "0 */2 * * *", "30 2 * * SUN", "*/30 * * * * *", "59 23 L * *"],
)  # fmt: skip
def test_the_next_and_last_ticks_agree_from_any_instant(
    expression: str, night: dt.datetime
) -> None:
    cron = Cron(expression, "Europe/Berlin")
    all_of_them = list(cron.between(night, night + NIGHT))
    for minutes in range(0, 360, 7):
        now = night + dt.timedelta(minutes=minutes, microseconds=7)
        passed = [tick for tick in all_of_them if tick <= now]
        coming = [tick for tick in all_of_them if tick > now]

        assert cron.last(night, now) == (passed[-1] if passed else None)
        assert not coming or cron.after(now) == coming[0]
        assert list(cron.between(now, night + NIGHT)) == coming


def test_the_last_tick_is_found_across_a_clock_change_of_half_an_hour() -> None:
    cron = Cron("* 0 25 * SUN", "Australia/Lord_Howe")
    begin = dt.datetime(2026, 4, 4, 13, tzinfo=UTC)
    now = begin + dt.timedelta(hours=3)

    assert cron.last(begin, now) == list(cron.between(begin, now))[-1]


def test_the_last_of_many_ticks_is_found_at_once() -> None:
    cron = Cron("* * * * * *", "UTC")
    ten_years = dt.datetime(2036, 1, 1, microsecond=1, tzinfo=UTC)

    assert cron.last(SPRING, ten_years) == ten_years.replace(microsecond=0)
    assert cron.last(ten_years, ten_years) is None


@pytest.mark.parametrize("expression", ["", "* * * *", "61 * * * *", "0 0 30 2 *", "x"])
def test_invalid_expression_is_refused(expression: str) -> None:
    with pytest.raises(ConfigurationError, match="cron expression"):
        Cron(expression, "UTC")


@pytest.mark.parametrize("name", ["Europe/Bärlin", "", "../etc", "/etc/passwd"])
def test_unknown_time_zone_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="No time zone"):
        Cron("* * * * *", name)
