"""What all long-running commands share: the options `--processes` and `--http`, signals
and memory.

After a signal, the process finishes the messages in progress and ends. A handler may
take as long as it needs. Once no handler is running, the process has `PATIENCE` seconds
to end. If the process has not ended by then, it must be waiting for a server that does
not answer. So it exits immediately, and other processes take over its unfinished
messages.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, connections, router
from django.db import Error as AnyDatabaseError

from ... import metrics
from ...errors import ConfigurationError, TxmsgError
from ...metrics import of_database, of_processes
from ...models import Worker
from ...monitoring import process_states
from ...monitoring.databases import left_out
from ...monitoring.presence import Presence
from ...monitoring.process_states import WITHIN
from ...relaying.relay import Relay
from ...runtime import liveness
from ...runtime.connections import LARGE
from ...runtime.thread_group import start_daemon
from ...signals import printed
from ..terminal import say
from . import _supervisor
from ._supervisor import Reloader, Supervisor, cores, log

#: Seconds that a stopping process waits for servers, once no handler is running.
PATIENCE = 15.0
#: The parameter of glibc's mallopt(): the size from which a block of memory is the
#: system's again as soon as it is freed.
M_MMAP_THRESHOLD = -3
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(stop: Callable[[], None], stderr: Any) -> Iterator[None]:
    """On the first SIGTERM or SIGINT, call `stop` in another thread. On the second, end
    the process. A child process obeys only SIGTERM, and ends with its parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: Sequence[signal.Signals] = SIGNALS
    if _supervisor.is_child():
        # A terminal sends Ctrl-C and its hang-up to all: the parent decides for them.
        signals = [signal.SIGTERM]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _supervisor.signals_read(signals) as reading:
        # A main thread that waits in C, for a database or a name server, runs no signal
        # handler. This thread ends with the block, which closes the socket's other end.
        start_daemon("txmsg-signals", _obey, reading.dup(), signals, stop, stderr)
        yield


def _obey(
    reading: socket.socket,
    signals: Collection[int],
    stop: Callable[[], None],
    stderr: Any,
) -> None:
    """Call `stop` on the first signal, or when the parent has ended. Exit on the second
    signal. Also exit if the process has not ended `PATIENCE` seconds after the end of
    its last handler, because the process then waits for a server that does not
    answer."""
    sources = [reading.fileno(), *_supervisor.parent_pipe()]
    pause: float | None = None  # until it stops
    seen, since = 0, 0.0
    with reading:
        while True:
            ready = select.select(sources, [], [], pause)[0]
            numbers: list[int] = []
            if reading.fileno() in ready:
                read = reading.recv(64)
                if not read:
                    return  # the block has ended
                numbers = [number for number in read if number in signals]
                seen += len(numbers)
                if seen > 1:
                    os._exit(128 + numbers[-1])
            if pause is None:
                if not numbers and ready == sources[:1]:
                    continue  # a signal of somebody else
                pause, sources = 0.2, sources[:1]
                liveness.stopping()
                stop()
                since = time.monotonic()
            if numbers:
                say(
                    stderr,
                    "Stopping after the messages in progress. Press Ctrl-C again to "
                    "quit now.",
                )
            if liveness.now_running():
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                waiting = sorted(one.name for one in threading.enumerate())
                say(
                    stderr,
                    f"Stopped without an answer after {PATIENCE:g} s. The messages in "
                    f"progress are delivered again. Waiting threads: "
                    f"{', '.join(waiting)}.",
                )
                os._exit(0)


def stay_light() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    Without this, a busy relay spends a third of its time on traversing these objects.
    By default, Python also searches for reference cycles after every 700 new objects.
    That takes a tenth of the remaining time, although a batch creates no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


def return_memory() -> None:
    """Make the C library return the memory of large bodies to the system as soon as the
    memory is free.

    By default, glibc keeps such memory for each thread. A consumer with four threads
    kept 250 MiB. Nothing is changed if the C library is not glibc, or if the user has
    set a limit.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def heartbeat(relay: Relay, stop: Callable[[], None]) -> AbstractContextManager[None]:
    """Send heartbeats of a relay's process while the block runs. If the thread fails,
    `stop` is called, and the error is raised."""
    presence = Presence("relay", router.db_for_write(Worker))
    return presence.beating(lambda: relay.in_flight, stop)


# `--http HOST:PORT`: `/alive`, `/ready` and `/metrics` of a worker.

#: Seconds that a client may take to send its request.
TIMEOUT = 10.0

#: Most requests that are read at the same time.
MOST = 32

#: Seconds that a request for metrics waits for an earlier one.
TURN = 5.0


class HttpServer(ThreadingHTTPServer):
    """Answers HTTP requests for one process, or for a parent and its children.

    `alive` takes a number of seconds. It returns a description of a loop that has not
    run for that long, or "" if every loop has run within that time. In `folder`,
    several processes share their Prometheus metrics.
    """

    daemon_threads = True

    def __init__(
        self,
        address: str,
        alive: Callable[[float], str],
        folder: str | None = None,
    ) -> None:
        self.alive, self.folder = alive, folder
        #: Held by the one request that queries the database.
        self.querying = threading.Lock()
        #: Connections whose requests are being read, each with its beginning.
        self.reading: dict[socket.socket, float] = {}
        host, port = address_of(address)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise CommandError(f"--http {address}: {error.strerror}.") from error

    def service_actions(self) -> None:
        """Read no more of a request that takes too long, or of the oldest requests if
        there are too many. The socket's timeout ends with each byte."""
        reading, late = list(self.reading.items()), time.monotonic() - TIMEOUT
        for left, (connection, since) in enumerate(reading, MOST - len(reading)):
            if left < 0 or since < late:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    @contextmanager
    def answering(self, stderr: Any) -> Iterator[None]:
        """Answer while the block runs. Print the server's address first."""
        start_daemon("txmsg-http", self.serve_forever)
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else f"{host!s}"
        say(stderr, f"Answering at http://{shown}:{port}.")
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one HTTP request."""

    server: HttpServer
    timeout = TIMEOUT

    def setup(self) -> None:
        """Begin to read the request."""
        super().setup()
        self.server.reading[self.connection] = time.monotonic()

    def finish(self) -> None:
        """End the request."""
        self.server.reading.pop(self.connection, None)
        super().finish()

    def do_GET(self) -> None:
        """Answer /alive?within=SECONDS, /ready and /metrics."""
        self.server.reading.pop(self.connection, None)
        address = urlsplit(self.path)
        path = address.path.rstrip("/")
        if path == "/alive":
            self._alive(address.query)
        elif path == "/ready":
            ready = liveness.state().ready
            self._answer(200 if ready else 503, "ready" if ready else "not ready")
        elif path == "/metrics":
            self._metrics()
        else:
            self._answer(404, "There are /alive, /ready and /metrics.")

    def do_HEAD(self) -> None:
        """Answer like GET, without the body."""
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because a probe comes every few seconds."""

    def _alive(self, query: str) -> None:
        try:
            within = float(parse_qs(query).get("within", [str(WITHIN)])[0])
            if not within >= 0:
                raise ValueError
        except ValueError:
            self._answer(400, "within is a number of seconds.")
            return
        why = self.server.alive(within)
        self._answer(503 if why else 200, why or "alive")

    def _metrics(self) -> None:
        try:
            text = of_processes(self.server.folder)
        except ConfigurationError as error:
            self._answer(501, str(error))
            return
        # A worker's own counts are useful while the database is away. If an earlier
        # request still waits for the database, a further one would only take one more
        # connection.
        if self.server.querying.acquire(timeout=TURN):
            try:
                with suppress(DatabaseError, InterfaceError):
                    text += of_database()
            finally:
                self.server.querying.release()
                connections.close_all()
        self._answer(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _answer(
        self, status: int, text: str | bytes, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        body = text if isinstance(text, bytes) else f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port in a text. Raises CommandError if the text is not
    HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise CommandError(
            f"--http {text!r} must be HOST:PORT, as 0.0.0.0:8071 for all interfaces."
        )
    return host.strip("[]"), int(port)


# The options, and what a command runs in.

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"


def not_served(databases: Sequence[str]) -> str:
    """Return a line that names the databases which a relay of `databases` does not
    serve, or "" if it serves all."""
    others = left_out()
    if not others:
        return ""
    return (
        f"Serving the databases {', '.join(databases)}, but not {', '.join(others)}. "
        f"If messages are stored there with using=, also run manage.py relay "
        f"--database {' --database '.join(others)}."
    )


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


def _supervise(options: Mapping[str, Any], stderr: Any) -> None:
    """With `--processes` or `--reload`, run children, and exit when they have ended. In
    a child, or without these options, do nothing.

    Raises CommandError if `--processes` or `--http` has a wrong value, or if
    `--processes` cannot be combined with another option.
    """
    wanted, reload = options["processes"], options.get("reload", False)
    if _supervisor.is_child() or (wanted is None and not reload):
        return
    if wanted is None:
        wanted = "1"
    elif options.get("once") or reload:
        raise CommandError("--processes goes with neither --once nor --reload.")
    count = cores() if wanted == "auto" else int(wanted) if wanted.isdecimal() else 0
    if count < 1:
        raise CommandError('--processes must be 1 or more, or "auto".')
    connections.close_all()
    # With `--reload`, somebody looks at the terminal, even if the log is a file.
    if not (printed(log, logging.WARNING) if reload else log.hasHandlers()):
        handler = logging.StreamHandler(stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    with ExitStack() as stack:
        folder = os.environ.get(MULTIPROC)
        if options["http"] and not folder:
            made = tempfile.TemporaryDirectory(prefix="txmsg-metrics-")
            folder = stack.enter_context(made)
        shared = {MULTIPROC: folder} if folder else {}
        supervisor = Reloader(shared) if reload else Supervisor(count, shared)
        stack.enter_context(_state_written(needed=True))
        if options["http"] is not None:
            server = HttpServer(
                options["http"],
                lambda within: alive(within) or supervisor.alive(within),
                folder,
            )
            stack.enter_context(server.answering(stderr))
        code = supervisor.run()
    sys.exit(code)


def _write_rest() -> None:
    """Write the lines of a log that are left. If the output is closed, drop them."""
    for stream in (sys.stdout, sys.stderr):
        say(stream)


@contextmanager
def working(
    stop: Callable[[], None], options: Mapping[str, Any], stderr: Any
) -> Iterator[None]:
    """Limit the memory of the process. While the block runs, call `stop` on a signal.
    Also answer liveness probes through the process's state file, and with `--http` by
    HTTP. The parent of `--processes` or `--reload` answers HTTP for its children.

    In that parent, run the children instead, and exit. So check the command's other
    options before. Raises CommandError if the block ends because of an error.
    """
    with ExitStack() as stack:
        stack.callback(_write_rest)
        _supervise(options, stderr)
        return_memory()
        if not options.get("once"):
            stay_light()
        stack.enter_context(stop_on_signals(stop, stderr))
        stack.enter_context(_state_written(needed=_supervisor.is_child()))
        if options["http"] is not None:
            with suppress(ConfigurationError):  # without the extra: /metrics says so
                metrics.install()
            if not _supervisor.is_child():
                server = HttpServer(options["http"], alive)
                stack.enter_context(server.answering(stderr))
        try:
            yield
        except (TxmsgError, AnyDatabaseError) as error:
            raise CommandError(
                f"It ended: {str(error).rstrip('.')}. Messages not dispatched stay in "
                f"the outbox, messages not processed with their broker."
            ) from error


def alive(within: float) -> str:
    """Return a description of a loop of this process that has not run for `within`
    seconds. Return "" if every loop has run within that time."""
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
                f"The process's state cannot be written: {error}. Set TMPDIR to a "
                f"directory that can be written to."
            )
            if needed:
                raise CommandError(refusal) from error
            log.warning(
                "%s `manage.py txmsg alive` will not find this process.", refusal
            )
        yield
