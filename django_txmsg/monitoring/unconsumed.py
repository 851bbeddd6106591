"""Destinations to which messages go and that nobody is known to consume.

What becomes of a message at a broker is not seen from here: it is dispatched, and that
is good news. So a misspelt name would go unnoticed for as long as nobody misses what it
should have caused.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from .. import conf, wire

#: Those that got a message in the time just past.
RECENT = dt.timedelta(days=1)


def unconsumed(
    dispatched: Mapping[str, dt.datetime | None],
    consumed: Iterable[str],
    now: dt.datetime,
) -> dict[str, str]:
    """Return the destinations that got messages lately and that are neither consumed
    here nor known to be consumed elsewhere, each with the name that was perhaps meant.

    `dispatched` says when the last message left for each, `consumed` what stages here
    consume. Unless TXMSG["KNOWN_DESTINATIONS"] says what others consume, only a name
    that looks misspelt is one.
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
    """Return what two names have in common of which one is the other misspelt: letters
    in another order, another separator. One letter more makes another word: what was
    placed is not what is to be placed."""
    return "".join(sorted(filter(str.isalnum, name.lower())))
