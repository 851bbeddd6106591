"""Whether this process can find the contract of its typed messages."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning

from .. import codecs, conf, stages
from ..contracts import committed
from ..errors import ConfigurationError


def check() -> Iterator[CheckMessage]:
    """Report that a process cannot find the contract, or that the path depends on its
    working directory."""
    file = codecs.contract_path()
    is_there = file.exists()
    if is_there:
        try:
            committed.read(file)
        except ConfigurationError as error:
            yield Error(
                f"{error} Messages do not say which versions read them: code that is "
                f"too old for one would bury it.",
                hint="Restore the file; or remove it and run: manage.py txmsg "
                "contracts export",
                id="txmsg.E015",
            )
    if conf.get().CONTRACT is not None or hasattr(django_settings, "BASE_DIR"):
        return
    typed = any(stage.accepts is not None for stage in stages.all_stages())
    if typed or is_there:
        yield Warning(
            f'The settings have neither BASE_DIR nor TXMSG["CONTRACT"]: the contract '
            f"is looked for in the directory that a process is started in, now "
            f"{file.resolve()}. Where it is not found, messages do "
            f"not say which versions read them.",
            hint='Give TXMSG["CONTRACT"] the path of asyncapi.json.',
            id="txmsg.W008",
        )
