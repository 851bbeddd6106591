"""The checks of `manage.py check`, which find faults in the settings.

An error reports a setting that cannot work. A warning reports a setting that fails
under some conditions. Checks open no connection, except with `--database`.
docs/reference/checks.md explains each id, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.core.checks import CheckMessage, Error, Tags, register

from .. import conf
from . import settings, stages
from .databases import check_notifications, check_pools, check_routers, check_runs

TAG = "txmsg"


@register(TAG)
def check(**_: object) -> list[CheckMessage]:
    """Return the faults of the settings, the databases and the stages."""
    found = list(settings.check())
    if found:  # settings that cannot be read permit no further checks
        return found
    found += settings.check_values()
    usable = not any(isinstance(one, Error) for one in found)
    # Also after errors: a broker's URL may be wrong only because of its database.
    found += stages.check_databases()
    if usable:
        for look in (
            stages.check,
            stages.check_contract,
            stages.check_schedule,
            check_routers,
            check_pools,
            settings.check_celery,
        ):
            found += look()
    return found


@register(TAG, deploy=True)
def check_deployment(**_: object) -> list[CheckMessage]:
    """The check of `manage.py check --deploy`. Return the settings that are unsafe in
    production."""
    return [] if conf.problems() else settings.check_deployment()


@register(Tags.database)
def check_databases(
    databases: Sequence[str] | None = None, **_: object
) -> list[CheckMessage]:
    """The check of `manage.py check --database ALIAS`. Return a warning for each of
    these databases from which this process receives no notifications. Return errors for
    the open runs of flows in these databases that this code cannot continue."""
    if conf.problems():
        return []
    asked = databases or ()
    return [*check_notifications(asked), *check_runs(asked)]
