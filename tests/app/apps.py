"""The small business application from which the tests send messages."""

from __future__ import annotations

import os

from django.apps import AppConfig
from django.utils.module_loading import import_string


class TestAppConfig(AppConfig):
    """The configuration of the app `tests.app`."""

    name = "tests.app"
    label = "app"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Call the hook of this process, if the test has given it one."""
        hook = os.environ.get("TXMSG_TEST_HOOK")
        if hook:
            import_string(hook)()
