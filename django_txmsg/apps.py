"""The Django app: registers checks and finds every installed app's stages. If a module
of stages cannot be imported, commands print a few lines, and no long traceback."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules

_PACKAGE = str(Path(__file__).parents[0])


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
            if _starts_command():
                sys.exit(_report(error))
            raise
        with suppress(errors.ConfigurationError):  # `check` reports it
            if conf.get().FLOWS.BATCHES:
                from .flows import batches  # noqa: F401 - declares itself


def _starts_command() -> bool:
    """Return whether Django starts for a command that this error ends. Such a command
    prints the line of code to correct, and no traceback.

    The whole traceback is still printed with `--traceback`, in servers, in tests, and
    if another tool, such as Sentry, reports uncaught errors.
    """
    commands = "django.core.management"
    frames = (frame for frame, _ in traceback.walk_stack(None))
    # `runserver` waits until the error is mended.
    waits = "runserver" in sys.argv and "--noreload" not in sys.argv
    return (
        any(frame.f_globals.get("__name__") == commands for frame in frames)
        and sys.excepthook is sys.__excepthook__
        and not (waits or "--traceback" in sys.argv)
    )


def _report(error: Exception) -> str:
    """Return a text with the last executed line of the project's code, the error and
    what to do."""
    from .management.terminal import printable_lines  # imports the models

    paths = sysconfig.get_paths()
    others = ("<", _PACKAGE, paths["stdlib"], paths["purelib"], paths["platlib"])
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(others)
    ]
    raised_at = "".join(
        [*traceback.format_list(own[-1:]), *traceback.format_exception_only(error)]
    )
    return (
        "Django cannot start, because a module of stages cannot be imported:\n"
        f"{printable_lines(raised_at)}"
        "Fix that line. --traceback shows all of Python's traceback.\n"
    )
