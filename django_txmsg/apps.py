"""The Django app: registers checks and finds every installed app's stages. If a module
of stages cannot be imported, commands print a few lines, and no long traceback."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

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
            _tell_briefly(error)
            raise
        with suppress(errors.ConfigurationError):  # `check` reports it
            if conf.get().FLOWS.BATCHES:
                from .flows import batches  # noqa: F401 - declares itself


def _tell_briefly(error: Exception) -> None:
    """Shorten the report of `error`, which was raised while Django started. If a
    command ends because of this error, the command prints the line of code to correct,
    and no traceback.

    The whole traceback is still printed with `--traceback`, in servers, in tests, and
    if another tool, such as Sentry, reports uncaught errors.
    """
    starts_command = any(
        frame.f_globals.get("__name__") == "django.core.management"
        for frame, _ in traceback.walk_stack(None)
    )
    own_hook = sys.excepthook is sys.__excepthook__
    if not starts_command or not own_hook or "--traceback" in sys.argv:
        return

    report = _report(error)

    def ended(
        kind: type[BaseException], raised: BaseException, trace: TracebackType | None
    ) -> None:
        if raised is error:
            sys.stderr.write(report)
        else:
            sys.__excepthook__(kind, raised, trace)

    def thread_ended(ending: threading.ExceptHookArgs) -> None:
        # `runserver` raises it again in its thread, and waits until it is mended.
        if ending.exc_value is error:
            sys.stderr.write(report)
        else:
            threading.__excepthook__(ending)

    sys.excepthook, threading.excepthook = ended, thread_ended


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
