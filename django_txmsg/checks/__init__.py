"""`manage.py check`: what is wrong with the settings, before it costs a message.

Errors are what cannot work, warnings what works until a bad day. Nothing is connected,
but by what `--database` asks for.
Each id, what it means and what to do: docs/reference/checks.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.core.checks import CheckMessage, Error, Tags, register

from .. import conf
from . import (
    celery,
    contract,
    deployment,
    notifications,
    pools,
    schedule,
    settings,
    stages,
)

TAG = "txmsg"


@register(TAG)
def check(**_: object) -> list[CheckMessage]:
    """Return what is wrong with the settings, the databases and the stages."""
    found = settings.check()
    if any(one.id in settings.UNREADABLE for one in found):
        # Nothing more can be said by settings that cannot be read.
        return found
    found += settings.check_values()
    if not any(isinstance(one, Error) for one in found):
        for look in (stages, contract, schedule, pools, celery):
            found += look.check()
    return found


@register(TAG, deploy=True)
def check_deployment(**_: object) -> list[CheckMessage]:
    """Return what must not go into production: `manage.py check --deploy`."""
    return [] if conf.problems() else deployment.check()


@register(Tags.database)
def check_databases(
    databases: Sequence[str] | None = None, **_: object
) -> list[CheckMessage]:
    """Return what is wrong with the way to the databases: `check --database ALIAS`."""
    return [] if conf.problems() else list(notifications.check(databases or ()))
