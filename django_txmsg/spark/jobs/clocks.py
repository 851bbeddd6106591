"""Clocks that differ between services, as the messages between them show it.

If all messages from one service to another take about the same long time, whenever they
were sent, the clocks of the two differ. Messages that wait for a consumer would take
different times: the earlier they came, the longer.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..tally import Line
from .places import Place

#: Smaller differences are not reported.
SMALL = dt.timedelta(minutes=1)
#: Fewest messages that show a difference.
FEW = 3
#: How much their times may differ, as a fraction of the period in which they were sent.
SPREAD = 0.1


@dataclass(frozen=True)
class Difference:
    """By how much the receiver's clock is ahead of the sender's, or behind it if
    negative."""

    sender: str
    receiver: str
    ahead: dt.timedelta

    def describe(self) -> str:
        """Return the difference in words."""
        seconds = abs(self.ahead.total_seconds())
        side = "ahead of" if self.ahead > dt.timedelta() else "behind"
        return (
            f"The clock of {self.receiver} is about {seconds:,.0f} s {side} that of "
            f"{self.sender}: that much is not counted as late. Set the clocks."
        )


def differences(places: Iterable[Place], prompt: Sequence[Line]) -> list[Difference]:
    """Return the differences that messages show. `prompt` counts messages that were not
    read because they were processed promptly: if there are some, the clocks agree."""
    pairs: dict[tuple[str, str], list[Place]] = {}
    for one in places:
        if one.messages and one.sender != one.receiver:
            pairs.setdefault((one.sender, one.receiver), []).append(one)
    soon = {(one.destination, one.sent_on) for one in prompt}
    found = []
    for pair, own in sorted(pairs.items()):
        least = dt.timedelta(microseconds=min(one.least_us for one in own))
        if abs(least) >= SMALL and any(
            _shows(one, least) and not any(_while(one, *known) for known in soon)
            for one in own
        ):
            found.append(Difference(*pair, least))
    return found


def _shows(place: Place, least: dt.timedelta) -> bool:
    """Return whether the messages to a destination show that `least`, the shortest time
    of all, is a difference of the clocks."""
    if place.messages < FEW:
        return False
    spread = dt.timedelta(microseconds=place.median_us) - least
    if least < dt.timedelta():
        # A single message may seem to arrive before it was sent: most must.
        return spread < max(SMALL, SPREAD * -least)
    return spread < SPREAD * (place.last_at - place.first_at)


def _while(place: Place, destination: str, day: dt.date) -> bool:
    return (
        place.destination == destination
        and place.first_at.date() <= day <= place.last_at.date()
    )
