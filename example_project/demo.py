#!/usr/bin/env python
"""`make demo`: orders travel through the example project, and one of them fails.

Starts the web server, `relay` and `consume` as separate processes, with a new SQLite
file and the embedded broker. Places orders over HTTP, waits for each expected event,
and prints it. The exit code is 1 if an expected event does not happen.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

HERE = Path(__file__).resolve().parent
#: A file that is created again; another one can be given as the argument.
DATABASE = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "demo.sqlite3").resolve()
MANAGE = [sys.executable, "-u", str(HERE / "manage.py")]
USER = PASSWORD = "demo"
#: Seconds after which something is said not to happen.
PATIENCE = 40.0
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ

T = TypeVar("T")


class Failed(Exception):
    """An expected event did not happen, or an unexpected event did."""


def main() -> int:
    """Run the demo. If it fails, print the reason and return 1."""
    signal.signal(signal.SIGTERM, _end)
    began = time.monotonic()
    environment = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{DATABASE}",
        "TXMSG_BROKER_URL": "database://",
        "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    try:
        with ExitStack() as stack:
            tell(environment, stack)
    except Failed as error:
        say(f"\nThe demonstration failed: {error}", "31")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted.")
        return 130
    say(f"\nDone in {time.monotonic() - began:.0f} s. All processes have ended.", "32")
    return 0


def tell(environment: dict[str, str], stack: ExitStack) -> None:
    """Start all processes, place orders, and print what happens to them."""
    heading("1. Starting: SQLite, the embedded broker, three processes")
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for suffix in ("", "-wal", "-shm"):
        DATABASE.with_name(DATABASE.name + suffix).unlink(missing_ok=True)
    command(environment, "migrate", "--verbosity", "0")
    command(
        environment, "createsuperuser", "--noinput", "--verbosity", "0",
        "--username", USER, "--email", "demo@example.org",
    )  # fmt: skip
    port = free_port()
    processes = [
        stack.enter_context(process(environment, logs, name, *arguments))
        for name, arguments in {
            "web": ("runserver", "--noreload", f"127.0.0.1:{port}"),
            "relay": ("relay",),
            "consume": ("consume",),
        }.items()
    ]
    shop = Shop(f"http://127.0.0.1:{port}")
    wait(shop.answers, "the web server to answer", processes)
    wait(lambda: "Consuming" in processes[2].said(), "the consumer to start", processes)
    for one in processes:
        print(f"   {one.name:<8} process {one.pid}, alive")

    heading("2. Placing orders over HTTP")
    orders = {
        shop.order("Bag of coffee", 2): "arrives",
        shop.order("Pot of honey", 1, fails=True): "fails, on purpose",
        shop.order("Box of tea", 3): "arrives",
    }
    for number, fate in orders.items():
        print(f"   order {number}   {shop.base}/orders/{number}/   {fate}")

    heading("3. What happened to their messages")
    dead = ""
    for number, fate in orders.items():
        seen = wait(
            lambda number=number, fate=fate: shop.over(number, fate == "arrives"),
            f"order {number} to come to its end ({fate})",
            processes,
        )
        show(seen)
        dead = dead or next((h["id"] for h in seen["hops"] if h["state"] == "dead"), "")

    heading("4. A flow: payment, stock, and a person's approval above 200 €")
    tell_flow(environment, shop, processes)

    heading("5. What an operator sees")
    print(indented(command(environment, "dead_letters", "list")))
    print(indented(command(environment, "message_status")))
    for one in processes:
        one.ask_to_stop()
    for one in processes:
        code = one.stop()
        if one.name != "web" and code != 0:
            raise Failed(f"{one.name} ended with exit code {code}:\n{one.said()}")

    heading("6. Where to look")
    python = shlex.quote(os.path.relpath(sys.executable))
    manage = f"{python} {shlex.quote(os.path.relpath(HERE / 'manage.py'))}"
    print(f"   export DATABASE_URL=sqlite:///{DATABASE}")
    print(f"   {manage} runserver          # then, with user and password {USER!r}:")
    print("       http://127.0.0.1:8000/                        the shop")
    print("       http://127.0.0.1:8000/admin/django_txmsg/     its messages")
    print(f"   {manage} relay              # and in two other terminals:")
    print(f"   {manage} consume")
    print(f"   {manage} dead_letters show {dead}")


def tell_flow(
    environment: dict[str, str], shop: Shop, processes: list[Process]
) -> None:
    """Place three orders through the flow: a cheap one, an expensive one that is
    approved, and an expensive one that nobody approves in time."""
    small, approved, left = (
        shop.check_out("Box of tea", quantity) for quantity in (2, 30, 40)
    )

    def ends(run: Run, outcome: str) -> None:
        found = wait(
            lambda: (seen := shop.run(run))["outcome"] and seen,
            f"the checkout of order {run.number} to end",
            processes,
        )
        if found["outcome"] != outcome:
            raise Failed(f"order {run.number} {found['outcome']}, not {outcome}")
        colour = "32" if outcome == "answered" else "33"
        say(f"   order {run.number}   {outcome}: {json.dumps(found['answer'])}", colour)

    ends(small, "answered")
    for run in (approved, left):
        wait(
            lambda run=run: shop.run(run)["step"] == "approved",
            f"order {run.number} to wait for an approval",
            processes,
        )
        print(f"   order {run.number}   paid and reserved; waits for a person")
    print(indented(command(environment, "txmsg", "flows", "list")), end="")
    shop.approve(approved.number)
    ends(approved, "answered")
    print(
        "   Two days pass without an approval of the other one, by an operator's word:"
    )
    said = command(environment, "txmsg", "flows", "time-out", left.run_id)
    print(indented(said), end="")
    ends(left, "failed")
    print("   It was undone, newest first: goods put back, then the money returned.")
    print(indented(command(environment, "txmsg", "flows", "show", left.run_id)))


class Run(NamedTuple):
    """The order number and the run id of a checkout."""

    number: str
    run_id: str


class Shop:
    """A client of the shop. Like a browser, it keeps cookies, sends the CSRF token and
    follows redirects."""

    def __init__(self, base: str) -> None:
        self.base = base
        self._cookies = http.cookiejar.CookieJar()
        self._browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPCookieProcessor(self._cookies),
        )

    def answers(self) -> bool:
        """Return whether the server answers. The request also stores the CSRF token in
        a cookie."""
        try:
            return bool(self._open("/").status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            raise Failed(f"{self.base}/ answered {error.code}") from error
        except OSError:
            return False

    def order(self, item: str, quantity: int, *, fails: bool = False) -> str:
        """Place an order and return its number."""
        fields = {"item": item, "quantity": str(quantity)}
        if fails:
            fields["payment_fails"] = "on"
        with self._open("/", self._form(fields)) as answer:
            number: str = answer.url.rstrip("/").rpartition("/")[2]
        if not number or "/orders/" not in answer.url:
            raise Failed(f"the order for {item} was not accepted")
        return number

    def check_out(self, item: str, quantity: int) -> Run:
        """Place an order through the flow."""
        return Run(**self._post("/checkout/", item=item, quantity=str(quantity)))

    def approve(self, number: str) -> None:
        """Approve an expensive order, as the shop's staff would."""
        self._post(f"/orders/{number}/approve/")

    def run(self, run: Run, *, seconds: float = 0) -> dict[str, Any]:
        """Return the run of a checkout as JSON. Wait until the run has ended, at most
        `seconds`."""
        with self._open(f"/runs/{run.run_id}/?wait={seconds}") as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def over(self, number: str, arrives: bool) -> dict[str, Any] | None:
        """Return the order as JSON if it has ended as expected. Return None if it has
        not ended yet. Raise Failed if it has ended otherwise."""
        with self._open(f"/orders/{number}.json") as answer:
            order: dict[str, Any] = json.load(answer)
        dead = any(hop["state"] == "dead" for hop in order["hops"])
        if arrives and dead:
            raise Failed(f"order {number} was to arrive and ended in the dead letters")
        if not arrives and order["status"] == "shipped":
            raise Failed(f"order {number} was to fail and has arrived")
        done = order["status"] == "shipped" and all(
            hop["state"] == "processed" and hop["dispatched"] for hop in order["hops"]
        )
        return order if (done if arrives else dead) else None

    def _form(self, fields: dict[str, str]) -> bytes:
        token = next(
            one.value or "" for one in self._cookies if one.name == "csrftoken"
        )
        return urllib.parse.urlencode({**fields, "csrfmiddlewaretoken": token}).encode()

    def _post(self, path: str, **fields: str) -> dict[str, Any]:
        with self._open(path, self._form(fields)) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _open(self, path: str, data: bytes | None = None) -> Any:
        return self._browser.open(self.base + path, data, timeout=PATIENCE)


class Process:
    """A running command of the project, in a separate process."""

    def __init__(self, environment: dict[str, str], log: Path, *command: str) -> None:
        self.name, self._log = log.stem, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*MANAGE, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, we stop the others
            )
        self.pid = self._process.pid
        self._asked = False

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def said(self) -> str:
        """Return the output of the process so far."""
        return self._log.read_text(errors="replace")

    def ask_to_stop(self) -> None:
        """Send SIGTERM. The process then finishes the messages in progress, and
        ends."""
        if self.alive and not self._asked:
            self._process.terminate()
        self._asked = True

    def stop(self) -> int:
        """Send SIGTERM, wait until the process has ended, and return its exit code. If
        it has not ended after ten seconds, kill it."""
        self.ask_to_stop()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._process.wait(10)


@contextmanager
def process(
    environment: dict[str, str], logs: Path, name: str, *arguments: str
) -> Iterator[Process]:
    """Run a command of the project while the block runs."""
    started = Process(environment, logs / f"{name}.log", *arguments)
    try:
        yield started
    finally:
        started.stop()


def command(environment: dict[str, str], *arguments: str) -> str:
    """Run a command of the project to its end and return its output."""
    done = subprocess.run(
        [*MANAGE, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Failed(f"manage.py {arguments[0]}:\n{done.stdout}{done.stderr}")
    return done.stdout


def wait(condition: Callable[[], T | None], what: str, processes: list[Process]) -> T:
    """Wait until the condition returns a value that is not empty, and return the value.
    Raise Failed after a time-out, or if a process has ended."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        ended = [one for one in processes if not one.alive]
        if ended or time.monotonic() > deadline:
            why = f"{ended[0].name} has ended" if ended else f"not in {PATIENCE:.0f} s"
            said = "".join(f"\n--- {p.name}\n{p.said()[-3000:]}" for p in processes)
            raise Failed(f"waited for {what}: {why}.{said}")
        pause.wait(0.1)


def show(order: dict[str, Any]) -> None:
    """Print the messages of an order, one per line."""
    end = "arrived" if order["status"] == "shipped" else "in the dead letters"
    colour = "32" if order["status"] == "shipped" else "31"
    what = f"{order['number']}, {order['item']} ({order['quantity']})"
    say(f"\n   Order {what}: {end}", colour)
    print(
        f"   {'message to':<17}{'stored':<14}{'dispatched':<12}{'received':<11}"
        f"{'processed':<14}{'next message'}"
    )
    for hop in order["hops"]:
        stored = datetime.fromisoformat(hop["stored"].replace("Z", "+00:00"))
        after = {
            name: f"+{_seconds(stored, hop[name]):.3f} s" if hop[name] else "no"
            for name in ("dispatched", "received", "processed")
        }
        following = ", ".join(hop["next"]) or (
            "none" if hop["processed"] else "none: rolled back"
        )
        print(
            f"   {hop['destination']:<17}"
            f"{stored.isoformat(timespec='milliseconds')[11:23]}  "
            f"{after['dispatched']:<12}{after['received']:<11}"
            f"{after['processed']:<14}{following}"
        )
        if hop["state"] == "dead":
            say(
                f"   {'':<17}dead letter after {hop['attempts']} attempts: "
                f"{hop['error']}",
                "31",
            )


def _seconds(since: datetime, until: str) -> float:
    instant = datetime.fromisoformat(until.replace("Z", "+00:00"))
    return max(0.0, (instant - since).total_seconds())


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def heading(text: str) -> None:
    """Print a heading."""
    say(f"\n{text}", "1")


def say(text: str, colour: str = "") -> None:
    """Print a text, in colour if the terminal has colours."""
    print(f"\x1b[{colour}m{text}\x1b[0m" if COLOUR and colour else text, flush=True)


def indented(text: str) -> str:
    """Return a text with each line indented."""
    return "".join(f"   {line}\n" for line in text.rstrip().splitlines())


def _end(number: int, frame: object) -> NoReturn:
    raise Failed("it was asked to stop")


if __name__ == "__main__":
    sys.exit(main())
