"""The options that all long-running commands share: `--processes` and `--http`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from ... import metrics
from ...errors import ConfigurationError
from ...monitoring import process_states
from ...runtime import liveness
from . import _supervisor
from ._http_server import HttpServer
from ._process import say
from ._supervisor import Supervisor, cores, log

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    parser.add_argument(
        "--processes", metavar="N", help='child processes; "auto": one for each core'
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="answer /alive, /ready and /metrics there",
    )


def supervise(options: Mapping[str, Any], stderr: Any) -> None:
    """With `--processes`: run as the parent, and exit when its children have ended. In
    a child, and without the option, return.

    Call it when the command's other options have been checked. Raises CommandError.
    """
    wanted = options["processes"]
    if wanted is None or _supervisor.is_child():
        return
    if options.get("once") or options.get("reload"):
        raise CommandError("--processes goes with neither --once nor --reload.")
    count = cores() if wanted == "auto" else int(wanted) if wanted.isdigit() else 0
    if count < 1:
        raise CommandError('--processes must be 1 or more, or "auto".')
    connections.close_all()
    if not log.hasHandlers():
        handler = logging.StreamHandler(stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    with ExitStack() as stack:
        folder = os.environ.get(MULTIPROC)
        if options["http"] and not folder:
            made = tempfile.TemporaryDirectory(prefix="txmsg-metrics-")
            folder = stack.enter_context(made)
        supervisor = Supervisor(count, {MULTIPROC: folder} if folder else None)
        stack.enter_context(_state_written(needed=True))
        if options["http"]:
            server = HttpServer(
                options["http"],
                lambda within: alive(within) or supervisor.alive(within),
                lambda: supervisor.ready,
                folder,
            )
            _announce(stack.enter_context(server.answering()), stderr)
        code = supervisor.run()
    sys.exit(code)


@contextmanager
def probed(options: Mapping[str, Any], stderr: Any) -> Iterator[None]:
    """Answer liveness probes while the block runs, by the process's state file, and
    with `--http` by HTTP. The parent answers for its children."""
    with ExitStack() as stack:
        stack.enter_context(_state_written(needed=_supervisor.is_child()))
        if options["http"]:
            with suppress(ConfigurationError):  # without the extra: /metrics says so
                metrics.install()
            if not _supervisor.is_child():
                server = HttpServer(
                    options["http"], alive, lambda: liveness.state().ready
                )
                _announce(stack.enter_context(server.answering()), stderr)
        yield


def alive(within: float) -> str:
    """Return the loop of this process that has not run within that many seconds, if
    any, in words."""
    state = liveness.state()
    if state.silent <= within:
        return ""
    return f"{state.loop} has not run for {state.silent:.0f} s"


@contextmanager
def _state_written(*, needed: bool) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(process_states.written())
        except OSError as error:
            refusal = (
                f"The process's state cannot be written to "
                f"{process_states.directory()}: {error}. Set TMPDIR to a directory "
                f"that can be written to."
            )
            if needed:
                raise CommandError(refusal) from error
            log.warning(
                "%s `manage.py txmsg alive` will not find this process.", refusal
            )
        yield


def _announce(address: str, stderr: Any) -> None:
    say(stderr, f"Answering at {address}.")
