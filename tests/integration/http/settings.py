"""Settings of the web processes and consumers that these tests start and kill."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403 - a variant of the suite's settings
from tests.settings import DATABASES, INSTALLED_APPS, MIDDLEWARE, TXMSG

INSTALLED_APPS = [*INSTALLED_APPS, "tests.integration.http"]
MIDDLEWARE = [
    *(one for one in MIDDLEWARE if not one.endswith("CsrfViewMiddleware")),
    "django_txmsg.middleware.OutboxMiddleware",
]
ROOT_URLCONF = "tests.integration.http.urls"
DATABASES["default"]["ATOMIC_REQUESTS"] = "TXMSG_TEST_ATOMIC_REQUESTS" in os.environ
DATABASES["default"]["CONN_MAX_AGE"] = 60
TXMSG = {"SERVICE": "web", **TXMSG}
