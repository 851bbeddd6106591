"""A process works in all databases that have messages. It determines its stages'
databases only once."""

from __future__ import annotations

import datetime as dt
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from django_txmsg import outbox_session
from django_txmsg.consuming import rates
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.dead_letters import bulk
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.stage_options import TransactionMode
from django_txmsg.errors import InvalidMessage
from django_txmsg.management.commands import _workers
from django_txmsg.models import BulkOperation, DeadLetter, OutboxMessage, Worker
from django_txmsg.models.fields import clock
from django_txmsg.monitoring import databases
from django_txmsg.monitoring.periods import Charts
from django_txmsg.relaying.relay import Relay
from django_txmsg.scheduling.time_loop import keeping_time
from django_txmsg.scheduling.timekeeper import Timekeeper
from django_txmsg.sending.outbox import send_message
from django_txmsg.stages import Stage, TransactionDefinition
from tests.factories import DeadLetterFactory
from tests.faults import ManageProcess, wait_until
from tests.integration.test_stop_message import consuming
from tests.running import committing, declared, drained, put, running, step, txmsg

pytestmark = committing

asked: list[str] = []


def definition(stage: Stage) -> TransactionDefinition:
    """Return the transaction definition of a stage, and record the call."""
    asked.append(stage.name)
    return TransactionDefinition(using="default")


def refuses(message: Message) -> None:
    raise ValueError


@contextmanager
def silent() -> Iterator[None]:
    """Lock the database "other" from another connection, so that it does not answer. A
    query on it waits for 20 seconds."""
    settings = connections["other"].settings_dict
    with (
        closing(sqlite3.connect(settings["NAME"])) as holder,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Django does not close a connection whose first command fails.
        patch.setitem(settings["OPTIONS"], "init_command", "")
        holder.execute("BEGIN EXCLUSIVE")
        yield


def test_redeliveries_continue_while_another_database_does_not_answer() -> None:
    attempts: list[int] = []

    def fails_once(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        if len(attempts) == 1:
            raise ValueError

    with (
        txmsg(),
        declared(fails_once) as one,
        declared(refuses, using="other") as another,
        consuming(another, one),
        silent(),
    ):
        put(one.destination)
        wait_until(lambda: attempts == [1, 2], deadline=10)


def test_ticks_are_stored_while_another_database_does_not_answer() -> None:
    tick = {"EVERY": "* * * * * *", "DESTINATION": "tests.second"}
    with txmsg(SCHEDULE={"here": tick, "there": {**tick, "USING": "other"}}):
        timekeeper = Timekeeper(["other", "default"])
        with keeping_time([timekeeper], lambda: None), silent():
            wait_until(lambda: timekeeper.stored, deadline=10)


def test_a_changed_rate_waits_only_for_its_own_database() -> None:
    attempts: list[int] = []

    def fails_once(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        if len(attempts) == 1:
            raise ValueError

    with (
        txmsg(),
        declared(fails_once) as one,
        declared(refuses, using="other", rate="100/s") as another,
        consuming(another, one),
        silent(),
    ):
        rates.limit(another.name, "5/s", dt.timedelta(hours=1), by="operator")
        put(one.destination)
        wait_until(lambda: attempts == [1, 2], deadline=10)


def test_heartbeats_continue_while_another_database_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Charts, "first", lambda self: 0.0)
    own = Worker.objects.filter(kind="relay")
    relay = Relay(["other", "default"], ["default"])
    with (
        txmsg(CONSUME={"HEARTBEAT": 0.1}),
        silent(),
        keeping_time([Charts(["other", "default"])], relay.stop),
        _workers.heartbeat(relay, relay.stop),
    ):
        wait_until(own.exists)
        since = clock("default") + dt.timedelta(seconds=1)
        wait_until(own.filter(heartbeat_at__gt=since).exists, deadline=10)


def test_relay_once_dispatches_while_another_database_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = connections["other"].settings_dict["OPTIONS"]
    tick = {"EVERY": "1 0 1 1 *", "DESTINATION": "tests.second", "USING": "other"}
    connections["other"].close()
    monkeypatch.setitem(options, "timeout", 0.1)
    with txmsg(SCHEDULE={"there": tick}), silent():
        with transaction.atomic():
            send_message("tests.first", None)
        with pytest.raises(CommandError, match="locked"):
            call_command("relay", "--once")
    assert "Dispatched 1 message" in capsys.readouterr().out
    connections["other"].close()


def test_a_bulk_operation_of_another_database_is_finished() -> None:
    with (
        txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}),
        declared(refuses, using="other", broker="apart") as stage,
    ):
        put(stage.destination, broker="apart")
        step(stage)
        assert DeadLetter.objects.using("other").exists()
        bulk.start("discard", {}, using="other")
        Consumer([]).run(once=True)
    assert BulkOperation.objects.using("other").get().state == "done"


def test_a_stages_transaction_is_found_out_once() -> None:
    path = "tests.integration.test_several_databases.definition"
    done: list[Message] = []
    with txmsg(TRANSACTION_DEFINITION=path), declared(done.append) as stage:
        with running(stage):
            asked.clear()
            for _ in range(5):
                put(stage.destination)
            wait_until(lambda: len(done) == 5)
        assert asked == []


def test_no_warning_names_a_database_without_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with txmsg():  # broker "apart" has its queues in the other database
        assert databases.left_out() == []
    with txmsg(BROKERS={"default": {"URL": "database://"}}):
        assert databases.left_out() == ["other"]
        monkeypatch.setattr(connections["other"], "vendor", "mysql")
        assert databases.left_out() == []


@pytest.mark.parametrize("command", ["relay", "txmsg run"])
def test_a_worker_names_the_databases_that_it_does_not_serve(command: str) -> None:
    with ManageProcess(*command.split()) as process:
        wait_until(
            lambda: "but not other." in process.output,
            message=lambda: process.output,
        )
    assert "also run manage.py relay --database other." in process.output


@pytest.mark.parametrize("mode", ["none", "best_effort_1pc", "broker_only"])
def test_another_database_without_a_transaction_of_its_own_is_refused(
    mode: TransactionMode,
) -> None:
    """The stage could store the message only in its own database, or send it at
    once."""

    def handler(message: Message) -> None:
        with pytest.raises(InvalidMessage, match=r"outbox_session\(using='other'\)"):
            send_message("tests.next", 1, using="other")
        with outbox_session(using="other"):
            send_message("tests.next", 2, using="other")

    with txmsg(), declared(handler, transaction=mode) as stage:
        put(stage.destination)
        step(stage)
        assert drained("tests.next") == []
    assert not OutboxMessage.objects.exists()
    assert OutboxMessage.objects.using("other").get().body == b"2"


WITHOUT_DEFAULT = """
import sys
import django
from django.conf import settings
from django.core.management import call_command
from django.db import transaction

class Router:
    def db_for_read(self, model, **hints):
        return "shop"
    db_for_write = db_for_read

shop = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}
settings.configure(
    DATABASES={"default": {}, "shop": shop},
    DATABASE_ROUTERS=[Router()],
    INSTALLED_APPS=["django_txmsg"],
    SECRET_KEY="a key that signs nothing but what this test signs with it",
    TXMSG={
        "SERVICE": "shop",
        "BROKERS": {"default": {"URL": "database://shop"}},
        "HTTP": {"USING": "shop"},
        "FLOWS": {"BATCHES": True},
    },
)
django.setup()
from django_txmsg import stage
from django_txmsg.flows import batch

@stage("mail", using="shop")
def mail(message):
    print("mail")

@stage("over", using="shop")
def over(message):
    print(message.body["answered"])

call_command("migrate", database="shop", verbosity=0)
call_command("check")
with transaction.atomic(using="shop"):
    batch([{"destination": "mail", "body": None}], then="over")
for command in ("relay", "consume") * 3:
    call_command(command, once=True, verbosity=0)
"""


def test_commands_name_the_database_of_a_stages_dead_letters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with declared(refuses, using="other") as stage:
        of_it = ("--stage", stage.name)
        for action in ("list", "discard", "redeliver"):
            with pytest.raises(CommandError, match="--database other"):
                call_command("dead_letters", action, *of_it)
        bury = ("txmsg", "contracts", "bury", *of_it)
        with pytest.raises(CommandError, match="--database other"):
            call_command(*bury)
        call_command(*bury, "--database", "other")
        call_command("dead_letters", "list", *of_it, "--database", "other")
        DeadLetterFactory.build(stage=stage.name).save(using="other")
        capsys.readouterr()
        for action in ("list", "groups"):
            call_command("dead_letters", action)
            said = capsys.readouterr().out.splitlines()
            assert said[-1] == "1 open elsewhere: --database other"
            call_command("dead_letters", action, "--reason", "expired")
            assert "elsewhere" not in capsys.readouterr().out
            # Each database numbers its own bulk operations.
            DeadLetter.objects.using("other").update(operation=5)
            call_command("dead_letters", action, "--operation", "5")
            assert "elsewhere" not in capsys.readouterr().out


DRAINED = """
from django.test import override_settings
from django_txmsg import send_message
from django_txmsg.testing import drain

outside = {**settings.TXMSG, "BROKERS": {"default": {"URL": "stomp://there:1"}}}
with override_settings(TXMSG=outside):
    with transaction.atomic(using="shop"):
        send_message("mail", None, using="shop")
    drain()
"""


def test_drain_needs_no_database_named_default(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEFAULT + DRAINED, str(tmp_path / "db.sqlite3")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["mail", "1", "mail"]


def test_a_flow_batch_is_stored_in_the_outboxs_database(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEFAULT, str(tmp_path / "db.sqlite3")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["mail", "1"]
