"""`--processes N`: the parent restarts, recycles, replaces and drains its children, and
answers HTTP requests about all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from django.db import connection, transaction

from django_txmsg.management.commands._workers import HttpServer
from django_txmsg.models import OutboxMessage, Worker
from django_txmsg.sending.outbox import send_message, send_messages
from tests.app.models import Effect
from tests.faults import ROOT, ManageProcess, wait_until
from tests.running import IMPATIENT, committing, txmsg

pytestmark = committing

#: The probes of the page on Kubernetes, and the 600 seconds that they give a handler.
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
READY, LIVE = (
    re.findall(rf"{kind}Probe:\n +httpGet: {{path: \"?([^,\"]+)\"?,", PAGE)[0]
    for kind in ("readiness", "liveness")
)
COMMANDS = [
    json.loads(one)[2:] for one in re.findall(r"exec: {command: (\[.+\])}", PAGE)
]

Manage = Callable[..., ManageProcess]

BROKERS = {"default": {"URL": "database://?poll=0.01&lease=2"}}
STAGES = """
import threading
import time
from django_txmsg import stage
from django_txmsg.management.commands import _supervisor
from tests.app.models import Effect

_supervisor.STEADY = 1.0


def declare():
    @stage("tests.processes")
    def handle(message):
        if message.body == "hang":
            print("it hangs", flush=True)
            threading.Event().wait()
        if message.body == "slow":
            print("it is slow", flush=True)
            time.sleep(1.5)
        Effect.objects.create(name="VERSION", message_id=str(message.id))
"""


FLOW = """
from django_txmsg.flows import Flow, step


class Echo(Flow[str, str], name="tests.echo", version=1):
    @step
    def start(self, word: str) -> str:
        return word
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The file with the service's code, which a test may change."""
    file = tmp_path / "processes_of_a_test.py"
    file.write_text(STAGES.replace("VERSION", "first"))
    return file


@pytest.fixture
def start(manage: Manage, code: Path) -> Callable[..., ManageProcess]:
    """Return a function that starts a command with the service's code. The command
    keeps its state files in a directory of the test."""

    def start(*arguments: str, **more: object) -> ManageProcess:
        return manage(
            *arguments,
            txmsg={**IMPATIENT, "BROKERS": BROKERS, **more},
            hook="processes_of_a_test.declare",
            env={
                "PYTHONPATH": str(code.parent),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(code.parent),
            },
        )

    return start


def children(parent: ManageProcess) -> dict[int, psutil.Process]:
    """Return the child processes of `parent`, each under its process id."""
    return {one.pid: one for one in psutil.Process(parent.pid).children()}


def working(count: int, kind: str = "consumer") -> set[int]:
    """Wait until exactly `count` processes have sent a heartbeat, and return their
    process ids."""

    def found() -> set[int]:
        pids = set(Worker.objects.filter(kind=kind).values_list("pid", flat=True))
        return pids if len(pids) == count else set()

    return wait_until(found, deadline=90)


def address(process: ManageProcess) -> str:
    """Return the URL of the HTTP server that a process has started."""
    line = process.wait_for_line(r"Answering at http://")
    found = re.search(r"http://[\w.]+:\d+", line)
    assert found is not None
    return found[0]


def ask(url: str) -> tuple[int, str]:
    """Return the status and the text of an HTTP response."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def effects() -> int:
    return Effect.objects.count()


@pytest.mark.parametrize(
    "command",
    [pytest.param("consume", marks=pytest.mark.matrix), "relay", "txmsg run"],
)
def test_sigterm_drains_all_children_and_ends_with_zero(
    command: str, start: Callable[..., ManageProcess]
) -> None:
    process = start(*command.split(), "--processes", "2")
    kind = "relay" if command == "relay" else "consumer"
    assert working(2, kind) == set(children(process))
    if command != "relay":
        with txmsg(), transaction.atomic():
            send_message("tests.processes", "slow")
        if command == "txmsg run":
            process.wait_for_line("it is slow")
    process.terminate()
    process.succeed()
    assert process.output.count("started") == 2
    assert process.output.count("ended normally") == 2
    assert not Worker.objects.exists()
    if command == "txmsg run":
        assert effects() == 1


def test_a_killed_child_is_replaced_and_its_message_runs_once(
    start: Callable[..., ManageProcess],
) -> None:
    process = start("txmsg", "run", "--processes", "2")
    before = working(2)
    with txmsg(), transaction.atomic():
        send_message("tests.processes", "slow")
    process.wait_for_line("it is slow")
    for pid in before:  # whichever has it
        os.kill(pid, signal.SIGKILL)
    process.wait_for_line(r"process 1 .* ended with 137")
    process.wait_for_line(r"process 2 .* ended with 137 .* starts in 1 s")
    wait_until(lambda: set(children(process)) - before, deadline=60)
    wait_until(lambda: effects() == 1, deadline=90)
    process.terminate()
    process.succeed()
    assert effects() == 1


def test_when_the_parent_is_killed_its_children_finish_and_end(
    start: Callable[..., ManageProcess],
) -> None:
    process = start("txmsg", "run", "--processes", "2")
    left = [psutil.Process(pid) for pid in working(2)]
    with txmsg(), transaction.atomic():
        send_message("tests.processes", "slow")
    process.wait_for_line("it is slow")
    process.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    assert effects() == 1
    assert not Worker.objects.exists()


def test_a_signal_after_the_end_of_the_parent_interrupts_no_handler(
    start: Callable[..., ManageProcess],
) -> None:
    process = start("txmsg", "run", "--processes", "1")
    (child,) = [psutil.Process(pid) for pid in working(1)]
    with txmsg(), transaction.atomic():
        send_message("tests.processes", "slow")
    process.wait_for_line("it is slow")
    process.kill()
    wait_until(lambda: child.ppid() != process.pid)
    child.terminate()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive
    assert effects() == 1


@pytest.mark.postgresql
def test_a_child_that_waits_for_a_lock_ends_after_its_parent(
    start: Callable[..., ManageProcess],
) -> None:
    process = start("relay", "--processes", "1")
    left = [psutil.Process(pid) for pid in working(1, "relay")]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE django_txmsg_outboxmessage")

        def waits() -> bool:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

        wait_until(waits)
        process.kill()
        _, alive = psutil.wait_procs(left, timeout=40)
    assert not alive


def test_sighup_replaces_the_children_one_after_the_other(
    start: Callable[..., ManageProcess], code: Path
) -> None:
    process = start("txmsg", "run", "--processes", "2", "--http", "127.0.0.1:0")
    before = working(2)
    where = address(process)
    wait_until(lambda: ask(f"{where}/ready")[0] == 200)
    code.write_text(STAGES.replace("VERSION", "second"))
    for pid in (*before, process.pid):  # as a terminal does that is closed
        os.kill(pid, signal.SIGHUP)
    counts = []

    def replaced() -> bool:
        present = set(children(process))
        counts.append(len(present))
        assert ask(f"{where}/ready")[0] == 200
        return len(present) == 2 and not present & before

    wait_until(replaced, deadline=90)
    assert min(counts) >= 1
    with txmsg(), transaction.atomic():
        send_message("tests.processes", 1)
    wait_until(lambda: effects() == 1, deadline=60)
    assert Effect.objects.get().name == "second"
    process.terminate()
    process.succeed()


@pytest.mark.matrix
def test_a_rolling_restart_stops_at_code_that_does_not_start(
    start: Callable[..., ManageProcess], code: Path
) -> None:
    process = start("txmsg", "run", "--processes", "2")
    before = working(2)
    code.write_text("raise RuntimeError('a mistake in the new code')")
    process.process.send_signal(signal.SIGHUP)
    process.wait_for_line("the rolling restart stops: a process has failed")
    assert len(set(children(process)) & before) == 1
    with txmsg(), transaction.atomic():
        send_message("tests.processes", 1)
    wait_until(lambda: effects() == 1, deadline=60)
    code.write_text(STAGES.replace("VERSION", "mended"))
    process.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not working(2) & before, deadline=90)
    process.terminate()
    process.succeed()


def test_a_child_above_max_memory_is_replaced_at_once(
    start: Callable[..., ManageProcess],
) -> None:
    process = start("txmsg", "run", "--processes", "1", CONSUME={"MAX_MEMORY": 1})
    (before,) = working(1)
    with txmsg(), transaction.atomic():
        send_message("tests.processes", 1)
    process.wait_for_line(r"process 1 .* ended normally")
    wait_until(lambda: working(1) - {before}, deadline=60)
    process.terminate()
    process.succeed()
    assert effects() == 1


def test_metrics_count_for_all_children(
    start: Callable[..., ManageProcess], code: Path
) -> None:
    process = start("txmsg", "run", "--processes", "2", "--http", "127.0.0.1:0")
    where = address(process)
    working(2)
    with txmsg(), transaction.atomic():
        send_messages({"destination": "tests.processes", "body": n} for n in range(20))
    wait_until(lambda: effects() == 20, deadline=60)
    counted = re.compile(
        r'txmsg_processing_seconds_count\{.*stage="tests\.processes"\} (\d+)\.0'
    )

    def number() -> int:
        found = counted.search(text())
        return int(found[1]) if found else 0

    def text() -> str:
        status, text = ask(f"{where}/metrics")
        assert status == 200
        return text

    wait_until(lambda: number() == 20, message=text)
    assert 'txmsg_workers{kind="consumer",service="tests"} 2.0' in text()
    files = {one.name for one in code.parent.glob("txmsg-metrics-*/*.db")}
    before = working(2)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(children(process).keys() - before) == 2)
    with txmsg(), transaction.atomic():
        send_messages({"destination": "tests.processes", "body": n} for n in range(20))
    # Children that were replaced are counted, and leave no files behind.
    wait_until(lambda: number() == 40, message=text)
    assert {one.name for one in code.parent.glob("txmsg-metrics-*/*.db")} == files
    process.terminate()
    process.succeed()


@pytest.mark.parametrize(
    "processes",
    [pytest.param([], marks=pytest.mark.matrix), ["--processes", "2"]],
)
def test_probes_of_a_healthy_a_hung_and_a_draining_process(
    processes: list[str], start: Callable[..., ManageProcess]
) -> None:
    process = start("txmsg", "run", *processes, "--http", "127.0.0.1:0")
    where = address(process)
    working(len(processes) or 1)
    wait_until(lambda: ask(where + READY)[0] == 200)
    assert ask(where + LIVE) == (200, "alive\n")
    for command in COMMANDS:
        start(*command).succeed()
    with txmsg(), transaction.atomic():
        send_message("tests.processes", "hang")
    process.wait_for_line("it hangs")
    soon = where + LIVE.replace("600", "3")
    wait_until(lambda: ask(soon)[0] == 503)
    # On SQLite its transaction keeps other loops waiting, too.
    assert re.search(r"txmsg-[\w.-]+ has not run", ask(soon)[1])
    assert ask(where + LIVE)[0] == 200
    live, ready = COMMANDS
    # Its file of a second ago says the same a second later.
    probe = failing(start, [word.replace("600", "3") for word in live])
    assert re.search(r"txmsg-[\w.-]+ has not run", probe.output)
    process.terminate()
    wait_until(lambda: ask(where + READY)[0] == 503)
    assert ask(where + LIVE)[0] == 200
    assert "is stopping" in failing(start, ready).output
    process.terminate()
    assert process.wait() != 0
    # Killed, it left a file: the probe does not take it for a process.
    assert start(*live).wait() == 1


def failing(start: Callable[..., ManageProcess], words: list[str]) -> ManageProcess:
    """Run a probe repeatedly until it fails. Return the process of the failed run."""

    def run() -> ManageProcess | None:
        probe = start(*words)
        return probe if probe.wait() else None

    return wait_until(run)


@pytest.mark.matrix
def test_a_stopped_child_is_not_alive(start: Callable[..., ManageProcess]) -> None:
    process = start("relay", "--processes", "2", "--http", "127.0.0.1:0")
    where = address(process)
    pid = max(working(2, "relay"))
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: ask(f"{where}/alive?within=2")[0] == 503)
    assert f"(pid {pid})" in ask(f"{where}/alive?within=2")[1]
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: ask(f"{where}/alive?within=2")[0] == 200)
    process.terminate()
    process.succeed()


@pytest.mark.matrix
def test_a_broker_that_is_away_leaves_a_process_alive_and_ready(
    start: Callable[..., ManageProcess], code: Path
) -> None:
    code.write_text(code.read_text() + FLOW)  # deadlines have a loop, too
    dead = {"default": {"URL": "stomp://127.0.0.1:1"}}
    process = start("txmsg", "run", "--http", "127.0.0.1:0", BROKERS=dead)
    where = address(process)
    working(1)
    process.wait_for_line("127.0.0.1")
    assert answers_for_a_while(f"{where}/alive?within=3") == {(200, "alive\n")}
    assert ask(f"{where}/ready")[0] == 200
    process.terminate()
    process.succeed()


def answers_for_a_while(url: str) -> set[tuple[int, str]]:
    """Request a URL for eight seconds, and return the different responses."""
    answers: list[tuple[int, str]] = []

    def asked() -> bool:
        answers.append(ask(url))
        return len(answers) == 16

    wait_until(asked, interval=0.5, deadline=60)
    return set(answers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--processes", "0"], "must be 1 or more"),
        (["--processes", "many"], "must be 1 or more"),
        (["--processes", "²"], "must be 1 or more"),
        (["--processes", "2", "--once"], "--once"),
        (["--http", "8071"], "must be HOST:PORT"),
        (["--http", "127.0.0.1:99999"], "must be HOST:PORT"),
        (["--http", "127.0.0.1:²"], "must be HOST:PORT"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], said: str, start: Callable[..., ManageProcess]
) -> None:
    process = start("consume", *options)
    assert process.wait() == 1
    assert said in process.output


def test_run_refuses_a_wrong_address_before_it_says_that_it_runs(
    start: Callable[..., ManageProcess],
) -> None:
    process = start("txmsg", "run", "--http", "")
    assert process.wait() == 1
    assert "must be HOST:PORT" in process.output
    assert "Running" not in process.output


@pytest.mark.postgresql
def test_a_locked_table_keeps_one_scrape_and_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prometheus gives up, and asks again."""
    monkeypatch.setattr("django_txmsg.management.commands._workers.TURN", 0.1)
    server = HttpServer("127.0.0.1:0", lambda within: "")
    where = f"http://127.0.0.1:{server.server_address[1]}"
    table = OutboxMessage._meta.db_table
    with server.answering(sys.stderr), ThreadPoolExecutor(1) as pool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            first = pool.submit(ask, f"{where}/metrics")
            wait_until(server.querying.locked)
            status, text = ask(f"{where}/metrics")
            assert (status, "txmsg_outbox_waiting" in text) == (200, False)
            assert not first.done()
        assert first.result(60)[0] == 200
        assert "txmsg_workers" in ask(f"{where}/metrics")[1]
