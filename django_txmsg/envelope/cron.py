"""When a recurring message is due: a cron expression on the wall clock of a time zone.

A clock change is taken as Debian's cron takes it. Where the hour or the minute begins
with a star, real time counts. Any other time of day comes once a day: one that is
skipped in spring right after the change, one that comes twice in autumn at its first.
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
#: Longer than any clock is turned back.
_A_CHANGE = dt.timedelta(hours=3)


@dataclass(frozen=True)
class Cron:
    """The ticks of an expression of five fields, or six with seconds first.

    Ticks are aware instants in UTC. Raises ConfigurationError for an expression that
    is none or never due, and for an unknown time zone.
    """

    expression: str
    tz: str

    def __post_init__(self) -> None:
        if self.after(dt.datetime(2000, 1, 1, tzinfo=UTC)) is None:
            raise ConfigurationError(f"{self.expression!r} is never due.")

    def __str__(self) -> str:
        return f"{self.expression} {self.tz}"

    def after(self, instant: dt.datetime) -> dt.datetime | None:
        """Return the first tick after an instant; None when there is none."""
        # From within an hour that comes twice, one of its first time may be given.
        return next((tick for tick in self._ticks(instant) if tick > instant), None)

    def between(self, after: dt.datetime, until: dt.datetime) -> Iterator[dt.datetime]:
        """Yield the ticks after an instant until another, that one included."""
        found = takewhile(lambda tick: tick <= until, self._ticks(after))
        return (tick for tick in found if tick > after)

    def last(self, after: dt.datetime, until: dt.datetime) -> dt.datetime | None:
        """Return the last tick of `between()`, in a time that does not grow with it."""
        # From within an hour that comes twice, those of its first time are not found.
        margin = _A_CHANGE if len(self.expression.split()) == 5 else _SECOND
        found = self._ticks(until.replace(microsecond=0) + margin, reverse=True)
        tick = next((tick for tick in found if tick <= until), None)
        if tick is not None:
            # Backwards, some right behind a change of half an hour are passed over.
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
                f"{self.expression!r} is no cron expression: {error}. It has five "
                f'fields, like "*/5 * * * *": minute, hour, day, month, weekday.'
            ) from None
        return (tick.astimezone(UTC) for tick in found)


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise ConfigurationError(
            f"No time zone {name!r}; the names are like Europe/Berlin."
        ) from None
