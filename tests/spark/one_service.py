"""Settings of one of the example project's services, run by itself.

The project is one process group to try out; here each of its three apps is a service
with a database of its own, and they share the broker's. Nothing leaves by itself: the
test says when.
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
