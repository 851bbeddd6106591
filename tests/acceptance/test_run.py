"""`manage.py txmsg run`: relay, stages and pruning in one process, and `--reload`.

`test_stop.py` tests how the process stops in every state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from django.db import connection, transaction

from django_txmsg.consuming.consumer import Consumer
from django_txmsg.management.commands import _supervisor
from django_txmsg.models import (
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    Schedule,
    Worker,
)
from django_txmsg.monitoring import retention
from django_txmsg.runtime.thread_group import start_daemon
from django_txmsg.sending.outbox import send_message
from tests import factories as make
from tests.acceptance.stop_states import World
from tests.acceptance.test_stop import everything_happens_once
from tests.app.models import Effect
from tests.factories import ago
from tests.faults import ROOT, ManageProcess, wait_until
from tests.running import IMPATIENT, committing, declared, put, running, txmsg

pytestmark = committing

Manage = Callable[..., ManageProcess]

#: A short lease: the messages of a killed process are soon due again.
BROKERS = {"default": {"URL": "database://?poll=0.01&lease=2"}}
STAGES = """
import threading
from django_txmsg import RedeliveryPolicy, stage
from django_txmsg.management.commands import _run, _supervisor
from django_txmsg.monitoring import retention
from tests.app.models import Effect

_supervisor.GRACE = 1.0
_run.SUBSCRIBING = 600.0
retention.FIRST = 0.1


def declare():
    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0)
    @stage("tests.run", redelivery=policy)
    def handle(message):
        if message.body == "hang":
            print("it hangs", flush=True)
            threading.Event().wait()
        if message.body == "bad":
            raise ValueError("as the test says")
        Effect.objects.create(name="VERSION", message_id=str(message.id))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The file with the service's code, which a test may change."""
    file = tmp_path / "service_of_a_test.py"
    file.write_text(STAGES.replace("VERSION", "first"))
    return file


@pytest.fixture
def run(manage: Manage, code: Path) -> Callable[..., ManageProcess]:
    """Return a function that starts `txmsg run` with the service's code, and with
    further brokers. `dispatch` is the setting DISPATCH_ON_COMMIT."""

    def start(
        *options: str, dispatch: str = "off", **brokers: dict[str, str]
    ) -> ManageProcess:
        settings = {"BROKERS": BROKERS | brokers, "DISPATCH_ON_COMMIT": dispatch}
        process = manage(
            "txmsg",
            "run",
            *options,
            txmsg=IMPATIENT | settings,
            hook="service_of_a_test.declare",
            env={"PYTHONPATH": str(code.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        process.wait_for_line("Running: .*tests.run")
        return process

    return start


def on_a_topic(code: Path, options: str = "") -> None:
    """Make the service's stage consume a topic."""
    text = code.read_text().replace('"tests.run", ', f'"topic:tests.run", {options}')
    code.write_text(text)


def effects(name: str) -> int:
    return Effect.objects.filter(name=name).count()


def test_run_relays_consumes_and_prints_a_line_for_each_message(
    run: Callable[..., ManageProcess],
) -> None:
    with txmsg(), transaction.atomic():
        good = send_message("tests.run", "good")
        bad = send_message("tests.run", "bad")
        far = send_message("tests.elsewhere", None)
    process = run()
    process.wait_for_line(rf"tests\.run: processed in \d+ ms  {good.id}")
    process.wait_for_line(rf"attempt 1 failed, .*: ValueError: as the .*  {bad.id}")
    process.wait_for_line(rf"dead letter \(attempts_exhausted\): .*  {bad.id}")
    process.wait_for_line(rf"tests\.elsewhere: sent to broker default  {far.id}")
    put("tests.run", message_id=good.id)
    process.wait_for_line(rf"tests\.run: a copy, dropped  {good.id}")
    kinds = set(Worker.objects.values_list("kind", flat=True))
    process.terminate()
    lines = process.succeed().splitlines()
    assert kinds == {"relay", "consumer"}
    assert not Worker.objects.exists()
    # No line appears twice, although this project does not configure logging.
    assert sum(str(bad.id) in line for line in lines) == 2
    assert sum(str(good.id) in line for line in lines) == 2
    assert DeadLetter.objects.get().message_id == bad.id


def test_stored_messages_reach_the_topics_stages_at_the_first_start(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    """The stage has never subscribed before."""
    on_a_topic(code)
    with txmsg(), transaction.atomic():
        sent = [send_message("topic:tests.run", number) for number in range(3)]
    process = run()
    for one in sent:
        process.wait_for_line(rf"tests\.run: processed in \d+ ms  {one.id}")
    process.terminate()
    process.succeed()


def test_overdue_ticks_reach_the_topics_stages_at_the_first_start(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    """The new release adds the first stage of the topic to which it sends a recurring
    message. The process sends that message right after it has stored it."""
    on_a_topic(code)
    tick = '    every("0 0 * * *", "topic:tests.run", tz="UTC", missed="all")\n'
    imported = "from django_txmsg import RedeliveryPolicy, stage"
    text = code.read_text().replace(imported, imported + ", every")
    code.write_text(text + tick)
    Schedule.objects.create(
        service="tests", name="topic:tests.run", timing="0 0 * * * UTC",
        last_tick=ago(days=3),
    )  # fmt: skip
    process = run(dispatch="thread")
    wait_until(lambda: effects("first") >= 3, message=lambda: process.output)
    process.terminate()
    process.succeed()


@pytest.mark.sqlite
@pytest.mark.parametrize("obstacle", ["paused", "its broker is down"])
def test_relay_does_not_wait_for_a_topics_stage_that_cannot_subscribe(
    run: Callable[..., ManageProcess], code: Path, obstacle: str
) -> None:
    brokers = {}
    if obstacle == "paused":
        on_a_topic(code)
        make.StageStateFactory(stage="topic:tests.run")
    else:
        on_a_topic(code, 'broker="away", ')
        brokers["away"] = {"URL": "amqp://127.0.0.1:1"}
    with txmsg(), transaction.atomic():
        far = send_message("tests.elsewhere", None)
    process = run(**brokers)
    process.wait_for_line(rf"tests\.elsewhere: sent to broker default  {far.id}")
    process.terminate()
    process.succeed()


def test_stop_ends_the_wait_for_subscriptions() -> None:
    with txmsg(), declared(lambda _: None, "topic:tests.run") as stage:
        consumer = Consumer([stage])
        waiting = start_daemon("waiting", consumer.wait_for_subscriptions, 600.0)
        waiting.join(0.2)
        assert waiting.is_alive()
        consumer.stop()
        waiting.join(10)
        assert not waiting.is_alive()


@pytest.mark.sqlite
def test_run_leaves_the_lines_to_a_log_that_is_printed(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    logging = "import logging\nlogging.basicConfig(level='INFO')\n"
    code.write_text(logging + code.read_text())
    with txmsg(), transaction.atomic():
        good = send_message("tests.run", "good")
    process = run()
    process.wait_for_line(rf"processed.*{good.id}")
    process.terminate()
    lines = process.succeed().splitlines()
    processed = [line for line in lines if str(good.id) in line and "processed" in line]
    assert len(processed) == 1


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "command", ["txmsg run", "txmsg run --reload", "relay", "consume"]
)
def test_closed_output_drains_the_process(command: str, code: Path) -> None:
    """The reader of the process's output is gone, as after `| head` or in a closed
    terminal. The process goes on working, and SIGTERM still drains it, also if lines of
    a log were not written."""
    read, write = os.pipe()
    settings = {**IMPATIENT, "BROKERS": BROKERS}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "manage.py"), *command.split()],
        env={
            **os.environ,
            "TXMSG_TEST_HOOK": "service_of_a_test.declare",
            "TXMSG_TEST_SETTINGS": json.dumps(settings),
            "PYTHONPATH": f"{ROOT}:{code.parent}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "",
        },
        cwd=ROOT,
        stdout=write,
        stderr=write,
    )
    os.close(write)
    try:
        with open(read, "rb") as lines:
            assert any(b"Relaying" in line or b"Consuming" in line for line in lines)
        if command == "relay":
            with txmsg(), transaction.atomic():
                send_message("tests.run", "good")
            left = OutboxMessage.objects.filter(dispatched_at=None)
            wait_until(lambda: not left.exists(), deadline=60)
        else:
            put("tests.run", b'"bad"')
            put("tests.run", b'"good"')
            wait_until(lambda: effects("first"), deadline=60)
        if "--reload" in command:
            # The parent logs that it starts its child again, and why.
            code.write_text(STAGES.replace("VERSION", "second"))
            wait_until(lambda: put("tests.run") and effects("second"), deadline=60)
        process.terminate()
        assert process.wait(60) == 0
        assert not Worker.objects.exists()
    finally:
        process.kill()


def test_run_prunes_without_cron(run: Callable[..., ManageProcess]) -> None:
    old = make.OutboxMessageFactory(dispatched=True)
    OutboxMessage.objects.filter(pk=old.pk).update(
        created_at=ago(days=90), dispatched_at=ago(days=90)
    )
    young = make.OutboxMessageFactory(dispatched=True)
    process = run()
    left = OutboxMessage.objects.values_list("pk", flat=True)
    wait_until(lambda: set(left.all()) == {young.pk}, message=lambda: process.output)
    process.terminate()
    process.succeed()


@pytest.mark.sqlite
def test_changed_code_restarts_the_process(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    process = run("--reload", "--http", "127.0.0.1:0")
    process.wait_for_line("Answering at http://127")
    put("tests.run")
    wait_until(lambda: effects("first"), message=lambda: process.output)
    (before,) = psutil.Process(process.pid).children()
    code.write_text("this is no Python")
    process.wait_for_line("service_of_a_test.py changed: starting again")
    process.wait_for_line("process 1 .* ended with 1 after")
    code.write_text(STAGES.replace("VERSION", "second"))
    put("tests.run")
    wait_until(lambda: effects("second"), message=lambda: process.output, deadline=60)
    (after,) = psutil.Process(process.pid).children()
    assert before.pid != after.pid
    process.interrupt()
    process.succeed()
    assert not psutil.pid_exists(after.pid)
    assert effects("first") == effects("second") == 1
    assert not Worker.objects.exists()


@pytest.mark.sqlite
def test_restart_is_printed_although_the_log_is_a_file(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    log = code.with_name("log")
    logging = f"import logging\nlogging.basicConfig(filename={str(log)!r})\n"
    code.write_text(logging + code.read_text())
    process = run("--reload")
    code.write_text(logging + STAGES.replace("VERSION", "second"))
    process.wait_for_line("service_of_a_test.py changed: starting again")
    process.terminate()
    process.succeed()
    assert "changed: starting again" in log.read_text()


@pytest.mark.sqlite
def test_child_that_does_not_end_is_killed_and_its_message_redelivered(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    process = run("--reload")
    put("tests.run", b'"hang"')
    process.wait_for_line("it hangs")
    text = STAGES.replace("VERSION", "second").replace('"hang"', '"never"')
    code.write_text(text)
    process.wait_for_line("is killed: it has not ended within 1 s")
    wait_until(lambda: effects("second"), message=lambda: process.output, deadline=90)
    process.terminate()
    process.succeed()


@pytest.mark.sqlite
def test_a_first_signal_while_it_starts_again_cuts_nothing_off(
    run: Callable[..., ManageProcess], code: Path
) -> None:
    process = run("--reload")
    put("tests.run", b'"hang"')
    process.wait_for_line("it hangs")
    text = STAGES.replace("VERSION", "second").replace('"hang"', '"never"')
    code.write_text(text)
    process.wait_for_line("Stopping after the messages in progress")
    process.terminate()
    process.wait_for_line("is killed: it has not ended within 1 s")
    process.succeed()


@pytest.mark.sqlite
def test_a_second_signal_ends_parent_and_child(
    run: Callable[..., ManageProcess],
) -> None:
    process = run("--reload")
    put("tests.run", b'"hang"')
    process.wait_for_line("it hangs")
    (child,) = psutil.Process(process.pid).children()
    process.terminate()
    process.wait_for_line("Stopping")
    assert process.running
    process.terminate()
    assert process.wait() == 128 + 15
    assert not psutil.pid_exists(child.pid)


@pytest.mark.sqlite
def test_a_child_does_not_outlive_a_parent_that_is_killed(
    run: Callable[..., ManageProcess],
) -> None:
    process = run("--reload")
    (child,) = psutil.Process(process.pid).children()
    os.kill(process.pid, 9)
    wait_until(lambda: not child.is_running(), message=lambda: process.output)
    wait_until(lambda: not Worker.objects.exists())


@pytest.fixture
def world(manage: Manage, tmp_path: Path, destination: str) -> Iterator[World]:
    """The process under test, with its messages and its broker. The process is not
    started yet."""
    with ExitStack() as stack:
        yield World(manage, tmp_path, destination, stack)


def test_killed_in_a_handler_its_messages_are_processed_once(world: World) -> None:
    world.script["hold_at"] = 2
    world.dispatch()
    world.store()
    world.start("run", CONSUME={"POLL_INTERVAL": 0.05})
    world.waiting("in the handler")
    world.process.kill()
    everything_happens_once(world)


@pytest.mark.postgresql
def test_messages_of_a_stopped_process_are_processed_once(world: World) -> None:
    """A process handles messages, and is suspended by SIGSTOP while it has no open
    transaction. Other processes take over its messages. After the process resumes, each
    message has been processed once."""
    world.dispatch(1)
    world.start("run")
    wait_until(Effect.objects.exists, message=lambda: world.process.output)
    world.dispatch(200)
    wait_until(lambda: Effect.objects.count() > 5)
    wait_until(lambda: _stands_still(world.process))
    world.store()
    try:
        everything_happens_once(world)
    finally:
        world.process.resume()
    world.process.terminate()
    world.process.succeed()
    everything_happens_once(world)


@pytest.mark.postgresql
def test_the_message_of_a_process_stopped_in_a_transaction_waits_for_its_end(
    world: World,
) -> None:
    """A process is suspended by SIGSTOP while its handler has an open transaction.
    Another worker gets the message, and waits until the server ends the connection of
    the suspended process."""
    world.script["hold_at"] = 0
    world.dispatch(1)
    world.start("run")
    world.waiting("in the handler")
    with connection.cursor() as cursor:

        def open_transactions() -> list[int]:
            """Suspend the process, unless other threads have transactions, too."""
            world.process.pause()
            cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
            )
            pids = [pid for (pid,) in cursor.fetchall()]
            if len(pids) > 1:
                world.process.resume()
                return []
            return pids

        (holder,) = wait_until(open_transactions)

        def another_waits() -> bool:
            cursor.execute(
                "SELECT 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))",
                [holder],
            )
            return cursor.fetchone() is not None

        with (
            txmsg(**world.settings()),
            declared(lambda _: None, world.destination) as stage,
            running(stage),
        ):
            wait_until(another_waits)
            assert InboxMessage.objects.get().processed_at is None
            cursor.execute("SELECT pg_terminate_backend(%s)", [holder])
            wait_until(InboxMessage.objects.exclude(processed_at=None).exists)
    world.go.touch()
    world.process.resume()
    world.process.terminate()
    world.process.succeed()
    assert not Effect.objects.exists(), "its work was rolled back"
    assert InboxMessage.objects.get().attempts <= 2


def _stands_still(process: ManageProcess) -> bool:
    """Suspend a process, and return whether it has no open transaction.

    A suspended transaction's locks would block all other processes, so a process with a
    transaction is resumed. A statement may still be on its way to the server, so the
    function checks twice.
    """
    process.pause()
    for _ in range(2):
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_sleep(0.1), count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() "
                "AND xact_start IS NOT NULL"
            )
            if cursor.fetchone()[1]:
                process.resume()
                return False
    return True


def test_the_modules_that_are_watched_are_the_projects_own() -> None:
    seen = dict(_supervisor.files())
    assert str(Path(retention.__file__)) in seen
    assert str(Path(__file__)) in seen
    assert str(ROOT / "tests" / "manage.py") in seen  # beside the settings
    assert not [one for one in seen if "site-packages" in one]
    assert os.__file__ not in seen
