"""`follow`: archives batch by batch and raises alerts, until stopped.

Each round archives the rows that have become old enough, through the archive's own
ledger: if a round is killed, the next one settles its batches. Then it measures. It
waits while a database or a lake is away.
"""

from __future__ import annotations

import datetime as dt
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import measures
from ..alerts import Alert, Alerts
from ..connection import Connection, connect_plain
from ..errors import UsageError
from ..lock import Archiving, Taken, following
from ..runs import Run, progressed, recorded
from ..schemas import TABLES
from ..spec import JobSpec
from ..transforms.reconcile import LOST, STUCK
from ..webhook import Webhook
from .archive import Archiver
from .archive_options import ArchiveOptions
from .follow_options import FollowOptions
from .outage import Outage
from .reconciling import Reconciling
from .steps import Step, no_step
from .sweep import SweepOptions, run_sweep
from .telling import Telling


class Stopped(Exception):
    """Ends the round at a point where no step is half done."""


@dataclass
class Round:
    """The result of a round's archive."""

    rows: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    held: str = ""
    held_seconds: float = 0.0


class Follower:
    """Follows one service's database. `on_step` is called between the steps of the
    archive, like in `Archiver`, and `say` with a line for a person."""

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
        self.reconciling = Reconciling(spec, options.reconcile)
        self.telling = Telling(self.source.service, webhook, stop, self.say)
        self.run: Run | None = None
        self._failures = 0
        self._waiting = self._busy = False

    @property
    def firing(self) -> list[Alert]:
        """The alerts that were firing at the last report."""
        return self.telling.firing

    def work(self) -> None:
        """Follow until stopped, or for one round. Raises UsageError; with `once` also
        the error with which a round fails."""
        try:
            while not self.stop.is_set():
                try:
                    self._spell()
                    return
                except UsageError:
                    raise
                except Taken:
                    if self.options.once:
                        raise
                    self._database_back()
                    if not self._waiting:
                        self.say("Another process follows this database: standing by.")
                    self._waiting = True
                    self.stop.wait(min(30.0, self.options.every.total_seconds()))
                except Exception as error:
                    if self.options.once:
                        raise
                    if self.stop.is_set():
                        return
                    self._database_away(error)
        finally:
            self.reconciling.stop()

    def _spell(self) -> None:
        """Follow for as long as the database answers, as one recorded run."""
        connection = connect_plain(self.source)
        try:
            with (
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
        finally:
            connection.close()

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
        found = Round()
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
            self._busy = True
        except Exception as error:
            connection.value("SELECT 1")  # is it the database that is away?
            connect_plain(self.source).close()
            if self.options.once:
                raise
            self.store.failed(error)
        else:
            self.store.over()
            self._busy = False
        run.rows += sum(found.rows.values())
        counts = run.counts
        counts["rounds"] = counts.get("rounds", 0) + 1
        for name, rows in found.rows.items():
            counts[name] = counts.get(name, 0) + rows
        counts["refused"] = counts.get("refused", 0) + len(found.refused)
        counts["outages"] = {"database": self.database.count, "lake": self.store.count}
        for line in found.refused:
            self.say(line)
        self._weigh(connection, found)
        self.telling.tell(connection)
        if self.webhook is not None:
            run.counts["webhook"] = {
                "told": self.webhook.taken, "failed": self.webhook.failed
            }  # fmt: skip
        progressed(self.source, run)

    def _archive(self, found: Round) -> None:
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
            done = archiver.result
            try:
                archiver.run()
            finally:
                found.rows[name] = done.rows
                found.refused += done.refused
            for note in done.notes:
                self.say(note)
            held = done.held
            if held.rows and held.seconds >= found.held_seconds:
                found.held_seconds = held.seconds
                found.held = f"{held.rows:,} rows of {name} wait for {held.whom}"

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
        last = measures.last_run(connection, self.source, job)
        # A clock that was wrong may have left one in the future.
        return last is None or abs(connection.clock() - last) >= every

    def _weigh(self, connection: Connection, found: Round) -> None:
        options, weigh = self.options, Alerts(connection, self.source.service).weigh
        weigh("database", 0, options.away.total_seconds(), "It answers.")
        weigh(
            "lake", self.store.seconds, options.away.total_seconds(),
            self.store.error or "The archive goes on.",
        )  # fmt: skip
        if not self.store.tries and not self._busy:
            weigh(
                "standstill", found.held_seconds, options.stuck_after.total_seconds(),
                found.held or "No row waits for a long transaction.",
            )  # fmt: skip
            weigh(
                "refused", len(found.refused), 0,
                " ".join(found.refused) or "No row differed from its copy.",
                hold=self.webhook is not None,
            )  # fmt: skip
        lag = measures.lag(connection, self.source)
        weigh(
            "lag", lag, options.lag.total_seconds(),
            f"The oldest message has been due for {lag:,.0f} s.",
        )  # fmt: skip
        dead = measures.dead_letters(connection, self.source, options.window)
        weigh(
            "dead_letters", dead, options.dead_letters,
            f"{dead:,} messages died in the last {options.window}.",
        )  # fmt: skip
        self._reconcile(connection, weigh)

    def _reconcile(self, connection: Connection, weigh: Callable[..., None]) -> None:
        facts = self.reconciling.poll()
        if facts is not None and "error" in facts:
            self._failures += 1
            self.say(f"reconcile has failed: {facts['error']}")
            weigh("reconcile", self._failures, 1, str(facts["error"]))
        elif facts is not None:
            self._failures = 0
            weigh("reconcile", 0, 1, "reconcile has run again.")
            self._lost(connection, f"Found by run {facts['run']}, new: ")
        if self.options.once or self.reconciling.under_way:
            return
        if self._due(connection, "reconcile", self.options.reconcile_every):
            self.reconciling.start()

    def _lost(self, connection: Connection, found_by: str = "") -> None:
        """Compare the number of lost messages with its bound, when `reconcile` has
        ended, or for runs while `follow` was not running."""
        new = measures.lost(connection, self.source, LOST + STUCK)
        if not (found_by or new or new is None):
            return
        said = found_by or "Found while `follow` was not running, new: "
        listed = ", ".join(f"{count:,} {name}" for name, count in (new or {}).items())
        Alerts(connection, self.source.service).weigh(
            "lost", sum((new or {}).values()), 0, f"{said}{listed or 'nothing'}.",
            hold=self.webhook is not None,
        )  # fmt: skip


def _say(line: str) -> None:
    sys.stderr.write(f"follow: {line}\n")
    sys.stderr.flush()
