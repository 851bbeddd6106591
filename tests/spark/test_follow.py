"""`pipeline follow` is killed, stopped or cut off. No row and no alert is lost or
doubled."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from prometheus_client import CollectorRegistry, generate_latest

from django_txmsg import metrics
from django_txmsg import webhook as webhooks
from django_txmsg.spark import alerts
from django_txmsg.spark.alerts import Alert, Alerts
from django_txmsg.spark.connection import Connection
from django_txmsg.spark.errors import EnvironmentFault, UsageError
from django_txmsg.spark.jobs.follow import Follower
from django_txmsg.spark.lock import archiving
from django_txmsg.spark.lock import following as alone
from django_txmsg.spark.models import PipelineAlert
from django_txmsg.spark.noted import Noted, Which
from django_txmsg.spark.runs import Run, recorded
from django_txmsg.spark.schemas import Table
from django_txmsg.spark.spec import JobSpec, LakeSpec
from django_txmsg.spark.transforms.reconcile import LOST
from django_txmsg.webhook import NoWebhook, Webhook, alert_message
from tests.faults import Proxy, wait_until
from tests.services.certificates import Certificates
from tests.spark.archives import assert_moved_once, delta_rows, hashes_in
from tests.spark.conftest import ROOT
from tests.spark.kill_archive import DIFFERING, requeue
from tests.spark.kill_follow import OPTIONS
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import but, outcome
from tests.spark.test_archive_kill import SLICED, STEPS
from tests.spark.test_outgoing import request_replay

SECRET = "T0ken-that-nobody-sees"
NOW = but(OPTIONS, once=True)
JOURNEYS = Table("journeys", "", "", (), "", ("",))


class Receiver(ThreadingHTTPServer):
    """A webhook that records its requests. The statuses of its answers are those in
    `answers`, and 200 after that."""

    def __init__(self, *answers: int, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.answers, self.taken = list(answers), []
        self.tries = 0
        #: Bytes that an answer promises and does not bring; headers come byte by byte.
        self.promised, self.slow = 0, False
        self.over = threading.Event()
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        scheme = "https" if context else "http"
        self.url = (
            f"{scheme}://localhost:{self.server_port}/hooks/{SECRET}?key={SECRET}"
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that do not trust our certificate."""


class Taking(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.tries += 1
        answer = self.server.answers.pop(0) if self.server.answers else 204
        if answer == 204:
            self.server.taken.append(json.loads(body))
        self.send_response(answer)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(self.server.promised))
        if not self.server.slow:
            self.end_headers()
        while not self.server.over.wait(0.05):
            if not self.server.slow and not self.server.promised:
                break
            try:
                self.wfile.write(b"a" * self.server.slow)
                self.wfile.flush()
            except OSError:  # the client has had enough
                break

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def receiver(*answers: int, **more: Any) -> Iterator[Receiver]:
    with Receiver(*answers, **more) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "PAUSES", (0.01, 0.01))


def round_of(
    log: Log,
    lake: LakeSpec,
    url: str = "",
    options: Namespace = NOW,
    **more: Any,
) -> tuple[Follower, list[str]]:
    """Run one round of `follow`. Return the follower and its output."""
    said: list[str] = []
    webhook = Webhook(url) if url else None
    spec = JobSpec((log.spec,), lake)
    follower = Follower(
        spec, options, webhook, threading.Event(), say=said.append, **more
    )
    follower.work()
    return follower, said


@contextmanager
def following(
    spec: JobSpec, directory: Path, *words: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run `follow` in a process, which is killed at the end of the block."""
    path = directory / f"{uuid.uuid4().hex}.json"
    path.write_text(spec.to_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "django_txmsg.spark", "follow", "--spec", str(path),
         "--table", "outbox", "--older-than", "1d", "--every", "0.1s", "--batch-rows",
         "100", "--reconcile-every", "0s", "--sweep-every", "0s",
         "--verify-every", "0s", *words],
        cwd=ROOT, env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


def test_follow_archives_settled_rows_until_it_is_stopped(
    log: Log, lake: LakeSpec, tmp_path: Path, monkeypatch
) -> None:
    log.send_many(250, every=900.0)
    before = hashes_in(log)
    spec = JobSpec((log.spec,), lake)
    monkeypatch.setenv("TXMSG_PASSWORD_SHOP", "txmsg-secret")
    with following(spec, tmp_path) as process:
        wait_until(lambda: log.count() == 0, deadline=60)
        log.send_many(30, every=900.0)
        before |= hashes_in(log)
        wait_until(lambda: log.count() == 0, deadline=60)
        code, out, errors = ended(process)

    assert (code, errors) == (0, "")
    assert "280 rows" in out
    assert_moved_once(before, log, lake, set(range(1, 281)))
    [[state, rows, counts]] = log.rows(
        "SELECT state, rows, counts FROM django_txmsg_pipelinerun WHERE job = 'follow'"
    )
    counts = json.loads(counts) if isinstance(counts, str) else counts
    assert (state, rows, counts["outbox"]) == ("clean", 280, 280)


def test_killed_at_every_step_it_goes_on_and_each_row_is_in_the_lake_once(
    make_log: Callable[..., Log], tmp_path: Path
) -> None:
    plan, logs = [], []
    for vendor, steps in (("postgresql", STEPS), ("sqlite", SLICED)):
        for step in steps:
            log = make_log(vendor, f"{vendor}-{step}")
            log.send_many(250, every=900.0)
            log.send([{"dispatched_at": None}] * 3)
            lake = LakeSpec(f"file://{tmp_path}/{vendor}-{step}")
            logs.append((step, log, lake, hashes_in(log)))
            nth = 2 if step in ("written", "committed", "purging") else 1
            plan.append({"service": log.spec.service, "url": log.spec.url,
                         "lake": lake.uri, "step": step, "nth": nth})  # fmt: skip

    program = [sys.executable, "-m", "tests.spark.kill_follow", json.dumps(plan)]
    subprocess.run(program, cwd=ROOT, check=True, timeout=240)

    for step, log, lake, before in logs:
        expected = set(range(1, 251))
        if step in DIFFERING and 7 in hashes_in(log):
            expected.remove(7)
            before[7] = hashes_in(log)[7]
        round_of(log, lake)
        assert_moved_once(before, log, lake, expected)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_at_random_while_messages_settle_nothing_is_lost_or_doubled(
    log: Log, lake: LakeSpec, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TXMSG_PASSWORD_SHOP", "txmsg-secret")
    spec = JobSpec((log.spec,), lake)
    dice = random.Random(20261122)
    before: dict[int, int] = {}
    for kill in range(25):
        log.send_many(dice.randrange(50, 1500), every=60.0)
        before |= hashes_in(log)
        with following(spec, tmp_path) as process:
            rows = log.count()
            wait_until(lambda r=rows: log.count() < r, deadline=60)
            try:
                process.wait(dice.uniform(0, 0.5))
            except subprocess.TimeoutExpired:
                process.kill()
            assert process.wait() == -signal.SIGKILL, kill
    round_of(log, lake)

    assert_moved_once(before, log, lake, set(before))


def test_alert_is_delivered_at_its_beginning_and_end(log: Log, lake: LakeSpec) -> None:
    now = datetime.now(timezone.utc)
    late = [{"created_at": now - timedelta(hours=1), "dispatched_at": None}]
    log.send(late * 2)
    log.bury([{"message_id": uuid.uuid4(), "created_at": now} for _ in range(4)])
    options = but(NOW, dead_letters=3)
    with receiver(503, 429) as taking:
        first, said = round_of(log, lake, taking.url, options)
        second, _ = round_of(log, lake, taking.url, options)
        told = {one["alert"]: one for one in taking.taken}
        log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = due_at")
        log.execute("DELETE FROM django_txmsg_deadletter")
        third, over = round_of(log, lake, taking.url, options)

    assert sorted(one.name for one in first.telling.firing) == ["dead_letters", "lag"]
    assert [one.name for one in second.telling.firing] == ["dead_letters", "lag"]
    assert third.telling.firing == []
    assert [(one["alert"], one["status"]) for one in taking.taken] == [
        ("dead_letters", "firing"), ("lag", "firing"),
        ("dead_letters", "resolved"), ("lag", "resolved"),
    ]  # fmt: skip
    assert taking.tries == 6
    lag = told["lag"]
    assert 3600 <= lag["value"] < 3900
    assert (lag["version"], lag["limit"], lag["service"]) == (1, 900.0, "shop")
    assert lag["id"] == taking.taken[3]["id"] != told["dead_letters"]["id"]
    assert lag["text"] == f"[firing] shop/lag: {lag['summary']}"
    assert datetime.fromisoformat(lag["since"]) >= now
    assert any(line.startswith("firing: lag: The oldest") for line in said)
    assert any(line.startswith("resolved: lag: ") for line in over) is False
    assert SECRET not in "".join(said + over)


def test_kill_after_the_webhook_call_repeats_it_with_the_same_id(
    pg_log: Log, lake: LakeSpec
) -> None:
    late = datetime.now(timezone.utc) - timedelta(hours=1)
    pg_log.send([{"created_at": late, "dispatched_at": None}])
    with receiver() as taking:
        plan = [{"service": "shop", "url": pg_log.spec.url, "lake": lake.uri,
                 "step": "-", "webhook": taking.url}]  # fmt: skip
        program = [sys.executable, "-m", "tests.spark.kill_follow", json.dumps(plan)]
        subprocess.run(program, cwd=ROOT, check=True, timeout=120)
        round_of(pg_log, lake, taking.url)
        round_of(pg_log, lake, taking.url)

    first, second = taking.taken
    assert first["id"] == second["id"]
    assert first["status"] == second["status"] == "firing"


def test_a_webhook_that_refuses_is_asked_again_in_the_next_round(
    pg_log: Log, lake: LakeSpec
) -> None:
    late = datetime.now(timezone.utc) - timedelta(hours=1)
    pg_log.send([{"created_at": late, "dispatched_at": None}])
    with receiver(500, 502, 503, 404, 302) as taking:
        said = [round_of(pg_log, lake, taking.url)[1] for _ in range(4)]
    with receiver() as gone:
        pass
    pg_log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = due_at")
    _, unreached = round_of(pg_log, lake, gone.url)

    shown = f"http://localhost:{taking.server_port}"
    assert said[0][-1] == f"The webhook did not accept lag: {shown} answered 503."
    assert said[1][-1].endswith("answered 404.")
    assert said[2][-1].endswith("answered 302.")
    assert not said[3][-1].startswith("The webhook")
    assert (len(taking.taken), taking.tries) == (1, 6)
    assert "cannot be reached: Connection refused" in unreached[-1]
    assert SECRET not in str(said) + str(unreached)


def test_the_certificate_of_a_webhook_is_verified(tmp_path: Path, monkeypatch) -> None:
    certificates = Certificates(tmp_path / "certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with receiver(context=context) as taking:
        strange = Webhook(taking.url)
        assert not strange.post({}, threading.Event())
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
        known = Webhook(taking.url)
        assert known.post({"a": 1}, threading.Event())

    assert "its certificate is refused" in strange.error
    assert SECRET not in strange.error
    assert taking.taken == [{"a": 1}]


def test_a_webhook_that_never_answers_is_given_up() -> None:
    with receiver() as taking:
        taking.shutdown()  # the socket still listens, and nothing answers
        silent = Webhook(taking.url, timeout=0.2)
        assert not silent.post({}, threading.Event())
        threading.Thread(target=taking.serve_forever, args=(0.01,)).start()

    assert silent.error.endswith("cannot be reached: timed out")


def test_a_webhook_that_answers_byte_by_byte_is_given_up() -> None:
    with receiver() as taking:
        taking.slow = True
        slow = Webhook(taking.url, timeout=0.3)
        assert not slow.post({}, threading.Event())

    assert slow.error.endswith("cannot be reached: timed out")
    assert taking.tries == 3


def test_webhook_delivery_counts_even_if_its_answer_is_lost() -> None:
    with receiver(200) as taking:
        taking.promised = 10
        hooked = Webhook(taking.url, timeout=0.3)
        assert hooked.post({}, threading.Event())

    assert taking.tries == 1


def test_an_unset_or_literal_webhook_address_is_refused(
    make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    words = ["follow", "--older-than", "1d", "--once", "--webhook-env"]
    for name, why in (
        ("TXMSG_HOOK_THAT_IS_NOT_SET", "is not set"),
        (f"https://host/{SECRET}", "the name of the environment variable"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            outcome(spec, *words, name)
        assert SECRET not in str(refused.value)
    assert log.count("django_txmsg_pipelinerun") == 0


def weighed(log: Log, *firing: bool, hold: bool = False) -> list[Alert]:
    with log.connected() as connection:
        alerts = Alerts(connection, "shop")
        for one in firing:
            alerts.weigh("lag", int(one), 0, f"It is {int(one)}.", hold=hold)
        return alerts.read()


def told(log: Log) -> None:
    with log.connected() as connection:
        alerts = Alerts(connection, "shop")
        for one in alerts.read():
            alerts.record_delivery(one)


def test_an_event_is_kept_until_the_webhook_accepts_it(log: Log) -> None:
    [before] = weighed(log, True, False, False, hold=True)
    told(log)
    [after] = weighed(log, False, hold=True)
    assert (before.firing, before.news, before.summary) == (True, True, "It is 1.")
    assert (after.firing, after.news, after.told) == (False, True, "firing")
    told(log)
    # What is no event ends when it is over.
    [again] = weighed(log, True, False)
    assert (again.firing, again.news) == (False, False)


def test_alerts_of_a_services_former_name_are_dropped(
    make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    with log.connected() as connection:
        for name in ("before", "other"):
            Alerts(connection, name).weigh("lag", 1, 0, "It is 1.")
        round_of(log, replace(lake, former={"before": "shop", "older": "other"}))
        left = [bool(Alerts(connection, name).read()) for name in ("before", "other")]

    assert left == [False, True]


def test_events_that_no_webhook_has_accepted_are_added_up(log: Log) -> None:
    weighed(log, True, True, False, hold=True)
    [added] = weighed(log, True, hold=True)
    told(log)
    [after] = weighed(log, True, hold=True)

    assert (added.value, added.news) == (3, True)
    assert added.summary == "It is 1. It is 1. It is 1."
    assert (after.value, after.summary) == (1, "It is 1.")
    # A long outage does not make the text longer than others are.
    told(log)
    weighed(log, False)
    told(log)
    [long] = weighed(log, *[True] * 200, hold=True)
    assert (long.value, len(long.summary)) == (200, 1000)


def test_alert_firing_again_before_its_end_was_delivered_is_the_same(
    log: Log,
) -> None:
    [first] = weighed(log, True)
    told(log)
    [second] = weighed(log, False, True)
    told(log)
    [over] = weighed(log, False)
    told(log)
    [other] = weighed(log, True)
    ids = [
        alert_message(
            "shop", one.name, firing=one.firing, since=one.since, summary=one.summary
        )["id"]
        for one in (first, second, over, other)
    ]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert (second.news, over.news, other.news) == (False, True, True)


def test_standby_reports_that_the_database_is_back(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    place, elsewhere = Path(log.spec.path), tmp_path / "unmounted"
    place.rename(elsewhere)
    said: list[str] = []
    stop = threading.Event()
    options = but(OPTIONS, away=timedelta(0))
    with receiver() as taking:
        spec = JobSpec((log.spec,), lake)
        follower = Follower(spec, options, Webhook(taking.url), stop, say=said.append)
        working = threading.Thread(target=follower.work)
        working.start()
        try:
            wait_until(lambda: taking.taken, deadline=60)
            # Another one is quicker.
            with alone(None, log.spec):  # type: ignore[arg-type]  # SQLite's is a file
                elsewhere.rename(place)
                wait_until(lambda: len(taking.taken) == 2, deadline=60)
        finally:
            stop.set()
            working.join()

    first, second = taking.taken
    assert (first["status"], second["status"]) == ("firing", "resolved")
    assert first["id"] == second["id"]
    assert "Another `follow` of 'shop' is running" in said[2]
    assert "The database is back" in said[1]


def test_a_concurrent_archive_is_reported_as_a_standstill_and_no_lake_outage(
    log: Log, lake: LakeSpec
) -> None:
    log.send_many(5)
    options = but(OPTIONS, away=timedelta(0), stuck_after=timedelta(0))
    said: list[str] = []
    stop = threading.Event()
    spec = JobSpec((log.spec,), lake)
    follower = Follower(spec, options, None, stop, say=said.append)
    working = threading.Thread(target=follower.work)
    with log.connected() as connection, archiving(connection, log.spec, "outbox"):
        working.start()
        rounds = "SELECT counts FROM django_txmsg_pipelinerun WHERE job = 'follow'"

        def several() -> bool:
            found = log.rows(rounds)
            counts = found[0][0] if found else "{}"
            counts = json.loads(counts) if isinstance(counts, str) else counts
            return bool(counts.get("rounds", 0) > 2)

        wait_until(several, deadline=60)
        firing = list(follower.telling.firing)
    try:
        wait_until(lambda: log.count() == 0, deadline=60)
    finally:
        stop.set()
        working.join()

    [standstill] = firing
    assert (standstill.name, standstill.bound) == ("standstill", 0)
    assert standstill.summary.startswith("Another archive, sweep or erasure of")
    assert said[0].endswith(standstill.summary)
    assert [line[:20] for line in said[1:]] == [
        "firing: standstill: ", "The lock of the arch", "resolved: standstill"
    ]  # fmt: skip


def test_no_standstill_is_measured_while_the_lake_is_away(
    make_log: Callable[..., Log], tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(5)
    place, said = tmp_path / "away", list[str]()
    spec = JobSpec((log.spec,), LakeSpec(f"file://{place}"))
    follower = Follower(spec, OPTIONS, None, threading.Event(), say=said.append)
    with log.connected() as connection, recorded(spec, "follow", {}) as run:
        with log.connected() as other, archiving(other, log.spec, "outbox"):
            follower._round(connection, run)
        assert said[0].endswith(follower.archive_lock.error)
        place.write_text("This is no directory.")
        follower._round(connection, run)
        place.unlink()

    assert "The lock of the archive is back" in said[1]
    assert "The lake" in said[2]
    assert not follower.archive_lock.tries


def test_refused_rows_are_reported_although_the_round_did_not_end(
    make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(10)

    def change(step: str) -> None:
        if step == "committed":
            requeue(log.spec)

    options = but(OPTIONS, table=["outbox", "inbox"])
    spec, stop = JobSpec((log.spec,), lake), threading.Event()
    follower = Follower(spec, options, None, stop, on_step=change, say=print)
    with (
        log.connected() as connection,
        recorded(spec, "follow", {}) as run,
        archiving(connection, log.spec, "inbox"),
    ):
        follower._round(connection, run)

    assert follower.archive_lock.tries
    firing = {one.name: one.value for one in follower.telling.firing}
    assert firing["refused"] == 1


def test_verify_is_started_beside_another_archive_if_there_is_a_lake(
    make_log: Callable[..., Log], lake: LakeSpec, monkeypatch
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(10)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    options, spec = (
        but(OPTIONS, verify_every=timedelta(days=7)),
        JobSpec((log.spec,), lake),
    )
    follower = Follower(spec, options, None, threading.Event(), say=print)
    for job in ("", "verify"):
        with (
            log.connected() as connection,
            recorded(spec, "follow", {}) as run,
            archiving(connection, log.spec, "outbox"),
        ):
            follower._round(connection, run)
        assert follower.archive_lock.tries
        assert follower.beside.job == job
        round_of(log, lake)
    follower.beside.stop()


def test_job_that_cannot_be_started_is_reported_and_holds_up_no_alert(
    make_log: Callable[..., Log], lake: LakeSpec, monkeypatch
) -> None:
    log: Log = make_log("sqlite")
    late = datetime.now(timezone.utc) - timedelta(hours=1)
    log.send([{"created_at": late, "dispatched_at": None}])
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    options = but(OPTIONS, reconcile_every=timedelta(hours=1))
    said: list[str] = []
    stop = threading.Event()
    spec = JobSpec((log.spec,), lake)
    with receiver() as taking:
        follower = Follower(spec, options, Webhook(taking.url), stop, say=said.append)
        working = threading.Thread(target=follower.work)
        working.start()
        try:
            wait_until(lambda: len(taking.taken) == 2, deadline=60)
        finally:
            stop.set()
            working.join()

    lag, failed = taking.taken
    assert (lag["alert"], failed["alert"]) == ("lag", "reconcile")
    assert "cannot be started" in failed["summary"]
    assert not [line for line in said if "The database cannot be used" in line]


def test_a_job_that_is_stopped_with_follow_has_not_failed(
    make_log: Callable[..., Log], lake: LakeSpec, monkeypatch
) -> None:
    """systemd and a terminal send the signal to all processes of `follow`."""
    log: Log = make_log("sqlite")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    options, spec = (
        but(OPTIONS, reconcile_every=timedelta(hours=1)),
        JobSpec((log.spec,), lake),
    )
    stop, said = threading.Event(), list[str]()
    follower = Follower(spec, options, None, stop, say=said.append)
    with log.connected() as connection, recorded(spec, "follow", {}) as run:
        follower._round(connection, run)
        assert follower.beside.job == "reconcile"
        stop.set()
        # The fake has ended at once.
        wait_until(lambda: follower.beside._process.poll() is not None)
        follower._round(connection, run)
    follower.beside.stop()

    assert not [line for line in said if "has failed" in line]
    count = "SELECT count(*) FROM django_txmsg_pipelinealert WHERE name = 'reconcile'"
    assert log.value(count) == 0


def test_alert_of_failed_reconciliations_goes_on_after_a_restart(
    make_log: Callable[..., Log], lake: LakeSpec, monkeypatch
) -> None:
    log: Log = make_log("sqlite")
    with log.connected() as connection:
        Alerts(connection, "shop").weigh("reconcile", 3, 1, "It failed thrice.")
    told(log)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    options = but(OPTIONS, reconcile_every=timedelta(hours=1))
    stop = threading.Event()
    spec = JobSpec((log.spec,), lake)
    summary = "SELECT summary FROM django_txmsg_pipelinealert WHERE name = 'reconcile'"
    with receiver() as taking:
        follower = Follower(spec, options, Webhook(taking.url), stop, say=print)
        working = threading.Thread(target=follower.work)
        working.start()
        try:
            wait_until(lambda: "cannot be started" in log.value(summary), deadline=60)
            # `follow` tells of it at the end of the round: after a stop, it would not.
            assert follower.run
            begun = follower.run.counts["rounds"]
            wait_until(lambda: follower.run.counts["rounds"] > begun + 1)
        finally:
            stop.set()
            working.join()

    assert taking.taken == []


@pytest.mark.parametrize(
    ("days", "options"), [(400, {}), (0, {"dry_run": "True"})], ids=["future", "dry"]
)
def test_run_in_the_future_and_dry_run_hold_up_no_later_run(
    log: Log, lake: LakeSpec, days: int, options: dict[str, str]
) -> None:
    at = datetime.now(timezone.utc) + timedelta(days=days)
    log.insert(
        "django_txmsg_pipelinerun",
        [{"id": uuid.uuid4(), "job": "sweep", "service": "shop", "state": "clean",
          "run_by": "", "lake": "", "options": options, "rows": 0, "counts": {},
          "error": "", "started_at": at}],
    )  # fmt: skip
    sweeps = "SELECT count(*) FROM django_txmsg_pipelinerun WHERE job = 'sweep'"
    for _ in range(2):
        round_of(log, lake, options=but(NOW, sweep_every=timedelta(days=1)))
        assert log.value(sweeps) == 2


def reach(follower: Follower) -> timedelta:
    """Return how far back the next `reconcile` judges messages."""
    option, since, *_ = follower.reconcile_words()
    assert option == "--since"
    return datetime.now(timezone.utc) - datetime.fromisoformat(since)


def reconciled(log: Log, ended: datetime, **options: Any) -> None:
    judged = {"services": ["shop"], "judged_until": str(ended - timedelta(days=2))}
    log.insert(
        "django_txmsg_pipelinerun",
        [{"id": uuid.uuid4(), "job": "reconcile", "service": "shop",
          "state": "clean", "run_by": "", "lake": "", "options": judged | options,
          "rows": 0, "counts": {}, "error": "", "started_at": ended,
          "finished_at": ended}],
    )  # fmt: skip


def test_reconcile_covers_the_time_without_follow(log: Log, lake: LakeSpec) -> None:
    """`follow` was stopped for five days. Messages are stuck after two days, which is
    longer than `--since`. A run that an operator starts with a shorter `--since`, or
    with fewer services, leaves out messages of these days. So does a run on a replica
    that lags behind."""
    day, now = timedelta(days=1), datetime.now(timezone.utc)
    spec = JobSpec((log.spec,), lake, stuck_after=2 * day.total_seconds())
    follower = Follower(spec, but(NOW, since=day), None, threading.Event())

    back, ran = partial(reach, follower), partial(reconciled, log)
    assert 3 * day <= back() < 3.1 * day
    ran(now - 5 * day)
    assert 8 * day <= back() < 8.1 * day
    ran(now - 2 * day, since=str(now - 6 * day))
    assert 8 * day <= back() < 8.1 * day
    ran(now - 2 * day, services=["payments"])
    assert 8 * day <= back() < 8.1 * day
    # At that time, messages were stuck after two hours.
    ran(now - 2 * day, since=str(now - 8 * day), judged_until=str(now - 2.1 * day))
    assert 3.1 * day <= back() < 3.2 * day
    lagging = {"services": ["payments", "shop"], "judged_until": str(now - 4 * day)}
    ran(now - day, since=str(now - 3.1 * day), **lagging)
    assert 5 * day <= back() < 5.1 * day


def test_reconcile_covers_the_time_before_a_service_was_added(
    log: Log, lake: LakeSpec
) -> None:
    """`follow` was stopped for five days, and starts again with one more service. All
    earlier services were in the runs until then."""
    day, now = timedelta(days=1), datetime.now(timezone.utc)
    more = [replace(log.spec, service=one) for one in ("payments", "mails")]
    spec = JobSpec((log.spec, *more), lake)
    follower = Follower(spec, but(NOW, since=day), None, threading.Event())
    both = {"services": ["payments", "shop"], "judged_until": str(now - 5 * day)}

    reconciled(log, now - 5 * day, **both)

    assert 6 * day <= reach(follower) < 6.1 * day
    # Neither of them has judged what the next run of both must judge.
    new = {"services": ["mails", "payments", "shop"], "since": str(now - 4 * day)}
    for one in (new, {"services": ["mails", "shop"]}):
        reconciled(log, now - day, **one, judged_until=str(now - 2 * day))
        assert reach(follower) >= 6 * day


def test_findings_made_without_follow_are_reported(log: Log, lake: LakeSpec) -> None:
    spec = JobSpec((log.spec,), lake)
    with log.connected() as connection:
        now = datetime.now(timezone.utc)

        def noted(*verdicts: str) -> None:
            Noted(log.spec).keep(
                [{"message_id": str(uuid.uuid4()), "destination": "d", "sender": "",
                  "consumer": "", "sent_at": now, "found_at": now, "verdict": one}
                 for one in verdicts],
                now,
            )  # fmt: skip

        # `lost` is what is lost, and nothing else that a run finds.
        noted("dead", "late", "unknown_sender")
        assert alerts.count_lost(connection, log.spec, LOST) == {}
        noted("never_received", "never_received", "dead")
        with receiver() as taking:
            stop = threading.Event()
            # Not due within this test.
            day, never = timedelta(days=1), timedelta()
            options = but(OPTIONS, reconcile_every=day, verify_every=never)
            log.insert(
                "django_txmsg_pipelinerun",
                [{"id": uuid.uuid4(), "job": "reconcile", "service": "shop",
                  "state": "findings", "run_by": "", "lake": "", "options": {},
                  "rows": 0, "counts": {}, "error": "", "started_at": now}],
            )  # fmt: skip
            follower = Follower(spec, options, Webhook(taking.url), stop)
            working = threading.Thread(target=follower.work)
            working.start()
            try:
                wait_until(lambda: taking.taken, deadline=60)
            finally:
                stop.set()
                working.join()
        assert alerts.count_lost(connection, log.spec, LOST) == {}
    [lost] = taking.taken
    assert (lost["alert"], lost["value"]) == ("lost", 2)
    assert "new: 2 never_received. " in lost["summary"]
    assert "may still wait at its broker" in lost["summary"]


def test_findings_are_counted_once_if_a_check_falls_before_the_end_of_their_run(
    log: Log, lake: LakeSpec
) -> None:
    spec = JobSpec((log.spec,), lake)
    with log.connected() as connection:
        with recorded(spec, "reconcile", {}) as run:
            finding = finding_of(run)
            Noted(log.spec).keep([finding], run.started_at)
            found = alerts.count_lost(connection, log.spec, LOST)
        assert found == {"never_received": 1}
        assert alerts.count_lost(connection, log.spec, LOST) == {}

        with recorded(spec, "reconcile", {}) as run:
            Noted(log.spec).keep([finding, finding_of(run)], run.started_at)
        assert alerts.count_lost(connection, log.spec, LOST) == found

        # One that was gone and comes back is new.
        with recorded(spec, "reconcile", {}) as run:
            finding["found_at"] = run.started_at
            Noted(log.spec).keep([finding], run.started_at)
        assert alerts.count_lost(connection, log.spec, LOST) == found


def test_findings_that_were_known_before_are_not_counted_as_new(
    log: Log, lake: LakeSpec
) -> None:
    spec, noted = JobSpec((log.spec,), lake), Noted(log.spec)
    with log.connected() as connection:
        with recorded(spec, "reconcile", {}) as run:
            acknowledged, left_out = finding_of(run), finding_of(run)
            noted.keep([acknowledged], run.started_at)
        noted.acknowledge(Which(), "ann", "known")
        assert alerts.count_lost(connection, log.spec, LOST) == {}
        noted.reopen(Which())
        # Of too many findings, the database has only the worst.
        with recorded(spec, "reconcile", {}) as run:
            noted.keep([acknowledged, left_out], run.started_at)

        assert alerts.count_lost(connection, log.spec, LOST) == {}


def test_instants_that_are_compared_are_of_the_databases_clock(pg_log: Log) -> None:
    """`follow` and `reconcile` may run on different hosts. The database's clock is an
    hour behind theirs."""
    name = pg_log.spec.url.rpartition("/")[2]
    pg_log.execute(
        "CREATE FUNCTION public.now() RETURNS timestamptz STABLE LANGUAGE sql AS"
        " $$ SELECT pg_catalog.now() - interval '1 hour' $$"
    )
    pg_log.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')
    with pg_log.connected() as connection:
        Alerts(connection, "shop").weigh("lost", 1, 0, "One is lost.")
        with recorded(JobSpec((pg_log.spec,)), "reconcile", {}) as run:
            pass
        now = connection.clock()
        [at] = connection.rows(
            "SELECT started_at, finished_at, since, checked_at FROM"
            " django_txmsg_pipelinerun, django_txmsg_pipelinealert"
        )
    assert datetime.now(timezone.utc) - now > timedelta(minutes=59)
    assert all(timedelta() <= now - one < timedelta(minutes=1) for one in at)
    assert run.started_at == at[0]


def test_findings_whose_count_could_not_be_stored_are_counted_at_the_next_check(
    log: Log, lake: LakeSpec
) -> None:
    """The database refuses to store the alert once. The run of the findings is still in
    progress at both checks."""
    spec = JobSpec((log.spec,), lake)
    follower = Follower(spec, NOW, None, threading.Event())

    def lost(connection: Connection) -> float:
        alerts = Alerts(connection, "shop").read()
        return next(one.value for one in alerts if one.name == "lost")

    with log.connected() as connection:
        Alerts(connection, "shop").weigh("lost", 0, 0, "Nothing is known yet.")
        with recorded(spec, "reconcile", {}) as run:
            Noted(log.spec).keep([finding_of(run)], run.started_at)
            with refusing(connection, log.vendor), pytest.raises(EnvironmentFault):
                follower._lost(connection)
            assert lost(connection) == 0
            follower._lost(connection)
            assert lost(connection) == 1
        # The run has ended since the last check, and is not counted again.
        follower._lost(connection, str(uuid.uuid4()))
        assert lost(connection) == 0


def test_findings_are_counted_if_the_clock_was_ahead_at_the_last_check(
    log: Log, lake: LakeSpec
) -> None:
    spec = JobSpec((log.spec,), lake)
    follower = Follower(spec, NOW, None, threading.Event())
    with log.connected() as connection:
        Alerts(connection, "shop").weigh("lost", 0, 0, "Nothing is known yet.")
        connection.execute(
            "UPDATE django_txmsg_pipelinealert SET checked_at = %s",
            connection.clock() + timedelta(days=1),
        )
        with recorded(spec, "reconcile", {}) as run:
            Noted(log.spec).keep([finding_of(run)], run.started_at)

        follower._lost(connection, run.id)

        [lost] = Alerts(connection, "shop").read()
    assert lost.value == 1
    assert lost.summary.startswith(f"Found by run {run.id}, new: 1 never_received.")


@contextmanager
def refusing(connection: Connection, vendor: str) -> Iterator[None]:
    """Let the database refuse to store an alert during the block."""
    table = "django_txmsg_pipelinealert"
    if vendor == "postgresql":
        connection.execute(f"ALTER TABLE {table} ADD CHECK (bound < 0) NOT VALID")
        undo = f"ALTER TABLE {table} DROP CONSTRAINT {table}_bound_check"
    else:
        connection.execute(
            f"CREATE TRIGGER refusal BEFORE INSERT ON {table}"
            " BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
        undo = "DROP TRIGGER refusal"
    try:
        yield
    finally:
        connection.execute(undo)


def finding_of(run: Run) -> dict[str, Any]:
    """Return a finding that this run is the first to find."""
    return {
        "message_id": str(uuid.uuid4()), "destination": "d", "sender": "",
        "consumer": "", "sent_at": LONG_AGO, "found_at": run.started_at,
        "verdict": "never_received",
    }  # fmt: skip


def test_findings_of_a_run_that_was_in_progress_at_a_check_are_reported(
    log: Log, lake: LakeSpec
) -> None:
    """An operator's `reconcile` began before the check, and ends after it."""
    spec = JobSpec((log.spec,), lake)
    with log.connected() as connection:
        weigh = Alerts(connection, "shop").weigh
        with recorded(spec, "reconcile", {}) as run:
            weigh("lost", 0, 0, "Nothing is known yet.")
            Noted(log.spec).keep([finding_of(run)], run.started_at)
        assert alerts.count_lost(connection, log.spec, LOST) == {"never_received": 1}

        weigh("lost", 1, 0, "One is lost.")
        assert alerts.count_lost(connection, log.spec, LOST) == {}


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "https:///secret", "https://u:p@host", "one"]
)
def test_malformed_webhook_address_is_refused_and_not_printed(url: str) -> None:
    with pytest.raises(NoWebhook, match="is not understood") as refused:
        Webhook(url)

    assert url not in str(refused.value)


def test_database_outage_is_waited_for_and_reported(
    pg_log: Log, lake: LakeSpec, tmp_path: Path, postgres
) -> None:
    pg_log.send_many(20)
    before = hashes_in(pg_log)
    with receiver() as taking, Proxy(postgres.port) as proxy:
        url = pg_log.spec.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        spec = JobSpec((replace(pg_log.spec, url=url),), lake)
        environment = {"TXMSG_WEBHOOK_URL": taking.url}
        words = ("--away", "0.5s")
        password = {"TXMSG_PASSWORD_SHOP": "txmsg-secret"}
        with following(spec, tmp_path, *words, **environment, **password) as process:
            wait_until(lambda: pg_log.count() == 0, deadline=60)
            proxy.refuse()
            proxy.cut()
            wait_until(lambda: taking.taken, deadline=60)
            pg_log.send_many(30)
            before |= hashes_in(pg_log)
            proxy.accept()
            wait_until(lambda: pg_log.count() == 0, deadline=120)
            wait_until(lambda: len(taking.taken) == 2, deadline=60)
            code, _, errors = ended(process)

    assert code == 0
    told = [(one["alert"], one["status"]) for one in taking.taken]
    assert told == [("database", "firing"), ("database", "resolved")]
    assert taking.taken[0]["id"] == taking.taken[1]["id"]
    assert errors.count("The database cannot be used; waiting for it: ") == 1
    assert "The database is back after " in errors
    assert SECRET not in errors
    assert "txmsg-secret" not in errors
    assert_moved_once(before, pg_log, lake, set(range(1, 51)))


def test_lake_outage_is_waited_for_and_reported(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    log.send_many(20)
    before = hashes_in(log)
    place, elsewhere = tmp_path / "lake", tmp_path / "unmounted"
    with receiver() as taking:
        environment = {"TXMSG_WEBHOOK_URL": taking.url}
        spec = JobSpec((log.spec,), lake)
        with following(spec, tmp_path, "--away", "0.5s", **environment) as process:
            wait_until(lambda: log.count() == 0, deadline=60)
            place.rename(elsewhere)
            log.send_many(30)
            before |= hashes_in(log)
            wait_until(lambda: taking.taken, deadline=60)
            assert log.count() == 30
            # What a mount point gets when the lake leaves in the middle of a round.
            shutil.rmtree(place, ignore_errors=True)
            elsewhere.rename(place)
            wait_until(lambda: log.count() == 0, deadline=120)
            wait_until(lambda: len(taking.taken) == 2, deadline=60)
            code, _, errors = ended(process)

    assert code == 0
    told = [(one["alert"], one["status"]) for one in taking.taken]
    assert told == [("lake", "firing"), ("lake", "resolved")]
    assert re.search("lost batches|is not a lake", taking.taken[0]["summary"])
    assert errors.count("The lake cannot be used; waiting for it: ") == 1
    assert "The lake is back after " in errors
    assert_moved_once(before, log, lake, set(range(1, 51)))


def test_follow_stopped_during_a_lake_outage_creates_no_lake(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    log.send_many(5)
    round_of(log, lake)
    place, stop = tmp_path / "lake", threading.Event()
    place.rename(tmp_path / "unmounted")
    place.mkdir()

    def say(line: str) -> None:
        assert line.startswith("The lake cannot be used")
        stop.set()

    Follower(JobSpec((log.spec,), lake), OPTIONS, None, stop, say=say).work()

    assert list(place.iterdir()) == []
    state = "SELECT state FROM django_txmsg_pipelinerun ORDER BY started_at"
    assert [row[0] for row in log.rows(state)] == ["clean", "clean"]


def test_a_database_outage_is_not_reported_as_a_lake_outage(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    log.send_many(5)
    stop, said = threading.Event(), []

    def on_step(step: str) -> None:
        # Open connections go on with a file that has no name any more.
        Path(log.spec.path).rename(tmp_path / "unmounted")
        raise OSError(step)

    def say(line: str) -> None:
        said.append(line)
        stop.set()

    spec = JobSpec((log.spec,), lake)
    Follower(spec, OPTIONS, None, stop, say=say, on_step=on_step).work()

    assert len(said) == 1
    assert said[0].startswith("The database cannot be used")


def test_a_second_follow_stands_by_and_takes_over(
    log: Log, lake: LakeSpec, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TXMSG_PASSWORD_SHOP", "txmsg-secret")
    spec = JobSpec((log.spec,), lake)
    log.send_many(5)
    before = hashes_in(log)
    with following(spec, tmp_path) as first:
        wait_until(lambda: log.count() == 0, deadline=60)
        with following(spec, tmp_path) as second:
            assert second.stderr is not None
            assert "Another `follow`" in second.stderr.readline()
            first.kill()
            log.send_many(5)
            before |= hashes_in(log)
            wait_until(lambda: log.count() == 0, deadline=60)
            assert ended(second)[0] == 0

    assert_moved_once(before, log, lake, set(range(1, 11)))


def test_a_forgotten_transaction_is_an_alert_and_an_exit_code(
    pg_log: Log, lake: LakeSpec
) -> None:
    spec = JobSpec((pg_log.spec,), lake)
    words = ["follow", "--once", "--older-than", "1d", "--table", "outbox",
             "--stuck-after", "0s", "--sweep-every", "0s"]  # fmt: skip
    with pg_log.connected() as forgotten:
        forgotten.raw.autocommit = False
        forgotten.execute("CREATE TABLE forgotten ()")
        pg_log.send_many(5)
        stuck = outcome(spec, *words)
        forgotten.raw.rollback()
    clean = outcome(spec, *words)

    assert (stuck.exit_code, stuck.facts["firing"]) == (1, ["standstill"])
    assert "5 rows of outbox wait for process " in stuck.lines[0]
    assert (clean.exit_code, clean.facts["rows"]) == (0, 5)


def test_dry_run_and_failed_round_are_reported(
    log: Log, tmp_path: Path, monkeypatch
) -> None:
    log.send_many(5)
    spec = JobSpec((log.spec,), LakeSpec(f"file://{tmp_path}/lake"))
    words = ["follow", "--older-than", "1d", "--once"]
    would = outcome(spec, *words, "--dry-run")
    assert (would.exit_code, would.facts["outbox"], would.facts["run"]) == (0, 5, None)
    assert log.count("django_txmsg_pipelinealert") == 0
    (tmp_path / "lake").touch()
    for more in (["--dry-run"], []):
        with pytest.raises(EnvironmentFault, match="Not a directory"):
            outcome(spec, *words, *more)
    monkeypatch.setenv("HOOK", "nonsense")
    with pytest.raises(UsageError, match="is not understood"):
        outcome(spec, *words, "--webhook-env", "HOOK")


@pytest.mark.django_db(transaction=True)
def test_metrics_say_what_fires(tmp_path: Path, settings, capsys) -> None:
    settings.TXMSG = {"SERVICE": "shop", "LAKE": f"file://{tmp_path}/lake"}
    call_command("txmsg", "pipeline", "follow", "--once", "--sweep-every", "0s")
    assert "follow: 0 rows in " in capsys.readouterr().out
    PipelineAlert.objects.filter(name="lag").update(firing=True, value=901)
    registry = CollectorRegistry()
    registry.register(metrics.Collector())

    text = generate_latest(registry).decode()
    assert 'txmsg_pipeline_alert{alert="lag",service="shop"} 1.0' in text
    assert (
        'txmsg_pipeline_value{alert="lag",service="shop",unit="seconds"} 901.0' in text
    )
    assert 'pipeline_limit{alert="dead_letters",service="shop",unit="number"}' in text
    assert 'txmsg_pipeline_alert{alert="lake",service="shop"} 0.0' in text
    assert 'txmsg_pipeline_checked_age_seconds{alert="lake",service="shop"}' in text


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_stopped_while_the_database_is_silent_it_ends_in_time(
    pg_log: Log, lake: LakeSpec, tmp_path: Path, postgres
) -> None:
    pg_log.send_many(5)
    with Proxy(postgres.port) as proxy:
        url = pg_log.spec.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        spec = JobSpec((replace(pg_log.spec, url=url),), lake)
        password = {"TXMSG_PASSWORD_SHOP": "txmsg-secret"}
        with following(spec, tmp_path, **password) as process:
            wait_until(lambda: pg_log.count() == 0, deadline=60)
            proxy.hang()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "stopped without an answer after 20 s" in errors


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_lost_messages_are_found_beside_the_archive(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    log.send_many(5, created_at=datetime.now(timezone.utc) - timedelta(hours=2))
    log.send_many(7)
    with receiver() as taking:
        words = ("--reconcile-every", "1s", "--since", "3d")
        environment = {"TXMSG_WEBHOOK_URL": taking.url}
        spec = JobSpec((log.spec,), lake)
        with following(spec, tmp_path, *words, **environment) as process:
            wait_until(lambda: taking.taken, deadline=200)
            # The next one finds nothing new.
            wait_until(lambda: len(taking.taken) == 2, deadline=200)
            assert ended(process)[0] == 0

    [lost, over] = taking.taken
    assert (lost["alert"], lost["status"], lost["value"]) == ("lost", "firing", 5)
    assert "5 never_received" in lost["summary"]
    assert (over["alert"], over["status"]) == ("lost", "resolved")
    # What was archived is in the journeys, however long ago it was sent.
    assert delta_rows(lake, JOURNEYS).num_rows == 7


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_requested_replay_is_run_beside_the_archive(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    message = uuid.uuid4()
    log.send([{"message_id": message}])
    request = request_replay(log, message)
    with following(JobSpec((log.spec,), lake), tmp_path) as process:
        stored = (
            "SELECT message_id FROM django_txmsg_outboxmessage WHERE replay_id = %s"
        )
        name = f"replay-{request}"
        wait_until(lambda: log.rows(stored, name), deadline=200)
        states = "SELECT state FROM django_txmsg_pipelinerun WHERE run_by = 'ann'"
        wait_until(lambda: log.value(states) == "clean", deadline=60)
        assert ended(process)[0] == 0

    # The message itself has left for the lake.
    assert [uuid.UUID(row[0]) for row in log.rows(stored, name)] == [message]
    assert log.count() == 1


@pytest.mark.parametrize(
    ("state", "error", "age", "summary"),
    [
        ("clean", "", 0, ""),
        ("refused", "outbox: a.parquet is damaged.\nAnother.", 0, "outbox: a.parq"),
        ("failed", "The lake is away.", 0, "The lake is away."),
        ("running", "", 0, ""),
        ("running", "", 2, "It began at "),
    ],
)
def test_the_last_verify_decides_about_its_alert(
    log: Log, lake: LakeSpec, state: str, error: str, age: int, summary: str
) -> None:
    now = datetime.now(timezone.utc)
    for days, *result in ((9, "refused", "It was damaged."), (age, state, error)):
        log.insert(
            "django_txmsg_pipelinerun",
            [{"id": uuid.uuid4(), "job": "verify", "service": "shop",
              "state": result[0], "run_by": "", "lake": "", "options": {}, "rows": 0,
              "counts": {}, "error": result[1],
              "started_at": now - timedelta(days=days)}],
        )  # fmt: skip
    follower, _ = round_of(log, lake)
    found = [one.summary for one in follower.telling.firing if one.name == "verify"]
    assert len(found) == bool(summary)
    assert all(one.startswith(summary) for one in found)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_damaged_file_is_found_beside_the_archive(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    log = make_log("sqlite")
    log.send_many(5, created_at=datetime.now(timezone.utc) - timedelta(days=2))
    with receiver() as taking:
        environment = {"TXMSG_WEBHOOK_URL": taking.url}
        spec = JobSpec((log.spec,), lake)
        with following(spec, tmp_path, **environment) as process:
            wait_until(lambda: log.count() == 0, deadline=60)
            assert ended(process)[0] == 0
        [path] = (tmp_path / "lake" / "outbox").rglob("*.parquet")
        intact = path.read_bytes()
        middle = len(intact) // 2
        path.write_bytes(intact[:middle] + b"\0\0\0\0" + intact[middle + 4 :])
        with following(
            spec, tmp_path, "--verify-every", "2s", **environment
        ) as process:
            wait_until(lambda: taking.taken, deadline=200)
            path.write_bytes(intact)
            wait_until(lambda: len(taking.taken) == 2, deadline=200)
            assert ended(process)[0] == 0

    [spoilt, over] = taking.taken
    assert (spoilt["alert"], spoilt["status"]) == ("verify", "firing")
    assert path.name in spoilt["summary"]
    assert (over["alert"], over["status"]) == ("verify", "resolved")
