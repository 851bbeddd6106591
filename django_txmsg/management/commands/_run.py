"""`manage.py txmsg run`: everything that a service runs besides its web server, in one
process, with one readable line for each message."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.core.management.color import Style
from django.db import Error as AnyDatabaseError
from django.db import router

from ... import conf, signals
from ...consuming.consumer import Consumer
from ...errors import ConfigurationError, TxmsgError
from ...flows.deadlines import Deadlines
from ...models import Worker
from ...monitoring.alerting import Alerting
from ...monitoring.databases import with_tables
from ...monitoring.presence import Presence
from ...monitoring.pruning import Pruner
from ...relaying.relay import Relay
from ...runtime.thread_group import ThreadGroup
from ...scheduling.timekeeper import Timekeeper
from ...stages import Stage, all_stages
from ..tables import require_tables
from ..terminal import printable
from . import _child as child
from . import _reloading as reloading
from ._process import heartbeat, return_memory, say, stay_light, stop_on_signals
from ._workers import add_arguments, probed, supervise


class Lines:
    """Reports the outcome of each message as it happens: `printing()`.

    `write` takes a line. A message dispatched to a destination in `consumed` is
    reported only when a stage of this process has processed it.
    """

    def __init__(self, write: Any, style: Style, consumed: Collection[str]) -> None:
        self._write, self._style, self._consumed = write, style, consumed
        self._broken = False

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Print for the duration of the block, except events that the log prints to the
        same place."""
        receivers = (
            (signals.message_dispatched, self._dispatched),
            (signals.message_processed, self._processed),
            (signals.message_duplicate, self._duplicate),
            (signals.message_redelivered, self._redelivered),
            (signals.message_buried, self._buried),
        )
        reported = [pair for pair in receivers if not signals.on_terminal(pair[0])]
        # If the user configured no log handlers, Python would print warnings a second
        # time.
        quiet = logging.NullHandler()
        if not signals.log.hasHandlers():
            signals.log.addHandler(quiet)
        for signal, receiver in reported:
            signal.connect(receiver)
        try:
            yield
        finally:
            for signal, receiver in reported:
                signal.disconnect(receiver)
            signals.log.removeHandler(quiet)

    def _dispatched(self, destination: str, broker: str, **facts: Any) -> None:
        if destination not in self._consumed:
            self._say(f"sent to broker {broker}", destination, **facts)

    def _processed(
        self, duration: float, stage: str, attempt: int, **facts: Any
    ) -> None:
        tries = f" at attempt {attempt}" if attempt > 1 else ""
        result = f"processed in {duration * 1000:.0f} ms{tries}"
        self._say(self._style.SUCCESS(result), stage, **facts)

    def _duplicate(self, stage: str, **facts: Any) -> None:
        self._say("a copy, dropped", stage, **facts)

    def _redelivered(
        self, stage: str, attempt: int, delay: float, error: str, **facts: Any
    ) -> None:
        result = f"attempt {attempt} failed, next in {delay:.1f} s: {printable(error)}"
        self._say(self._style.WARNING(result), stage, **facts)

    def _buried(
        self, stage: str, destination: str, reason: str, error: str, **facts: Any
    ) -> None:
        result = f"dead letter ({reason}): {printable(error)}"
        self._say(self._style.ERROR(result), stage or destination, **facts)

    def _say(self, what: str, where: str, *, id: object, **_: Any) -> None:
        now = time.strftime("%H:%M:%S")  # like the development server
        if self._broken:
            return
        try:
            self._write(f"{now} {printable(where)}: {what}  {id}")
        except (OSError, ValueError):
            # The reader of our output is gone, but the messages are not.
            self._broken = True


class Service:
    """A relay with its schedule, a consumer of all stages, and pruning, which end
    together."""

    def __init__(
        self, databases: Sequence[str], brokers: Sequence[str], stages: Sequence[Stage]
    ) -> None:
        self._stop = threading.Event()
        self.relay = Relay(list(databases), list(brokers))
        self.consumer = Consumer(stages)
        self._group = ThreadGroup(self.stop)
        self._group.add("txmsg-relay", self.relay.run)
        self._group.add("txmsg-consumer", self._consume)
        self._group.add("txmsg-pruning", Pruner(databases, self._stop).run)
        self._time_loops = [
            Timekeeper(databases), Deadlines(databases), Alerting(databases),
        ]  # fmt: skip
        for loop in self._time_loops:
            loop.add_to(self._group)

    def _consume(self) -> None:
        self.consumer.run()
        self.stop()  # it may have reached its recycle limits

    @property
    def in_flight(self) -> int:
        """Messages that the relay has claimed and not settled."""
        return self.relay.in_flight

    def stop(self) -> None:
        """Finish messages in progress, start no new ones. Callable from any thread or
        signal."""
        self._stop.set()
        for loop in self._time_loops:
            loop.stop()
        self.relay.stop()
        self.consumer.stop()

    def run(self) -> None:
        """Run until stopped. Raises the error that ended a part of it, if any."""
        self._group.start()
        self._group.join()


class Command(BaseCommand):
    """Relay, run stages, execute bulk operations and prune."""

    help = (
        "Relay, stages, control messages, bulk operations and pruning in one process, "
        "until stopped (SIGTERM or SIGINT)."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--reload",
            action="store_true",
            help="start again after each change of the code: for development",
        )
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["reload"] and not options["processes"] and not child.is_child():
            sys.exit(reloading.Reloader(self.stderr).run())
        databases, brokers = with_tables(), sorted(conf.get().BROKERS)
        require_tables(*databases, waits=True)
        stages = all_stages()
        try:
            service = Service(databases, brokers, stages)
        except ConfigurationError as error:
            raise CommandError(str(error)) from error
        supervise(options, self.stderr)
        return_memory()
        stay_light()
        with ExitStack() as stack:
            if options["verbosity"] > 0:
                self._introduce(databases, brokers, stages)
                consumed = {stage.destination for stage in stages}
                lines = Lines(self._line, self.style, consumed)
                stack.enter_context(lines.printing())
            stack.enter_context(stop_on_signals(service.stop, self.stderr))
            stack.enter_context(probed(options, self.stderr))
            presence = Presence("relay", router.db_for_write(Worker))
            stack.enter_context(heartbeat(presence, service))
            try:
                service.run()
            except (TxmsgError, AnyDatabaseError) as error:
                raise CommandError(
                    f"It ended: {str(error).rstrip('.')}. Messages not dispatched "
                    "stay in the outbox, messages not processed with their broker."
                ) from error

    def _introduce(
        self, databases: Sequence[str], brokers: Sequence[str], stages: Sequence[Stage]
    ) -> None:
        names = ", ".join(stage.name for stage in stages)
        self._line(f"Running: {names or 'no stage'}.")
        if not stages:
            self._line(
                "Stages are searched in each app's module named stages (APP/stages.py)."
            )
        self._line(
            f"Relaying from {', '.join(databases)} to {', '.join(brokers)}. Stop with "
            f"Ctrl-C."
        )

    def _line(self, text: str) -> None:
        say(self.stdout, text)
