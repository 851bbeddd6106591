"""`manage.py txmsg run`: runs all of a service's workers in one process, and prints one
line for each message."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.core.management.base import BaseCommand
from django.core.management.color import Style

from ... import conf, signals
from ...consuming.consumer import Consumer
from ...flows.deadlines import Deadlines
from ...monitoring.alerting import Alerting
from ...monitoring.databases import with_only_queues, with_tables
from ...monitoring.retention import Pruner
from ...relaying.relay import Relay
from ...runtime.thread_group import ThreadGroup
from ...scheduling.time_loop import keeping_time
from ...scheduling.timekeeper import Timekeeper
from ...stages import Stage, all_stages
from ..terminal import SEARCHED, printable, require_tables, say
from ._workers import add_arguments, heartbeat, not_served, working

#: Seconds that the relay waits for the stages of topics to subscribe.
SUBSCRIBING = 10.0


class Lines:
    """Prints a line for the outcome of each message.

    `write` prints a line. `consumed` names the destinations that this process's stages
    consume. Dispatching a message to one of them prints no line, because the stage's
    outcome will print a line.
    """

    def __init__(self, write: Any, style: Style, consumed: Collection[str]) -> None:
        self._write, self._style, self._consumed = write, style, consumed

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Print lines while the block runs. Omit events that the project's log already
        prints to the same terminal."""
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
        for sent, receiver in reported:
            sent.connect(receiver)
        try:
            yield
        finally:
            for sent, receiver in reported:
                sent.disconnect(receiver)
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
        self._write(f"{now} {printable(where)}: {what}  {id}")


class Service:
    """A relay, the schedule of recurring messages, a consumer of all stages, and
    pruning. They end together."""

    def __init__(
        self, databases: Sequence[str], brokers: Sequence[str], stages: Sequence[Stage]
    ) -> None:
        self.relay = Relay(list(databases), list(brokers))
        self.consumer = Consumer(stages)
        self._group = ThreadGroup(self.stop)
        self._group.add("txmsg-relay", self._send)
        self._group.add("txmsg-consumer", self._consume)
        self._time_loops = [
            Timekeeper(databases), Deadlines(databases), Alerting(databases),
            Pruner([*databases, *with_only_queues()]),
        ]  # fmt: skip

    def _send(self) -> None:
        # A topic keeps no message for a stage that has never subscribed. Recurring
        # messages and time-outs may be sent after their commit, without the relay.
        self.consumer.wait_for_subscriptions(SUBSCRIBING)
        with keeping_time(self._time_loops, self.stop):
            self.relay.run()

    def _consume(self) -> None:
        self.consumer.run()
        self.stop()  # it may have reached its recycle limits

    def stop(self) -> None:
        """Make `run()` finish the messages in progress and return. Callable from any
        thread or signal handler."""
        for loop in self._time_loops:
            loop.stop()
        self.relay.stop()
        self.consumer.stop()

    def run(self) -> None:
        """Run until stopped. Raises the error that ended one of its parts, if any."""
        self._group.start()
        self._group.join()


class Command(BaseCommand):
    """Relay messages, run stages, execute bulk operations and prune."""

    help = (
        "Does the work of relay, consume and prune_messages in one process, until it "
        "is stopped (SIGTERM or SIGINT)."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--reload",
            action="store_true",
            help="start again after each change of the code: for development",
        )
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        databases, brokers = with_tables(), sorted(conf.get().BROKERS)
        require_tables(*databases, *with_only_queues(), waits=True)
        stages = all_stages()
        service = Service(databases, brokers, stages)
        with ExitStack() as stack:
            stack.enter_context(working(service.stop, options, self.stderr))
            if options["verbosity"] > 0:
                self._introduce(databases, brokers, stages)
                consumed = {stage.destination for stage in stages}
                lines = Lines(self._line, self.style, consumed)
                stack.enter_context(lines.printing())
            stack.enter_context(heartbeat(service.relay, service.stop))
            service.run()

    def _introduce(
        self, databases: Sequence[str], brokers: Sequence[str], stages: Sequence[Stage]
    ) -> None:
        names = ", ".join(stage.name for stage in stages)
        self._line(f"Running: {names or 'no stage'}.")
        if not stages:
            self._line(SEARCHED)
        self._line(
            f"Relaying from {', '.join(databases)} to {', '.join(brokers)}. Stop with "
            f"Ctrl-C."
        )
        if others := not_served(databases):
            self._line(others)

    def _line(self, text: str) -> None:
        say(self.stdout, text)
