"""Computes when a recurring message is due: a cron expression in the local time of a
time zone.

Clock changes are handled like in Debian's cron. If the hour or minute field begins with
a star, ticks follow elapsed time. Otherwise, each time of day has one tick a day. If
the clock skips a time of day in spring, the tick is right after the change. If the
clock repeats a time of day in autumn, the tick is at its first occurrence.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from zoneinfo import ZoneInfo

from ..errors import ConfigurationError

UTC = dt.timezone.utc
_SECOND = dt.timedelta(seconds=1)
#: Longer than any clock change.
_A_CHANGE = dt.timedelta(hours=3)


@dataclass(frozen=True)
class Cron:
    """The ticks of a cron expression with five fields, or with six fields of which the
    first is seconds.

    Ticks are aware instants in UTC. Raises ConfigurationError if the expression is
    malformed or never due, or the time zone is unknown.
    """

    expression: str
    tz: str

    def __post_init__(self) -> None:
        if self.after(dt.datetime(2000, 1, 1, tzinfo=UTC)) is None:
            raise ConfigurationError(f"{self.expression!r} is never due.")

    def __str__(self) -> str:
        return f"{self.expression} {self.tz}"

    def after(self, instant: dt.datetime) -> dt.datetime | None:
        """Return the first tick after an instant, or None. The results are cached,
        because a relay asks at each check what comes after the last tick."""
        return _after(self, instant)

    def between(self, after: dt.datetime, until: dt.datetime) -> Iterator[dt.datetime]:
        """Yield the ticks later than `after`, up to and including `until`."""
        found = takewhile(lambda tick: tick <= until, self._ticks(after))
        return (tick for tick in found if tick > after)

    def last(self, after: dt.datetime, until: dt.datetime) -> dt.datetime | None:
        """Return the last tick of `between()`, or None. The run time does not depend on
        the length of the interval."""
        # From inside a repeated hour, ticks of its first occurrence are not found.
        margin = _A_CHANGE if len(self.expression.split()) == 5 else _SECOND
        found = self._ticks(until.replace(microsecond=0) + margin, reverse=True)
        tick = next((tick for tick in found if tick <= until), None)
        if tick is not None:
            # Backwards, cronsim skips some ticks right after a half-hour change.
            for later in self.between(tick, until):
                tick = later
        return tick if tick is not None and tick > after else None

    def _ticks(
        self, start: dt.datetime, *, reverse: bool = False
    ) -> Iterator[dt.datetime]:
        from cronsim import CronSim, CronSimError

        local = start.astimezone(_zone(self.tz))
        try:
            found = CronSim(self.expression, local, reverse=reverse)
        except (CronSimError, AttributeError) as error:
            raise ConfigurationError(
                f"{self.expression!r} is not a cron expression: {error}. It has five "
                f'fields, like "*/5 * * * *": minute, hour, day, month, weekday.'
            ) from None
        return (tick.astimezone(UTC) for tick in found)


@lru_cache(maxsize=8192)
def _after(cron: Cron, instant: dt.datetime) -> dt.datetime | None:
    # From inside a repeated hour, cronsim may return a tick of its first occurrence.
    return next((tick for tick in cron._ticks(instant) if tick > instant), None)


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise ConfigurationError(
            f"No time zone {name!r}; the names are like Europe/Berlin."
        ) from None
