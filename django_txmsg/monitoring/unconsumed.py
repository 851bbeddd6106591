"""Destinations that receive messages but have no known consumer.

What happens to a message at a broker is not visible here: it counts as dispatched. So a
misspelt name would go unnoticed until someone misses its effect.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from .. import conf, wire

#: Destinations that received a message in the last period of this length.
RECENT = dt.timedelta(days=1)


def unconsumed(
    dispatched: Mapping[str, dt.datetime | None],
    consumed: Iterable[str],
    now: dt.datetime,
) -> dict[str, str]:
    """Return the destinations that recently received messages and are neither consumed
    here nor known to be consumed elsewhere, each with the name that was perhaps meant.

    `dispatched` has the last dispatch to each, `consumed` the destinations of stages
    here. Without TXMSG["KNOWN_DESTINATIONS"], only names that look misspelt are
    returned.
    """
    known = conf.get().KNOWN_DESTINATIONS
    here = {_letters(name): name for name in consumed}
    found = {}
    for name, last in sorted(dispatched.items()):
        if last is None or now - last > RECENT or wire.is_control(name):
            continue
        meant = here.get(_letters(name), "")
        if meant == name or any(fnmatchcase(name, one) for one in known):
            continue
        if known or meant:
            found[name] = meant
    return found


def _letters(name: str) -> str:
    """Return a key that a name shares with its misspellings: the same letters in
    another order, or with another separator. An additional letter makes another word:
    "placed" is not "place"."""
    return "".join(sorted(filter(str.isalnum, name.lower())))
