"""Checks our backends in the TASKS setting, for `manage.py check`.

Here and not in the backend's own `check()`: the backport calls that only if it is
installed as an app.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage, Error, register

from .. import conf
from . import declared


@register("txmsg")
def check(**_: object) -> list[CheckMessage]:
    """Return what is wrong with options and names."""
    return [] if conf.problems() else list(_found())


def _found() -> Iterator[CheckMessage]:
    for backend in declared.backends():
        for name, why in backend.problems():
            yield Error(
                f"{name} {why}.",
                hint="See docs/how-to/django-tasks.md for the options.",
                id="txmsg.E040",
            )
