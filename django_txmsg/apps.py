"""The Django app: registers checks and finds every installed app's stages."""

from __future__ import annotations

from contextlib import suppress

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class TxmsgConfig(AppConfig):
    """The app in INSTALLED_APPS. When it is loaded, it uses no database and opens no
    socket."""

    name = "django_txmsg"
    label = "django_txmsg"
    verbose_name = "Transactional messages"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks, conf, errors, stages, tasks_backend  # noqa: F401 - register
        from .relaying import dispatcher  # noqa: F401 - as does the dispatcher

        conf.hide_passwords()
        stages.provide(tasks_backend.stages)
        try:
            autodiscover_modules("stages")
        except Exception as error:
            from .management.broken_stages import tell_briefly

            tell_briefly(error)
            raise
        with suppress(errors.ConfigurationError):  # `check` reports it
            if conf.get().FLOWS.BATCHES:
                from .flows import batches  # noqa: F401 - declares itself
