"""Settings that run one app of the example project as a service of its own.

In the example project, all three apps run together as one service. Here each app has
its own database, and all of them share the broker's database. Commits dispatch nothing:
the test decides when to relay.
"""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import DATABASES, INSTALLED_APPS, TXMSG, env

INSTALLED_APPS = [*INSTALLED_APPS, "django_txmsg.spark"]
DATABASES = {**DATABASES, "broker": env.db("BROKER_DATABASE_URL")}
TXMSG = {
    **TXMSG,
    "SERVICE": os.environ["SERVICE"],
    "BROKERS": {"default": {"URL": "database://broker"}},
    "DISPATCH_ON_COMMIT": "off",
}
