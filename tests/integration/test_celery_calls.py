"""A task called inside a transaction becomes a row of the outbox, with the message that
Celery would have sent. The call contacts neither the broker nor the result backend.
Both are down in these tests."""

from __future__ import annotations

import datetime as dt
import io
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from celery import Celery as PlainCelery
from celery import chain, chord, group
from celery.contrib.django.task import DjangoTask
from django.core.management import call_command
from django.db import transaction
from django.db.models.functions import Now
from django.test import override_settings
from kombu import Connection, pools
from kombu.exceptions import OperationalError

from django_txmsg import Message, outbox_session, send_message
from django_txmsg.brokers import get_broker, make_broker
from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.celery_publication import Publication
from django_txmsg.celery import Celery, TransactionalTask
from django_txmsg.dead_letters import resolution
from django_txmsg.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DispatchRejected,
    DuplicateMessage,
    InvalidMessage,
    TransactionRequired,
)
from django_txmsg.models import BulkOperation, DeadLetter, OutboxMessage
from django_txmsg.monitoring import status
from django_txmsg.relaying.relay import Relay
from django_txmsg.testing import drain, outbox_messages
from tests.app.models import Effect
from tests.celery_shop import add, app, charge, step
from tests.celery_worker import forget_connections
from tests.running import IMPATIENT, committing, declared, send, ship, txmsg
from tests.running import step as take

pytestmark = committing

DOWN = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def celery() -> Iterator[None]:
    """Make the app's broker and its result backend unreachable."""
    before = {name: app.conf[name] for name in ("broker_url", "result_backend")}
    app.conf.update(broker_url="amqp://127.0.0.1:1//", result_backend=DOWN)
    app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    forget_connections()
    with through("tests.celery_shop:app"):
        yield
    app.conf.update(before)
    forget_connections()


def through(path: str, **more: Any) -> override_settings:
    """Return settings with a broker that sends through the Celery app at `path`."""
    brokers = {**IMPATIENT["BROKERS"], "celery": {"URL": f"celery://{path}"}}
    return txmsg(BROKERS=brokers, **more)


def stored() -> list[tuple[str, Any, Publication]]:
    """Return the task's name, its arguments and its Celery message, for each row of the
    outbox."""
    found = []
    for row in OutboxMessage.objects.order_by("id"):
        assert row.broker == "celery"
        assert row.state == "pending"
        one = Publication.read(row.headers["celery"], bytes(row.body), row.content_type)
        assert one.headers["task"] == row.destination
        found.append((row.destination.split(".")[-1], json.loads(one.body)[0], one))
    return found


def test_delay_is_a_row_that_commits_with_the_data() -> None:
    with transaction.atomic():
        result = add.delay(1, 2)
        Effect.objects.create(name="order", message_id="1")

    ((name, args, message),) = stored()
    assert (name, args) == ("add", [1, 2])
    row = OutboxMessage.objects.get()
    assert result.id == str(row.message_id) == message.headers["id"]
    assert row.correlation_id == message.headers["root_id"]
    assert message.properties["correlation_id"] == result.id
    assert message.properties["delivery_mode"] == 2


def test_a_rolled_back_transaction_calls_nothing() -> None:
    with transaction.atomic():
        add.delay(1, 2)
        transaction.set_rollback(True)

    assert stored() == []


def test_outside_of_a_transaction_a_call_goes_to_celery() -> None:
    app.conf.result_backend = None  # which Celery asks first
    forget_connections()
    with pytest.raises(OperationalError):
        add.apply_async((1, 2), retry=False)

    assert stored() == []


def test_outside_of_a_transaction_a_call_is_an_error_if_settings_require_one() -> None:
    app.conf.result_backend = None
    forget_connections()
    with through("tests.celery_shop:app", CELERY={"REQUIRE_ATOMIC": True}):
        with pytest.raises(TransactionRequired, match=r"shop\.add"):
            add.delay(1, 2)
        with (
            pytest.raises(TransactionRequired, match="drop the hook"),
            transaction.atomic(),
        ):
            transaction.on_commit(lambda: add.delay(1, 2))
        with pytest.raises(TransactionRequired):
            app.send_task("elsewhere.task")
        with pytest.raises(TransactionRequired):
            group(add.s(1, 2), add.s(3, 4)).delay()
        with pytest.raises(OperationalError), app.connection_for_write() as connection:
            # As beat does.
            add.apply_async((1, 2), producer=app.amqp.Producer(connection), retry=False)
        with transaction.atomic():
            add.delay(1, 2)

    assert len(stored()) == 1


def test_calls_by_a_worker_itself_need_no_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker's main process calls the error links of a task that exceeds its time
    limit. Such a call needs no transaction."""
    app.conf.result_backend = None
    forget_connections()
    monkeypatch.setattr(app.loader, "worker_initialized", True)
    with (
        through("tests.celery_shop:app", CELERY={"REQUIRE_ATOMIC": True}),
        pytest.raises(OperationalError),
    ):
        add.apply_async((1, 2), retry=False)


def test_a_connection_of_the_caller_s_does_not_lead_around_the_outbox() -> None:
    app.conf.broker_url = "memory://"
    forget_connections()
    with transaction.atomic(), app.connection_for_write() as connection:
        queue = app.amqp.default_queue(connection.default_channel)
        queue.declare()
        queue.purge()
        add.apply_async((1, 2), connection=connection)
        app.send_task("elsewhere.task", (3,), connection=connection)
        add.apply_async((4, 5), publisher=app.amqp.Producer(connection))
        assert queue.get() is None

    assert [args for _, args, _ in stored()] == [[1, 2], [3], [4, 5]]


ELSEWHERE = {
    "a connection": lambda there: {"connection": there},
    "a producer": lambda there: {"producer": app.amqp.Producer(there)},
    "a publisher": lambda there: {"publisher": app.amqp.Producer(there)},
    "a pooled producer": lambda there: {
        "producer": pools.producers[there].acquire(block=True)
    },
}


@pytest.mark.parametrize("by", ELSEWHERE)
@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/5", "amqp://127.0.0.1:1/other", "amqp://127.0.0.1:2//"]
)
def test_stored_task_never_goes_to_another_broker(by: str, url: str) -> None:
    """A call with the connection or the producer of another broker is refused.
    Otherwise the relay would send the row to the broker of the row's app, perhaps to a
    queue without a consumer."""
    calls: list[Callable[..., Any]] = [
        lambda **given: add.apply_async((1, 2), **given),
        lambda **given: app.send_task("elsewhere.task", (3,), **given),
        lambda **given: app.signature("elsewhere.task", (3,)).apply_async(**given),
    ]
    if by == "a producer":
        calls.append(lambda **given: group(add.s(1, 2)).apply_async(**given))
    with Connection(url) as there, transaction.atomic():
        given = ELSEWHERE[by](there)
        for call in calls:
            with pytest.raises(InvalidMessage, match="leads to another broker"):
                call(**given)
        add.delay(1, 2)

    assert len(stored()) == 1


def test_another_host_of_the_app_s_own_broker_is_no_other_broker() -> None:
    app.conf.broker_url = "amqp://127.0.0.1:1//;amqp://127.0.0.1:2//"
    forget_connections()
    for url in ("amqp://127.0.0.1:1", "amqp://somebody:else@127.0.0.1:2//"):
        with Connection(url) as there, transaction.atomic():
            add.apply_async((1, 2), connection=there)

    assert len(stored()) == 2


def test_a_redis_url_without_a_database_is_that_of_the_first_one() -> None:
    app.conf.broker_url = "redis://127.0.0.1:1"
    forget_connections()
    with Connection("redis://127.0.0.1:1/0") as there, transaction.atomic():
        add.apply_async((1, 2), connection=there)
    with (
        Connection("redis://127.0.0.1:1/1") as elsewhere,
        transaction.atomic(),
        pytest.raises(InvalidMessage),
    ):
        add.apply_async((1, 2), connection=elsewhere)

    assert len(stored()) == 1


def test_options_of_publishing_are_ignored_in_a_call() -> None:
    app.conf.broker_url = "memory://"
    forget_connections()
    with transaction.atomic():
        add.apply_async((1, 2), retry=True, argsrepr="(secret)")

    ship(broker="celery")

    row = OutboxMessage.objects.get()
    assert (row.last_error, row.state) == ("", "dispatched")


def test_countdown_eta_expires_priority_and_queue_are_in_the_message() -> None:
    eta = dt.datetime(2040, 1, 1, tzinfo=dt.timezone.utc)
    with transaction.atomic():
        add.apply_async((1, 1), countdown=60)
        add.apply_async((2, 2), eta=eta)
        add.apply_async((3, 3), expires=eta, priority=7)
        add.apply_async((4, 4), queue="other", headers={"tenant": "a"}, shadow="sum")

    later, at, prior, other = (message for *_, message in stored())
    in_a_minute = dt.datetime.fromisoformat(later.headers["eta"])
    left = in_a_minute - dt.datetime.now(dt.timezone.utc)
    assert dt.timedelta(0) < left <= dt.timedelta(seconds=60)
    assert at.headers["eta"] == eta.isoformat()
    assert prior.headers["expires"] == eta.isoformat()
    assert prior.properties["priority"] == 7
    assert (other.routing_key, other.headers["tenant"]) == ("other", "a")
    assert other.headers["shadow"] == "sum"
    assert [queue.name for queue in other.entities()] == ["other"]
    # The relay hands over all of them now: Celery's workers keep the times.
    assert not OutboxMessage.objects.filter(due_at__gt=Now()).exists()


def test_a_chain_is_its_first_task_with_the_rest_in_it() -> None:
    with transaction.atomic():
        result = chain(add.s(1, 2), add.s(3), add.s(4)).delay()

    ((name, args, message),) = stored()
    _, _, embedded = json.loads(message.body)
    assert (name, args) == ("add", [1, 2])
    rest = [one["options"]["task_id"] for one in embedded["chain"]]
    assert [result.id, result.parent.id, result.parent.parent.id] == [
        *rest,
        message.headers["id"],
    ]


def test_a_group_and_chunks_are_a_row_for_each_task() -> None:
    with transaction.atomic():
        result = group(add.s(i, i) for i in range(3)).delay()
        add.chunks(zip(range(4), range(4), strict=True), 2).apply_async()

    *members, first, second = stored()
    assert [args for _, args, _ in members] == [[0, 0], [1, 1], [2, 2]]
    assert [one.id for one in result] == [one.headers["id"] for *_, one in members]
    assert {one.headers["group"] for *_, one in members} == {result.id}
    assert [first[0], second[0]] == ["starmap", "starmap"]


def test_links_and_error_links_are_in_the_message() -> None:
    with transaction.atomic():
        add.apply_async((1, 2), link=add.s(3), link_error=step.s("error"))

    ((_, _, message),) = stored()
    _, _, embedded = json.loads(message.body)
    assert [one["args"] for one in embedded["callbacks"]] == [[3]]
    assert [one["task"] for one in embedded["errbacks"]] == ["tests.celery_shop.step"]


def test_send_task_and_signatures_of_unregistered_tasks_are_rows() -> None:
    with transaction.atomic():
        app.send_task("elsewhere.one", [1], {"two": 2})
        app.signature("elsewhere.two", (3,)).delay()
        chain(app.signature("elsewhere.three"), add.s(1)).apply_async()

    names = [row.destination for row in OutboxMessage.objects.order_by("id")]
    assert names == ["elsewhere.one", "elsewhere.two", "elsewhere.three"]


def test_delay_on_commit_is_a_row_too() -> None:
    with transaction.atomic():
        add.delay_on_commit(1, 2)
        add.apply_async_on_commit((3, 4), countdown=5)

    assert [args for _, args, _ in stored()] == [[1, 2], [3, 4]]


def test_delay_on_commit_waits_for_a_commit_where_no_row_can() -> None:
    app.conf.update(broker_url="memory://", result_backend=None)
    forget_connections()
    with app.connection_for_read() as connection:
        queue = app.amqp.default_queue(connection.default_channel)
        queue.declare()
        queue.purge()
        with transaction.atomic():
            # The outbox is in another database than this transaction.
            add.apply_async_on_commit((1, 2), using="other")
            assert queue.get() is None
        assert queue.get() is not None
    with (
        through("tests.celery_shop:app", CELERY={"REQUIRE_ATOMIC": True}),
        transaction.atomic(),
        pytest.raises(TransactionRequired, match="'other'"),
    ):
        add.apply_async_on_commit((1, 2), using="other")

    assert stored() == []


def test_eagerly_delay_on_commit_waits_for_the_commit_too() -> None:
    app.conf.task_always_eager = True
    try:
        with transaction.atomic():
            charge.delay_on_commit("eager")
            assert not Effect.objects.exists()
    finally:
        app.conf.task_always_eager = False
    assert Effect.objects.filter(name='charge ["eager"]').count() == 1


def test_a_chord_needs_its_backend() -> None:
    with pytest.raises(Exception, match="onnect"), transaction.atomic():
        chord([add.s(1, 1), add.s(2, 2)], step.s()).delay()

    assert stored() == []


@pytest.mark.filterwarnings("default:Call to deprecated:DeprecationWarning:celery")
def test_results_of_a_group_are_watched_once_a_caller_waits(redis: Any) -> None:
    app.conf.result_backend = redis.url(3)
    forget_connections()
    with transaction.atomic():
        result = group(add.s(1, 1), add.s(2, 2)).delay()
    for number, one in enumerate(result):
        app.backend.store_result(one.id, number, "SUCCESS")

    assert result.get(timeout=30) == [0, 1]


def test_a_task_called_twice_with_one_id_is_stored_once() -> None:
    given = str(uuid.uuid4())
    with transaction.atomic():
        add.apply_async((1, 2), task_id=given)
        with pytest.raises(DuplicateMessage):
            add.apply_async((1, 2), task_id=given)
        add.apply_async((1, 2), task_id="no uuid")

    assert [one.headers["id"] for *_, one in stored()] == [given, "no uuid"]


def test_the_transaction_may_be_another_database_s() -> None:
    with transaction.atomic(using="other"):
        add.apply_async((1, 2), using="other")

    assert stored() == []
    assert OutboxMessage.objects.using("other").count() == 1


@pytest.mark.parametrize("using", ["other", None])
def test_a_call_outside_of_its_database_s_transaction_goes_to_celery(
    using: str | None,
) -> None:
    """The transaction of another database is open, and does not store the call."""
    app.conf.result_backend = None
    forget_connections()
    plain = PlainCelery(
        "plain",
        task_cls="django_txmsg.celery:TransactionalTask",
        set_as_current=False,
        broker_url=app.conf.broker_url,
    )
    own = plain.task(add.run, name="tests.plain", shared=False)
    with transaction.atomic(using="default" if using else "other"):
        for task in (add, own):
            with pytest.raises(OperationalError):
                task.apply_async((1, 2), using=using, retry=False)

    assert stored() == []
    assert not OutboxMessage.objects.using("other").exists()


def test_in_a_session_it_belongs_to_the_session() -> None:
    with outbox_session() as session:
        add.delay(1, 2)
        assert session.stored == 1

    assert OutboxMessage.objects.get(broker="celery").session_id is not None


def test_a_stage_that_runs_again_calls_the_same_task() -> None:
    called: list[str] = []

    def handle(message: Message) -> None:
        called.append(add.delay(message.body, 1).id)
        if len(called) == 1:
            raise ValueError("once more")

    with declared(handle) as stage:
        message = send(stage.destination, 1)
        take(stage, 2)

    row = OutboxMessage.objects.get(broker="celery")
    assert called == [str(row.message_id)] * 2
    assert row.correlation_id == str(message.id)


@pytest.mark.parametrize("mode", ["none", "broker_only"])
@pytest.mark.parametrize("committed", [outbox_session, transaction.atomic])
def test_an_attempt_that_skips_a_committed_call_calls_another_task(
    mode: Any, committed: Callable[[], AbstractContextManager[object]]
) -> None:
    called: list[str] = []

    def handle(message: Message) -> None:
        with committed():
            called.append(add.delay(min(len(called), 1), 1).id)
        if len(called) < 3:
            raise ValueError

    with declared(handle, transaction=mode) as stage:
        send(stage.destination)
        take(stage, 3)

    rows = OutboxMessage.objects.filter(broker="celery").order_by("pk")
    assert called[1:] == [called[2]] * 2
    assert [str(row.message_id) for row in rows] == called[:2]


class Amount:
    """Its `repr()` contains its address, not its value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __json__(self) -> int:
        return self.value


def test_arguments_are_told_apart_by_what_is_sent() -> None:
    called: list[str] = []
    amounts = [Amount(2), Amount(2), Amount(3)]

    def handle(message: Message) -> None:
        with outbox_session():
            called.append(add.delay(amounts[len(called)], 1).id)
        if len(called) < 3:
            raise ValueError

    with declared(handle, transaction="none") as stage:
        send(stage.destination)
        take(stage, 3)
    assert called[0] == called[1] != called[2]


def test_arguments_with_other_bytes_are_another_task() -> None:
    """No program can tell whether they are equal. So the second task is sent, too."""
    sets = [{0, 8}, {8, 0}]
    assert repr(sets[0]) != repr(sets[1])  # the order differs, as in another process

    def handle(message: Message) -> None:
        with transaction.atomic():
            add.apply_async((sets.pop(), 1), serializer="pickle")
        if sets:
            raise ValueError("once more")

    with declared(handle, transaction="none") as stage:
        send(stage.destination)
        take(stage, 2)
    assert OutboxMessage.objects.filter(broker="celery").count() == 2


@pytest.mark.parametrize(
    ("scheme", "why"), [("redis", "pip install redis"), ("no", "no")]
)
def test_a_missing_transport_leaves_the_other_brokers_working(
    scheme: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library of the app's transport is not installed, or kombu does not
    know the transport. The relay serves the other brokers."""
    with transaction.atomic():
        add.delay(1, 2)
        send_message("tests.elsewhere", None)
    monkeypatch.setattr("kombu.transport.redis.redis", None)
    app.conf.update(broker_url=f"{scheme}://127.0.0.1:1/0", result_backend=None)
    forget_connections()
    with pytest.raises(BrokerUnavailable, match=why):
        Relay(["default"], ["celery", "default"]).run(once=True)

    assert OutboxMessage.objects.get(dispatched_at=None).broker == "celery"


def test_a_plain_app_stores_by_the_class_of_its_tasks() -> None:
    task_cls = "django_txmsg.celery:TransactionalTask"
    global plain
    plain = PlainCelery(
        "plain", set_as_current=False, broker="amqp://127.0.0.1:1//", task_cls=task_cls
    )

    @plain.task
    def shipped(order: int) -> None: ...

    assert isinstance(shipped, DjangoTask)
    assert issubclass(plain.Task, TransactionalTask)
    with through(f"{__name__}:plain"), transaction.atomic():
        shipped.apply_async((1,), countdown=5)
        chain(shipped.s(1), shipped.si(2)).delay()
        group(shipped.s(3), shipped.s(4)).delay()
        shipped.delay_on_commit(5)

    assert [args for _, args, _ in stored()] == [[1], [1], [3], [4], [5]]


def test_eager_tasks_run_where_they_are_called() -> None:
    app.conf.task_always_eager = True
    try:
        with transaction.atomic():
            assert add.delay(1, 2).get() == 3
    finally:
        app.conf.task_always_eager = False

    assert stored() == []


def test_arguments_that_cannot_be_written_leave_the_transaction_usable() -> None:
    with transaction.atomic():
        with pytest.raises(Exception, match="serializable"):
            add.delay(object(), 1)
        add.delay(1, 2)

    assert len(stored()) == 1


def test_arguments_that_are_too_large_are_refused() -> None:
    with (
        through("tests.celery_shop:app", MAX_MESSAGE_BYTES=1000),
        transaction.atomic(),
        pytest.raises(InvalidMessage, match="1000"),
    ):
        step.delay("x" * 1000)


def test_an_app_without_a_broker_says_what_to_add() -> None:
    lone = Celery("lone", set_as_current=False)
    with transaction.atomic(), pytest.raises(ConfigurationError, match="celery://"):
        lone.send_task("anything")


def hidden(destination: str, headers: dict[str, str], body: Any) -> Any:
    """Mask every argument."""
    args, kwargs, embedded = body
    masked = dict.fromkeys(kwargs, "***")
    return headers, [["***"] * len(args), masked, embedded]


def broken(destination: str, headers: dict[str, str], body: Any) -> Any:
    """Fail."""
    raise ValueError("no good")


@pytest.mark.parametrize("mask", ["hidden", "broken"])
def test_stored_argument_texts_are_masked(mask: str) -> None:
    app.conf.task_send_sent_event = True
    try:
        with (
            through("tests.celery_shop:app", MASK=f"{__name__}.{mask}"),
            transaction.atomic(),
        ):
            step.apply_async(("secret",), {"card": "secret"})
    finally:
        app.conf.task_send_sent_event = False

    ((_, args, message),) = stored()
    assert args == ["secret"]
    assert "secret" not in OutboxMessage.objects.get().headers["celery"]
    if mask == "hidden":
        assert "***" in message.headers["argsrepr"]
        assert "card" in message.headers["kwargsrepr"]
    (event,) = message.then
    assert b"secret" not in event.body


def test_argument_texts_of_direct_sends_are_masked() -> None:
    app.conf.update(broker_url="memory://", result_backend=None)
    forget_connections()
    with (
        through("tests.celery_shop:app", MASK=f"{__name__}.hidden"),
        app.connection_for_read() as connection,
    ):
        queue = app.amqp.default_queue(connection.default_channel)
        queue.declare()
        queue.purge()
        step.apply_async(("secret",), {"card": "secret"})
        app.send_task("elsewhere.task", ("secret",))
        app.send_task("elsewhere.task", (object(),), serializer="pickle")
        first, second, third = iter(queue.get, None)

    for message in (first, second, third):
        shown = message.headers["argsrepr"], message.headers["kwargsrepr"]
        assert "secret" not in str(shown)
    assert "***" in first.headers["argsrepr"]
    assert "(masked)" in third.headers["argsrepr"]


def test_a_broker_that_is_down_costs_no_attempt() -> None:
    with transaction.atomic():
        add.delay(1, 2)

    with pytest.raises(BrokerUnavailable):
        ship(broker="celery")

    row = OutboxMessage.objects.get()
    assert (row.attempts, row.lease_token, row.dispatched_at) == (0, None, None)


def test_drain_leaves_called_tasks() -> None:
    with transaction.atomic():
        charge.delay(7)

    drained = drain()

    assert (drained.dispatched, drained.tasks) == (0, 1)
    assert OutboxMessage.objects.get().state == "pending"
    ((args, _, _),) = [one.body for one in outbox_messages("tests.celery_shop.charge")]
    assert args == [7]


def test_tasks_are_not_reported_as_unconsumed() -> None:
    with transaction.atomic():
        step.delay(1)
    OutboxMessage.objects.update(dispatched_at=Now())

    with through("tests.celery_shop:app", KNOWN_DESTINATIONS=["orders.*"]):
        assert status.read().unconsumed == {}


def test_consume_leaves_celery_s_broker_to_celery() -> None:
    call_command("consume", "--once", stdout=io.StringIO(), stderr=io.StringIO())


def test_a_refused_task_is_a_dead_letter_that_leaves_again_as_it_was() -> None:
    with transaction.atomic():
        step.apply_async(("again",), countdown=60)
    ((_, _, message),) = stored()
    OutboxMessage.objects.update(expires_at=Now())
    app.conf.broker_url = "memory://"
    ship(broker="celery")
    letter = DeadLetter.objects.get()
    assert letter.destination == "tests.celery_shop.step"

    with transaction.atomic():
        tally = resolution.Tally()
        resolution.redeliver(BulkOperation(), [letter], tally, "default")

    row = OutboxMessage.objects.get(dead_at=None)
    again = Publication.read(row.headers["celery"], bytes(row.body), row.content_type)
    assert again == message


def test_a_message_that_is_not_a_tasks_is_refused() -> None:
    broker = make_broker("celery", "celery://tests.celery_shop:app")
    assert broker.check() == []
    app.conf.broker_url = "memory://"
    with get_broker("celery").open() as session:
        (outcome,) = session.send([Outgoing("orders.place", {}, b"{}")])
        with pytest.raises(BrokerError, match="only sends"):
            session.subscribe("orders.place", prefetch=1)

    assert isinstance(outcome, DispatchRejected)
