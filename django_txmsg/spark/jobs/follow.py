"""`follow`: archives batch by batch and raises alerts, until stopped.

Each round archives the rows that have become old enough, with the same ledger as
`archive`, and then measures. If a round is killed, the next round settles its batches.
During an outage of the database or the lake, `follow` waits.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from ...monitoring.lengths import printable_lines
from ...webhook import KEY_VARIABLE, NoWebhook, Webhook
from .. import alerts
from ..alerts import Alerts, Telling
from ..batchlog import is_mounted
from ..connection import Connection, connect_plain
from ..errors import UsageError
from ..lake import Lake
from ..lock import Archiving, Taken, following, storing
from ..noted import Noted, last_run
from ..progress import Step, no_step
from ..runs import Run, next_request, progressed, recorded
from ..schemas import TABLES
from ..session import LONGEST_RUN, SparkProcess
from ..spec import JobSpec, SourceSpec, hidden
from ..transforms.reconcile import LOST, STUCK
from .archive import ArchiveOptions, Archiver, ArchiveResult, ages, count_waiting
from .reconcile import stuck_after
from .running import recordable_options, run_until_stopped
from .sweep import DEFAULTS, sweep_command

#: Seconds between the first tries, and between the last ones.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


class Outage:
    """Tracks the outages of one resource, with the failed tries of the current one. A
    lock that another process holds is out, too."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what, self._say = what, say
        self.tries, self.error = 0, ""
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """The duration of the current outage in seconds; 0 if there is none."""
        return time.monotonic() - self._since if self.tries else 0.0

    @property
    def pause(self) -> float:
        """The seconds until the next try. They double with each try, up to
        LONGEST_PAUSE."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(10, max(0, self.tries - 1)))

    def failed(self, error: Exception) -> None:
        """Record a failed try. If there is no outage yet, one begins."""
        self.error = hidden(str(error) or type(error).__name__)[:1000]
        if not self.tries:
            self._since = time.monotonic()
            self._say(f"{self.what} cannot be used; waiting for it: {self.error}")
        self.tries += 1

    def over(self) -> None:
        """Record a successful try, which ends the outage."""
        if self.tries:
            self._say(
                f"{self.what} is back after {self.seconds:,.0f} s, {self.tries} tries."
            )
        self.tries, self.error = 0, ""


class Stopped(Exception):
    """Raised between two steps of a round when `follow` is stopped."""


class Follower:
    """Follows the database of one service. `on_step` is called between the steps of an
    archive. `say` prints a line on the terminal."""

    def __init__(
        self,
        spec: JobSpec,
        given: argparse.Namespace,
        webhook: Webhook | None,
        stop: threading.Event,
        *,
        on_step: Step = no_step,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.spec, self.given, self.webhook = spec, given, webhook
        self.ages = ages(spec, given)
        self.source, self.lake = spec.service(), spec.lake_spec()
        self.stop, self.on_step, self.say = stop, on_step, say or _say
        self.database = Outage("The database", self.say)
        self.store = Outage("The lake", self.say)
        self.archive_lock = Outage("The lock of the archive", self.say)
        self.follow_lock = Outage("The lock of `follow`", self.say)
        self.beside = SparkProcess(spec, given.conf)
        self.telling = Telling(self.source.service, webhook, stop, self.say)
        self.run: Run | None = None
        #: The lock against erasures, while a job runs in the Spark process.
        self.unerased = ExitStack()

    def work(self) -> None:
        """Run rounds until stopped, or only one round if `once` is true. Raises
        UsageError. Other errors are raised only if `once` is true. Otherwise, `follow`
        tries again."""
        try:
            while not self.stop.is_set():
                try:
                    self._spell()
                    return
                except Exception as error:
                    if self.given.once or isinstance(error, UsageError):
                        raise
                    if isinstance(error, Taken):
                        self._database_back()
                        self.follow_lock.failed(error)
                        self.stop.wait(min(30.0, self.given.every.total_seconds()))
                    elif not self.stop.is_set():
                        self._database_away(error)
        finally:
            self.beside.stop()

    def _spell(self) -> None:
        """Run rounds until stopped, or until the database does not answer. Each call is
        recorded as one run."""
        with (
            connect_plain(self.source) as connection,
            following(connection, self.source),
            recorded(self.spec, "follow", recordable_options(self.given)) as run,
            self.unerased,
        ):
            self.run = run
            self.follow_lock.over()
            self._database_back()
            for name in self.spec.former_names():
                Alerts(connection, name).drop()
            if self.given.reconcile_every and not self.given.once:
                self._lost(connection)
            while True:
                self._round(connection, run)
                pause = self.given.every.total_seconds()
                if self.store.tries:
                    pause = min(pause, self.store.pause)
                if self.given.once or self.stop.wait(pause):
                    return
                connection.value("SELECT 1")  # holds our lock

    def _database_back(self) -> None:
        self.database.over()
        self.telling.database_is_back()

    def _database_away(self, error: Exception) -> None:
        self.database.failed(error)
        seconds, bound = self.database.seconds, self.given.away.total_seconds()
        if seconds > bound:
            self.telling.database_is_away(seconds, bound, self.database.error)
        self.stop.wait(self.database.pause)

    def _round(self, connection: Connection, run: Run) -> None:
        found: dict[str, ArchiveResult] = {}
        try:
            self._archive(found)
            self._sweep(connection)
        except Stopped:
            pass
        except UsageError:
            raise
        except Archiving as busy:  # no outage
            if self.given.once:
                raise
            self.archive_lock.failed(busy)
        except Exception as error:
            self.archive_lock.over()
            connection.value("SELECT 1")  # is it the database that is away?
            connect_plain(self.source).close()
            if self.given.once:
                raise
            self.store.failed(error)
        else:
            self.store.over()
            self.archive_lock.over()
        refused = [line for done in found.values() for line in done.refused]
        rows = {name: done.rows for name, done in found.items()}
        run.rows += sum(rows.values())
        counts = Counter(run.counts)
        counts.update(rows, rounds=1, refused=len(refused))
        run.counts = counts
        for line in refused:
            self.say(line)
        self._weigh(connection, found, refused)
        self.telling.tell(connection)
        progressed(self.source, run)

    def _archive(self, found: dict[str, ArchiveResult]) -> None:
        for name, age in self.ages.items():
            rows, table = self.given.batch_rows, TABLES[name]
            options = ArchiveOptions(age, rows, batches=1, vacuum=False)
            archiver = Archiver(
                None, self.source, self.lake, table, options, on_step=self._step
            )
            found[name] = archiver.result
            archiver.run()
            for note in archiver.result.notes:
                self.say(note)

    def _step(self, step: str) -> None:
        if step == "planned" and self.stop.is_set():
            raise Stopped  # nothing is written yet
        self.on_step(step)

    def _sweep(self, connection: Connection) -> None:
        if self._due(connection, "sweep", self.given.sweep_every):
            with recorded(self.spec, "sweep", {"by": "follow"}) as run:
                sweep_command(self.spec, DEFAULTS, run)

    def _due(self, connection: Connection, job: str, every: dt.timedelta) -> bool:
        if not every or self.stop.is_set():
            return False
        last = last_run(connection, self.source, job)
        return last is None or connection.clock() - last.started_at >= every

    def _weigh(
        self,
        connection: Connection,
        found: Mapping[str, ArchiveResult],
        refused: Sequence[str],
    ) -> None:
        weigh = Alerts(connection, self.source.service).weigh
        away = self.given.away.total_seconds()
        stuck = self.given.stuck_after.total_seconds()
        busy = self.archive_lock
        weigh("database", 0, away, "It answers.")
        if busy.tries:
            weigh("standstill", busy.seconds, stuck, busy.error)
        if self.store.tries or not busy.tries:
            error = self.store.error or "The archive goes on."
            weigh("lake", self.store.seconds, away, error)
        whole = not (self.store.tries or busy.tries)
        if whole:
            name = max(found, key=lambda one: found[one].held.seconds)
            held, waiting = found[name].held, "No row waits for a long transaction."
            if held.rows:
                waiting = f"{held.rows:,} rows of {name} wait for {held.whom}"
            weigh("standstill", held.seconds, stuck, waiting)
        # No later round measures them again.
        if whole or refused:
            differing = " ".join(refused) or "No row differed from its copy."
            hold = self.webhook is not None
            weigh("refused", len(refused), 0, differing, hold=hold)
        for measured in _measured(connection, self.source, self.given):
            weigh(*measured)
        self._verified(connection, weigh)
        self._ended(connection, weigh)
        if self.given.once or self.beside.job:
            return
        due, words = partial(self._due, connection), tuple[str, ...]()
        if due("reconcile", self.given.reconcile_every):
            words = ("reconcile", *self.reconcile_words())
        elif due("verify", self.given.verify_every) and self._archived():
            words = ("verify",)
        elif request := next_request(connection, self.source):
            words = ("replay", "--request", request)
        if words:
            # While an erasure runs, the job waits. None may begin while Spark starts.
            with suppress(Taken):
                self.unerased.enter_context(storing(connection, self.source))
                self.beside.start(*words)
                if words == ("verify",):  # it reads for long, and stores no message
                    self.unerased.close()

    def reconcile_words(self) -> list[str]:
        """Return the arguments of the next `reconcile`. It also judges the messages
        that were too young for the last run, and those of a time without any run."""
        young = max(self.given.grace, stuck_after(self.spec))
        services = {one.service for one in self.spec.services}
        until = dt.datetime.now(dt.timezone.utc) - young
        judged = Noted(self.source).judged_until(services)
        begin = min(until, judged or until) - self.given.since
        words = ["--since", begin.isoformat()]
        words += ["--grace", f"{self.given.grace.total_seconds()}s"]
        words += [f"--external={name}" for name in self.given.external]
        words += [f"--external-sender={name}" for name in self.given.external_sender]
        return words

    def _ended(self, connection: Connection, weigh: Callable[..., None]) -> None:
        """Check whether the job in the Spark process has ended. If it has failed,
        report its error. If it was `reconcile`, record the measured values."""
        # The signal that stops `follow` may have ended that process, too.
        facts = None if self.stop.is_set() else self.beside.poll()
        if facts is None:
            return
        self.unerased.close()
        job, error = facts["job"], facts.get("error")
        if error is not None:
            self.say(f"{job} has failed: {error}")
        if job != "reconcile":
            return
        if error is None:
            weigh("reconcile", 0, 1, "reconcile has run again.")
            self._lost(connection, facts["run"])
            return
        # The stored number: that of an earlier `follow` counts, too.
        known = Alerts(connection, self.source.service).read()
        failures = sum(one.value for one in known if one.name == "reconcile")
        weigh("reconcile", failures + 1, 1, error)

    def _archived(self) -> bool:
        """Return whether a lake exists and can be read now, whoever archives into
        it."""
        with suppress(Exception):  # there is none yet, or it has just gone
            return not self.store.tries and bool(Lake(self.lake))
        return False

    def _verified(self, connection: Connection, weigh: Callable[..., None]) -> None:
        """Record the result of the last `verify` as a measured value. An operator may
        have started that run."""
        last = last_run(connection, self.source, "verify")
        if last is None:
            return
        wrong = last.error
        if last.state == "running":
            if connection.clock() - last.started_at < LONGEST_RUN:
                return
            wrong = f"It began at {last.started_at:%Y-%m-%d %H:%M} UTC and never ended."
        summary = wrong or "The lake matches its log."
        weigh("verify", len(wrong.splitlines()), 0, summary)

    def _lost(self, connection: Connection, run: str = "") -> None:
        """Record, as a measured value, how many lost messages were found since the last
        check, and by the run that has just ended. This includes the messages found by
        runs of `reconcile` that ended while `follow` was stopped."""
        with connection.transaction():
            new = alerts.count_lost(connection, self.source, LOST + STUCK)
            if not (run or new):
                return
            how = f"by run {run}" if run else "while `follow` was not running"
            listed = ", ".join(f"{new[name]:,} {name}" for name in sorted(new))
            summary = f"Found {how}, new: {listed or 'nothing'}."
            if "never_received" in new:
                # The logs do not say what a broker holds.
                summary += (
                    " A message that was never received may still wait at its broker, "
                    "for example because its stage is paused: look at the page Stages "
                    "and at the broker's queue first."
                )
            Alerts(connection, self.source.service).weigh(
                "lost", new.total(), 0, summary, hold=self.webhook is not None
            )


def _say(line: str) -> None:
    sys.stderr.write(printable_lines(f"follow: {line}\n"))


def _measured(
    connection: Connection, source: SourceSpec, given: argparse.Namespace
) -> list[tuple[str, float, float, str]]:
    """Return what is measured in the database: the name of each alert, its value, its
    bound and a summary."""
    lag = alerts.lag(connection, source)
    due = f"The oldest message has been due for {lag:,.0f} s."
    dead = alerts.dead_letters(connection, source, given.window)
    died = f"{dead:,} messages died in the last {given.window}."
    return [
        ("lag", lag, given.lag.total_seconds(), due),
        ("dead_letters", dead, given.dead_letters, died),
    ]


def follow_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Follow until stopped, or for one round. In a dry run, list what a round would
    measure. Raises PipelineError, such as LostBatches if the lake has lost batches."""
    if given.dry_run:
        source = spec.service()
        is_mounted(replace(spec, services=(source,)))
        count_waiting(spec, given, run)
        with connect_plain(source) as connection:
            measured = _measured(connection, source, given)
        run.facts |= run.counts | {name: value for name, value, *_ in measured}
        run.lines += [summary for *_, summary in measured]
        return
    try:
        webhook = Webhook.from_environment(given.webhook_env)
    except NoWebhook as error:
        raise UsageError(str(error)) from error
    # Tasks and child processes of ours do not need them.
    for name in (given.webhook_env, KEY_VARIABLE):
        os.environ.pop(name, None)
    stop = threading.Event()
    follower = Follower(spec, given, webhook, stop)
    run_until_stopped(follower.work, stop, follower.beside.stop)
    if last := follower.run:
        run.id, run.rows, run.counts = last.id, last.rows, last.counts
    firing = follower.telling.firing
    run.findings = bool(given.once and firing)
    run.lines += [f"{one.name}: {one.summary}" for one in firing]
    run.facts["firing"] = [one.name for one in firing]
