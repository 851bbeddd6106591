"""Settings for one of the example project's services, run alone.

In the example project all three apps run in one process group. Here each app is a
service with its own database, and all of them share the broker's database. Nothing is
dispatched automatically: the test decides when.
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
