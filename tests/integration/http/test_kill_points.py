"""Web processes are killed at every step of a request. A consumer runs, but no relay.

A committed message arrives, and takes effect once. A message that was not committed
never arrives.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db import connection

from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage, SessionRecord
from tests.app.models import Effect, Order
from tests.faults import ManageProcess, wait_until
from tests.services.stomp_server import StompServer

from .conftest import wait_for_the_database
from .server import SETTINGS, WebServer

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

Start = Callable[..., ManageProcess]


#: With the embedded broker the two databases go the same way.
BROKERS = (
    ["activemq"] if connection.vendor == "postgresql" else ["embedded", "activemq"]
)


@pytest.fixture(params=BROKERS)
def txmsg(request: pytest.FixtureRequest, destination: str) -> dict[str, Any]:
    """Settings of the processes, with each kind of broker in turn and a short lease."""
    url = "database://?poll=0.02&lease=5"
    if request.param != "embedded":
        server: StompServer = request.getfixturevalue(request.param)
        url = server.url()
    return {
        # The broker outlives the test. With a new service name, each test has a
        # destination that no other test uses.
        "SERVICE": destination,
        "BROKERS": {"default": {"URL": url}},
        "RELAY": {"LEASE": 2},
        "HTTP": {"MAX_COMMIT_DURATION": 3, "COMMIT_DELAY_INCREMENT": 0.2},
    }


@pytest.fixture
def serve(txmsg: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., WebServer]]:
    """Return a function that starts web servers, which end with the test."""
    servers: list[WebServer] = []

    def start(hook: str | None = None, **options: Any) -> WebServer:
        path = f"tests.integration.http.kills.{hook}" if hook else None
        settings = {**txmsg, **options.pop("txmsg", {})}
        servers.append(WebServer(tmp_path, txmsg=settings, hook=path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def consume(
    manage: Start, txmsg: dict[str, Any], tmp_path: Path
) -> Callable[..., ManageProcess]:
    """Return a function that starts a consumer of the orders' messages and of the
    control destination."""

    def start(hook: str | None = None) -> ManageProcess:
        process = manage(
            "consume",
            f"{txmsg['SERVICE']}.orders",
            txmsg=txmsg,
            hook=f"tests.integration.http.kills.{hook}" if hook else None,
            env={
                "DJANGO_SETTINGS_MODULE": SETTINGS,
                "TXMSG_TEST_ONCE": str(tmp_path / "once-consumer"),
            },
        )
        process.wait_for_line("Consuming")
        return process

    return start


def effects(number: str) -> list[str]:
    """The effects of one order, including repeated ones."""
    names = Effect.objects.filter(name__startswith=f"{number}:").order_by("name")
    return list(names.values_list("name", flat=True))


def has_arrived(number: str) -> bool:
    return len(effects(number)) >= 2


def assert_done_once(number: str) -> None:
    """Check that the order is stored, that each of its two messages had one effect, and
    that no message is pending."""
    assert Order.objects.filter(number=number).count() == 1
    assert effects(number) == [f"{number}:pay", f"{number}:ship"]
    wait_until(
        lambda: not OutboxMessage.objects.filter(dispatched_at=None).exists(),
        message="rows that are not marked",
    )
    assert not DeadLetter.objects.exists()


@pytest.mark.parametrize(
    "hook", ["after_the_commit", "before_the_send", "before_the_mark"]
)
def test_messages_leave_if_the_web_process_is_killed_after_the_commit(
    serve, consume, hook
) -> None:
    web = serve(hook)
    if hook == "after_the_commit":
        web.post_and_die("order?number=1")
    else:
        # Step 5 happens in a separate thread, so the response may arrive first.
        with contextlib.suppress(httpx.TransportError):
            web.post("order?number=1")
        wait_until(web.has_died_once)
    web.kill()
    assert Order.objects.count() == 1
    assert Effect.objects.count() == 0
    stored = set(OutboxMessage.objects.values_list("message_id", flat=True))

    consume()

    wait_until(lambda: has_arrived("1"))
    assert_done_once("1")
    seen = InboxMessage.objects.all()
    assert set(seen.values_list("message_id", flat=True)) == stored
    if hook == "before_the_mark":
        # They were sent twice, under the same ids, and the inbox dropped the copies.
        wait_until(lambda: set(seen.values_list("deliveries", flat=True)) == {2})
    assert effects("1") == ["1:pay", "1:ship"]


@pytest.mark.parametrize("txmsg", ["rabbitmq"], indirect=True)
def test_rabbitmq_carries_control_messages_too(serve, consume, txmsg) -> None:
    """No relay runs, and no web process dispatches messages after its commit. So only
    the receiver of control messages dispatches messages. It receives control messages
    from three requests. The web process was killed after the commit of the first
    request. The commit of the second request failed. The third request succeeded."""
    web = serve("after_the_commit", txmsg={"DISPATCH_ON_COMMIT": "off"})
    web.post_and_die("order?number=killed")
    consume()
    wait_until(lambda: has_arrived("killed"))
    assert_done_once("killed")

    assert web.post("order?number=lost&then=bad_commit").status_code == 500
    assert web.post("order?number=1").status_code == 201
    wait_until(lambda: has_arrived("1"))
    assert_done_once("1")
    assert effects("lost") == []


@pytest.mark.parametrize("txmsg", ["activemq"], indirect=True)
def test_another_receiver_dispatches_if_one_is_killed(serve, consume, txmsg) -> None:
    """The broker delivers the killed receiver's control message to another receiver.
    The other receiver waits until the killed receiver's lease has ended."""
    web = serve(txmsg={"DISPATCH_ON_COMMIT": "off"})
    killed = consume("before_the_send")
    assert web.post("order?number=1").status_code == 201
    assert killed.wait() == -signal.SIGKILL
    assert Effect.objects.count() == 0

    consume()

    wait_until(lambda: has_arrived("1"))
    assert_done_once("1")


@pytest.mark.parametrize("hook", ["before_the_control_message", "before_the_commit"])
def test_nothing_is_sent_if_the_web_process_is_killed_before_the_commit(
    serve, consume, txmsg, hook
) -> None:
    web = serve(hook)
    consume()
    web.post_and_die("order?number=lost")
    # The next request is served by the successor and goes its way undisturbed.
    wait_until(lambda: web.post("order?number=1").status_code == 201)
    wait_until(lambda: has_arrived("1"))

    assert not Order.objects.filter(number="lost").exists()
    assert_done_once("1")
    assert effects("lost") == []
    if hook == "before_the_commit" and _waits(txmsg):
        # Nobody can say what became of it: it is given up, quietly.
        wait_until(lambda: SessionRecord.objects.filter(status="tombstone").exists())
    else:
        assert not SessionRecord.objects.filter(status="tombstone").exists()
    assert not DeadLetter.objects.exists()


def _waits(txmsg: dict[str, Any]) -> bool:
    embedded = txmsg["BROKERS"]["default"]["URL"].startswith("database")
    return not embedded and connection.vendor != "postgresql"


def test_a_commit_that_fails_changes_nothing(serve, consume) -> None:
    web = serve("failing_commits")
    consumer = consume()
    assert web.post("order?number=1").status_code == 500
    assert web.post("write?number=2").status_code == 201

    # It stops only after it has settled what it has.
    wait_until(lambda: Order.objects.filter(number="2").exists())
    consumer.terminate()
    consumer.succeed()
    assert not Order.objects.filter(number="1").exists()
    assert not OutboxMessage.objects.exists()
    assert not DeadLetter.objects.exists()


def test_a_slow_commit_is_waited_for(serve, consume) -> None:
    """The commit takes longer than MAX_COMMIT_DURATION. The receiver sees that the
    transaction is in progress, and waits."""
    http = {"HTTP": {"MAX_COMMIT_DURATION": 0.3, "COMMIT_DELAY_INCREMENT": 0.1}}
    web = serve("stand_still_before_the_commit", txmsg=http)
    consume()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(web.post, "order?number=1")
        threading.Event().wait(1.5)
        assert not answer.done()
        web.go_on()
        assert answer.result(60).status_code == 201
    wait_until(lambda: has_arrived("1"))
    assert_done_once("1")


@pytest.mark.postgresql
def test_a_session_that_was_given_up_does_not_commit(serve, consume, txmsg) -> None:
    http = {
        "MAX_COMMIT_DURATION": 0.5,
        "COMMIT_DELAY_INCREMENT": 0.1,
        "CONTROL_MESSAGE_ORACLE": "delay",
    }
    web = serve("stand_still_before_the_commit", txmsg={"HTTP": http})
    consume()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(web.post, "order?number=1")
        wait_until(lambda: SessionRecord.objects.filter(status="tombstone").exists())
        web.go_on()
        assert answer.result(60).status_code == 500
    assert not Order.objects.exists()
    assert not OutboxMessage.objects.exists()
    # The next one is as good as any.
    assert web.post("order?number=2").status_code == 201
    wait_until(lambda: has_arrived("2"))
    assert_done_once("2")


def test_concurrent_requests_under_asgi_each_commit_alone(serve, consume) -> None:
    """The requests run concurrently on one event loop, each in its own transaction."""
    web = serve(asgi=True)
    consume()
    plan = {f"r{number}": "raise" if number % 4 == 0 else "" for number in range(16)}

    def post(number: str) -> int:
        return web.post(f"order?number={number}&then={plan[number]}").status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = dict(zip(plan, pool.map(post, plan), strict=True))
    for number, then in plan.items():
        assert statuses[number] == (500 if then else 201), web.log()
    for number, then in plan.items():
        if not then:
            wait_until(lambda number=number: has_arrived(number))
            assert_done_once(number)
    assert Order.objects.count() == 12
    assert Effect.objects.count() == 24


def test_messages_arrive_once_after_a_kill_under_asgi(serve, consume) -> None:
    web = serve("after_the_commit", asgi=True)
    web.post_and_die("order?number=1")
    consume()
    wait_until(lambda: has_arrived("1"))
    assert_done_once("1")


@pytest.mark.matrix
@pytest.mark.postgresql
@pytest.mark.parametrize("txmsg", ["activemq"], indirect=True)
def test_stopped_for_longer_than_a_group_lasts_and_killed_after_the_commit(
    serve, consume, txmsg
) -> None:
    """Three processes are suspended while they join a control group, each at a
    different step. They resume after the group has ended, and are killed after their
    commit. Their messages are dispatched."""
    consumer = consume()
    steps = ("before_the_insert", "after_the_insert", "before_the_commit")
    webs = {
        step: serve(f"stopped_{step}", txmsg={"DISPATCH_ON_COMMIT": "off"})
        for step in steps
    }

    def open_and_join(step: str) -> list[str]:
        """Send requests until one has joined the group of an earlier request. The
        process of the later request then dies."""
        numbers: list[str] = []
        while not webs[step].has_died_once():
            numbers.append(f"{step}-{len(numbers)}")
            with contextlib.suppress(httpx.TransportError):
                assert webs[step].post(f"order?number={numbers[-1]}").status_code == 201
        return numbers

    with ThreadPoolExecutor(len(webs)) as pool:
        deaths = [pool.submit(open_and_join, step) for step in webs]
        wait_until(
            lambda: all(web.has_stopped_once() for web in webs.values()), deadline=120
        )
        wait_for_the_database(5)
        for web in webs.values():
            web.resume()
        numbers = [number for death in deaths for number in death.result(120)]
        # The receiver is stopped too, while it processes control messages and while
        # others are on their way.
        consumer.process.send_signal(signal.SIGSTOP)
        assert webs[steps[0]].post("order?number=late").status_code == 201
        wait_for_the_database(5)
        consumer.process.send_signal(signal.SIGCONT)
    for number in [*numbers, "late"]:
        wait_until(lambda number=number: has_arrived(number), deadline=120)
        assert_done_once(number)
