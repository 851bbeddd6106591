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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from ...webhook import KEY_VARIABLE, NoWebhook, Webhook
from .. import alerts
from ..alerts import Alerts, Telling
from ..batchlog import is_mounted
from ..connection import Connection, connect_plain
from ..errors import UsageError
from ..lake import Lake
from ..lock import Archiving, Taken, following, storing
from ..noted import Noted
from ..progress import Step, no_step
from ..runs import Run, next_request, progressed, recorded
from ..schemas import TABLES
from ..session import LONGEST_RUN, SparkProcess
from ..spec import JobSpec, hidden
from ..transforms.reconcile import LOST, STUCK
from .archive import ArchiveOptions, Archiver, ArchiveResult, ages, would_move
from .outcome import Outcome, options_of
from .reconcile import stuck_after
from .stopping import run_until_stopped
from .sweep import SweepOptions, run_sweep


@dataclass(frozen=True)
class FollowOptions:
    """The options of `follow`: the interval, the ages of rows to archive, and the
    bounds of alerts."""

    ages: Mapping[str, dt.timedelta]
    """The age at which settled rows of a table leave."""
    every: dt.timedelta = dt.timedelta(minutes=5)
    batch_rows: int = 100_000
    lag: dt.timedelta = dt.timedelta(minutes=15)
    dead_letters: int = 10
    """In `window`."""
    window: dt.timedelta = dt.timedelta(hours=1)
    away: dt.timedelta = dt.timedelta(minutes=5)
    stuck_after: dt.timedelta = dt.timedelta(hours=6)
    reconcile_every: dt.timedelta = dt.timedelta(hours=1)
    since: dt.timedelta = dt.timedelta(days=1)
    grace: dt.timedelta = dt.timedelta(hours=1)
    """Of `reconcile`."""
    reconcile: tuple[str, ...] = ()
    """The other arguments of its command line."""
    conf: tuple[tuple[str, str], ...] = ()
    """Settings of Spark."""
    verify_every: dt.timedelta = dt.timedelta(days=7)
    sweep_every: dt.timedelta = dt.timedelta(days=1)
    once: bool = False


#: Seconds between the first tries, and between the last ones.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


class Outage:
    """Tracks the outages of one resource: their number, and the failed tries of the
    current one."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what, self._say = what, say
        self.count = self.tries = 0
        self.error = ""
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
        known = str(error) or type(error).__name__
        self.error = hidden(known)[:1000]
        if not self.tries:
            self._since = time.monotonic()
            self.count += 1
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
        options: FollowOptions,
        webhook: Webhook | None,
        stop: threading.Event,
        *,
        recorded_options: Mapping[str, Any] | None = None,
        on_step: Step = no_step,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.spec, self.options, self.webhook = spec, options, webhook
        self.source, self.lake = spec.service(), spec.lake_spec()
        self.stop, self.on_step, self.say = stop, on_step, say or _say
        self.recorded_options = dict(recorded_options or {})
        self.database = Outage("The database", self.say)
        self.store = Outage("The lake", self.say)
        self.beside = SparkProcess(spec, options.conf)
        self.telling = Telling(self.source.service, webhook, stop, self.say)
        self.run: Run | None = None
        self._failures = 0
        #: The starts of the runs whose findings the alert `lost` has counted.
        self._counted: set[object] = set()
        self._waiting = False
        self._busy, self._busy_since = "", 0.0

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
                    if self.options.once or isinstance(error, UsageError):
                        raise
                    if isinstance(error, Taken):
                        self._stand_by()
                    elif not self.stop.is_set():
                        self._database_away(error)
        finally:
            self.beside.stop()

    def _spell(self) -> None:
        """Run rounds until stopped, or until the database does not answer. Each call is
        recorded as one run."""
        with (
            closing(connect_plain(self.source)) as connection,
            following(connection, self.source),
            recorded(self.spec, "follow", self.recorded_options) as run,
        ):
            self.run, self._waiting = run, False
            self._database_back()
            if self.options.reconcile_every and not self.options.once:
                self._lost(connection)
            while True:
                self._round(connection, run)
                pause = self.options.every.total_seconds()
                if self.store.tries:
                    pause = min(pause, self.store.pause)
                if self.options.once or self.stop.wait(pause):
                    return
                connection.value("SELECT 1")  # holds our lock

    def _stand_by(self) -> None:
        self._database_back()
        if not self._waiting:
            self.say("Another process follows this database: standing by.")
        self._waiting = True
        self.stop.wait(min(30.0, self.options.every.total_seconds()))

    def _database_back(self) -> None:
        self.database.over()
        self.telling.database_is_back()

    def _database_away(self, error: Exception) -> None:
        self.database.failed(error)
        bound = self.options.away.total_seconds()
        if self.database.seconds > bound:
            self.telling.database_is_away(
                self.database.seconds, bound, self.database.error
            )
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
            if self.options.once:
                raise
            if not self._busy:
                self.say(str(busy))
                self._busy_since = time.monotonic()
            self._busy = str(busy)
        except Exception as error:
            self._busy = ""
            connection.value("SELECT 1")  # is it the database that is away?
            connect_plain(self.source).close()
            if self.options.once:
                raise
            self.store.failed(error)
        else:
            self.store.over()
            self._busy = ""
        refused = [line for done in found.values() for line in done.refused]
        rows = {name: done.rows for name, done in found.items()}
        run.rows += sum(rows.values())
        counts = run.counts
        for name, count in (rows | {"rounds": 1, "refused": len(refused)}).items():
            counts[name] = counts.get(name, 0) + count
        counts["outages"] = {"database": self.database.count, "lake": self.store.count}
        for line in refused:
            self.say(line)
        self._weigh(connection, found, refused)
        self.telling.tell(connection)
        if self.webhook is not None:
            counts["webhook"] = {
                "delivered": self.webhook.taken, "failed": self.webhook.failed
            }  # fmt: skip
        progressed(self.source, run)

    def _archive(self, found: dict[str, ArchiveResult]) -> None:
        for name, age in self.options.ages.items():
            archiver = Archiver(
                None,
                self.source,
                self.lake,
                TABLES[name],
                ArchiveOptions(
                    age, batch_rows=self.options.batch_rows, batches=1, vacuum=False
                ),
                on_step=self._step,
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
        if not self._due(connection, "sweep", self.options.sweep_every):
            return
        with recorded(self.spec, "sweep", {"by": "follow"}) as run:
            run_sweep(self.spec, SweepOptions(), run)

    def _due(self, connection: Connection, job: str, every: dt.timedelta) -> bool:
        if not every or self.stop.is_set():
            return False
        last = alerts.last_run(connection, self.source, job)
        return last is None or connection.clock() - last.started_at >= every

    def _weigh(
        self,
        connection: Connection,
        found: Mapping[str, ArchiveResult],
        refused: Sequence[str],
    ) -> None:
        options, weigh = self.options, Alerts(connection, self.source.service).weigh
        weigh("database", 0, options.away.total_seconds(), "It answers.")
        stuck = options.stuck_after.total_seconds()
        if self._busy:
            seconds = time.monotonic() - self._busy_since
            weigh("standstill", seconds, stuck, self._busy)
        if self.store.tries or not self._busy:
            weigh(
                "lake", self.store.seconds, options.away.total_seconds(),
                self.store.error or "The archive goes on.",
            )  # fmt: skip
        if not self.store.tries and not self._busy:
            name, held = max(
                ((name, done.held) for name, done in found.items()),
                key=lambda one: one[1].seconds,
            )
            waiting = f"{held.rows:,} rows of {name} wait for {held.whom}"
            weigh(
                "standstill", held.seconds, stuck,
                waiting if held.rows else "No row waits for a long transaction.",
            )  # fmt: skip
            weigh(
                "refused", len(refused), 0,
                " ".join(refused) or "No row differed from its copy.",
                hold=self.webhook is not None,
            )  # fmt: skip
        lag = alerts.lag(connection, self.source)
        weigh(
            "lag", lag, options.lag.total_seconds(),
            f"The oldest message has been due for {lag:,.0f} s.",
        )  # fmt: skip
        dead = alerts.dead_letters(connection, self.source, options.window)
        weigh(
            "dead_letters", dead, options.dead_letters,
            f"{dead:,} messages died in the last {options.window}.",
        )  # fmt: skip
        self._verified(connection, weigh)
        self._ended(connection, weigh)
        if self.options.once or self.beside.job:
            return
        if self._due(connection, "reconcile", self.options.reconcile_every):
            self.beside.start("reconcile", *self.reconcile_words())
        elif (
            self._due(connection, "verify", self.options.verify_every)
            and self._archived()
        ):
            self.beside.start("verify")
        elif request := next_request(connection, self.source):
            # While an erasure runs, the request waits.
            with suppress(Taken), storing(connection, self.source):
                self.beside.start("replay", "--request", request)

    def reconcile_words(self) -> list[str]:
        """Return the arguments of the next `reconcile`. It also judges the messages
        that were too young for the last run, and those of a time without any run."""
        young = max(self.options.grace, stuck_after(self.spec))
        services = {one.service for one in self.spec.services}
        until = dt.datetime.now(dt.timezone.utc) - young
        judged = Noted(self.source).judged_until(services)
        begin = min(until, judged or until) - self.options.since
        return ["--since", begin.isoformat(), *self.options.reconcile]

    def _ended(self, connection: Connection, weigh: Callable[..., None]) -> None:
        """Check whether the job in the Spark process has ended. If it has failed,
        report its error. If it was `reconcile`, record the measured values."""
        facts = self.beside.poll()
        if facts is None:
            return
        job, error = facts["job"], facts.get("error")
        if error is not None:
            self.say(f"{job} has failed: {error}")
        if job != "reconcile":
            return
        self._failures = 0 if error is None else self._failures + 1
        weigh("reconcile", self._failures, 1, error or "reconcile has run again.")
        if error is None:
            self._lost(connection, facts["run"])

    def _archived(self) -> bool:
        """Return whether a lake exists and can be read now."""
        if self.store.tries:
            return False
        try:
            Lake(self.lake)
        except Exception:  # there is none yet, or it has just gone
            return False
        return True

    def _verified(self, connection: Connection, weigh: Callable[..., None]) -> None:
        """Record the result of the last `verify` as a measured value. An operator may
        have started that run."""
        last = alerts.last_run(connection, self.source, "verify")
        if last is None:
            return
        if last.state == "running":
            if connection.clock() - last.started_at < LONGEST_RUN:
                return
            wrong = f"It began at {last.started_at:%Y-%m-%d %H:%M} UTC and never ended."
        else:
            wrong = last.error
        summary = wrong or "The lake matches its log."
        weigh("verify", len(wrong.splitlines()), 0, summary)

    def _lost(self, connection: Connection, run: str = "") -> None:
        """Record, as a measured value, how many lost messages were found since the last
        check, and by the run that has just ended. This includes the messages found by
        runs of `reconcile` that ended while `follow` was stopped."""
        new, starts = alerts.lost(
            connection, self.source, LOST + STUCK, self._counted, run
        )
        if not (run or new or new is None):
            return
        how = f"by run {run}" if run else "while `follow` was not running"
        summary = f"Found {how}, new: "
        listed = ", ".join(f"{count:,} {name}" for name, count in (new or {}).items())
        summary += f"{listed or 'nothing'}."
        if "never_received" in (new or {}):
            # The logs do not say what a broker holds.
            summary += (
                " A message that was never received may still wait at its broker, for "
                "example because its stage is paused: look at the page Stages and at "
                "the broker's queue first."
            )
        Alerts(connection, self.source.service).weigh(
            "lost", sum((new or {}).values()), 0, summary,
            hold=self.webhook is not None,
        )  # fmt: skip
        # Only now: if the count could not be stored, the next check counts again.
        self._counted |= starts


def _say(line: str) -> None:
    sys.stderr.write(f"follow: {line}\n")


def follow_command(
    spec: JobSpec, given: argparse.Namespace, recorded: Mapping[str, Any]
) -> Outcome:
    """Follow until stopped, or for one round. Raises PipelineError."""
    options = _options(spec, given)
    spec.lake_spec()
    if given.dry_run:
        return _would(spec, options)
    try:
        webhook = Webhook.from_environment(given.webhook_env)
    except NoWebhook as error:
        raise UsageError(str(error)) from error
    # Tasks and child processes of ours do not need them.
    for name in (given.webhook_env, KEY_VARIABLE):
        os.environ.pop(name, None)
    stop = threading.Event()
    follower = Follower(spec, options, webhook, stop, recorded_options=recorded)
    run_until_stopped(follower.work, stop, follower.beside.stop)
    run = follower.run
    counts = run.counts if run else {}
    rows = run.rows if run else 0
    firing = follower.telling.firing
    code = 1 if given.once and firing else 0
    lines = [f"{one.name}: {one.summary}" for one in firing]
    summary = f"follow: {rows:,} rows in {counts.get('rounds', 0)} rounds since its run"
    facts = {
        "job": "follow", "run": run.id if run else None, "rows": rows,
        "counts": counts, "firing": [one.name for one in firing],
        "exit_code": code,
    }  # fmt: skip
    return Outcome([*lines, f"{summary} began; {len(lines)} alerts fire."], facts, code)


def _options(spec: JobSpec, given: argparse.Namespace) -> FollowOptions:
    words = ["--grace", f"{given.grace.total_seconds()}s"]
    for name in given.external:
        words += ["--external", name]
    for name in given.external_sender:
        words += ["--external-sender", name]
    return options_of(
        FollowOptions,
        given,
        ages=ages(spec, given),
        conf=tuple(given.conf),
        reconcile=tuple(words),
    )


def _would(spec: JobSpec, options: FollowOptions) -> Outcome:
    """Print the values that a round would measure. Raises LostBatches if the lake has
    lost batches."""
    source = spec.service()
    is_mounted(replace(spec, services=(source,)))
    run = Run("follow", {})
    outcome = would_move(source, options.ages, options.stuck_after, run)
    with closing(connect_plain(source)) as connection:
        lag = alerts.lag(connection, source)
        dead = alerts.dead_letters(connection, source, options.window)
    outcome.facts |= run.counts | {"lag": lag, "dead_letters": dead}
    outcome.lines += [
        f"The oldest message has been due for {lag:,.0f} s.",
        f"{dead:,} messages died in the last {options.window}.",
    ]
    return outcome
