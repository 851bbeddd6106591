"""A project migrates from django-outbox-pattern, with its rows, senders and
receivers."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import amqp
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone

from django_txmsg.envelope.message import Message
from django_txmsg.management.commands.take_over_outbox_pattern import (
    Published,
    Received,
)
from django_txmsg.models import InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_message
from tests import factories as make
from tests import services
from tests.faults import wait_until
from tests.integration.test_operators_at_work import meanwhile
from tests.running import committing, declared, put, running, step, txmsg
from tests.services.stomp_server import PASSWORD, USER, StompServer

pytestmark = [committing, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
#: Where tox.ini puts the package, apart: it wants an older stomp.py.
OTHERS = Path(sys.prefix) / "others"

STORED = """
import datetime as dt, json, uuid
from django.core.management import call_command
from django.utils import timezone
call_command("migrate", "django_outbox_pattern", verbosity=0)
from django_outbox_pattern.models import Published, Received
def published(destination, **more):
    row = Published(destination=destination, body={"number": 1}, **more)
    row.save()
    return str(row.pk)
past = timezone.now() - dt.timedelta(hours=1)
received = [str(uuid.uuid4()), "ID:mq-1:2:3"]
Received.objects.create(msg_id=received[0], headers={
    "destination": "/queue/mails.confirm", "dop-msg-id": received[0]})
Received.objects.create(msg_id=received[1], headers={
    "destination": "/queue/mails.confirm", "message-id": received[1]})
print(json.dumps({
    "queue": published("/queue/mails.confirm", headers={"tenant": 7}),
    "topic": published("/topic/orders.placed", version="v1"),
    "sent": published("/queue/mails.confirm", status=2),
    "failed": published("/queue/mails.confirm", status=-1),
    "late": published("/queue/mails.confirm", expires_at=past),
    "strange": published("/exchange/shop/orders"),
    "received": received,
}))
"""

SENT = """
from django.core.management import call_command
call_command("migrate", "django_outbox_pattern", verbosity=0)
from django_outbox_pattern.factories import factory_producer
from django_outbox_pattern.models import Published
row = Published(destination="{to}", body={{"number": 1}})
row.save()
with factory_producer() as producer:
    for copy in range(2):
        producer.send(row)
print(row.pk)
"""

SUBSCRIBED = """
from django_outbox_pattern.factories import factory_consumer
consumer = factory_consumer()
consumer.start(lambda payload: None, "/topic/{destination}", "old.{destination}")
consumer.stop()
"""

Theirs = Callable[..., str]


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Theirs]:
    """Return a function that runs code in an environment with django-outbox-pattern, on
    the test's database."""
    if not OTHERS.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{OTHERS} is missing: tox run -e sqlite")
        pytest.skip("django-outbox-pattern is missing: tox run -e sqlite")

    def run(code: str, **settings: Any) -> str:
        (tmp_path / "theirs.py").write_text(
            "from tests.settings import *\n"
            'INSTALLED_APPS = [*INSTALLED_APPS, "django_outbox_pattern"]\n'
            f"DJANGO_OUTBOX_PATTERN = {settings!r}\n"
        )
        path = os.pathsep.join([str(ROOT), str(tmp_path), *sys.path, str(OTHERS)])
        done = subprocess.run(
            [sys.executable, "-c", f"import django; django.setup()\n{code}"],
            env=os.environ
            | {"DJANGO_SETTINGS_MODULE": "theirs", "PYTHONPATH": path},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    with connection.cursor() as cursor:
        for table in ("published", "received"):
            cursor.execute(f"DROP TABLE IF EXISTS {table}")
        cursor.execute("DELETE FROM django_migrations WHERE app LIKE '%pattern'")


@pytest.fixture(params=["activemq", "rabbitmq"])
def stomp_server(request: pytest.FixtureRequest) -> StompServer:
    """Each STOMP broker in turn."""
    server: StompServer = request.getfixturevalue(request.param)
    return server


def broker(server: StompServer) -> dict[str, Any]:
    """Return the broker settings of django-outbox-pattern."""
    return {
        "DEFAULT_STOMP_HOST_AND_PORTS": [("127.0.0.1", server.port)],
        "DEFAULT_STOMP_USERNAME": USER,
        "DEFAULT_STOMP_PASSCODE": PASSWORD,
    }


def take_over(*arguments: str) -> str:
    said = StringIO()
    try:
        call_command("take_over_outbox_pattern", *arguments, stdout=said, stderr=said)
    except CommandError as error:
        said.write(str(error))
    return said.getvalue()


def outbox() -> dict[str, str]:
    rows = OutboxMessage.objects.values_list("message_id", "destination")
    return {str(message_id): destination for message_id, destination in rows}


def test_stored_messages_are_taken_over_once(theirs: Theirs) -> None:
    stored = json.loads(theirs(STORED))
    got: list[Message] = []

    with txmsg(), declared(got.append, "mails.confirm") as stage:
        dry = take_over("--dry-run")
        assert "Would take 2 unsent messages" in dry
        assert (outbox(), InboxMessage.objects.count()) == ({}, 0)

        said = take_over()
        assert "Took 2 unsent messages over into the outbox." in said
        assert "2 that it had given up are left: --given-up takes them" in said
        assert "Took 2 ids of received messages over into the inbox." in said
        assert "by destination: /exchange/shop/orders (1)" in said
        assert outbox() == {
            stored["queue"]: "mails.confirm",
            stored["topic"]: "topic:orders.placed.v1",
        }

        again = take_over("--given-up", "--rename", "/exchange/shop/orders=orders")
        assert "Took 3 unsent messages" in again
        assert "Took 0 ids" in again
        assert set(outbox()) == {
            stored[one] for one in ("queue", "topic", "failed", "late", "strange")
        }
        assert outbox()[stored["strange"]] == "orders"
        assert "Took 0 unsent messages" in take_over("--given-up")

        # The headers that its receivers know a message by go on with it.
        row = OutboxMessage.objects.get(message_id=stored["queue"])
        assert row.headers["dop-msg-id"] == stored["queue"]
        assert row.correlation_id == row.headers["dop-correlation-id"]

        # A late copy of what it had received is known.
        copy = {"dop-msg-id": stored["received"][0], "content-type": "text/plain"}
        put("mails.confirm", b"1", copy)
        put("mails.confirm", b"1", copy | {"dop-msg-id": str(uuid.uuid4())})
        step(stage, 2)
    assert [message.body for message in got] == ["1"]


@pytest.fixture
def published() -> Iterator[Callable[..., None]]:
    """Return a function that stores a row of django-outbox-pattern. `headers` may be
    any value that an older release, bulk_create() or plain SQL can have stored."""
    models = (Published, Received)
    with connection.schema_editor() as editor:
        for model in models:
            editor.create_model(model)
    now = timezone.now()

    def store(headers: object, destination: str = "/queue/mails") -> None:
        Published._base_manager.create(
            id=uuid.uuid4(), destination=destination, body={}, added=now, status=1,
            expires_at=now + dt.timedelta(days=1), headers=headers,
        )  # fmt: skip

    yield store
    with connection.schema_editor() as editor:
        for model in models:
            editor.delete_model(model)


def test_taken_over_messages_wait_for_the_relay(
    published: Callable[..., None],
) -> None:
    """The queues may still be those of the old release, and a topic has no subscriber
    before the stages run."""
    published({})
    with txmsg(DISPATCH_ON_COMMIT="inline"):
        take_over()
        assert OutboxMessage.objects.get().dispatched_at is None
        with transaction.atomic():
            later = send_message("mails", None)
        assert OutboxMessage.objects.get(message_id=later.id).dispatched_at


def test_unusable_headers_are_left_out_and_destinations_reported(
    published: Callable[..., None],
) -> None:
    for headers in (None, {"dop-correlation-id": None, "a": 1}, ["x"], {"a\nb": "x"}):
        published(headers)
    published({}, "/exchange/orders")

    said = take_over()

    assert "Took 3 unsent messages" in said
    rows = OutboxMessage.objects.all()
    assert sorted(str(row.headers) for row in rows) == ["{'a': '1'}", "{}", "{}"]
    assert {row.correlation_id for row in rows} == {""}
    assert "by destination: /exchange/orders (1)." in said
    assert "Left where they are: 1. " in said


def test_without_its_tables_it_says_where_it_has_looked() -> None:
    said = take_over()

    assert "Database 'default' has no tables of django-outbox-pattern" in said


def receive(**headers: object) -> None:
    """Store a message that django-outbox-pattern has processed."""
    Received._base_manager.create(
        id=uuid.uuid4(), msg_id="1", added=timezone.now(), status=2,
        headers={"destination": "/queue/mails", **headers},
    )  # fmt: skip


def test_received_messages_are_known_in_the_stages_database_and_to_its_broker(
    published: Callable[..., None],
) -> None:
    receive(**{"dop-msg-id": "7"})
    got: list[Message] = []
    with txmsg(), declared(got.append, "mails", using="other", broker="apart") as one:
        assert "Took 1 id of" in take_over()
        assert "Took 0 ids of" in take_over()
        late = {"dop-msg-id": "7", "content-type": "text/plain"}
        put("mails", b"1", late, broker="apart")
        step(one)
    assert got == []
    assert not InboxMessage.objects.exists()


@pytest.mark.postgresql
def test_messages_received_meanwhile_are_not_counted_as_taken_over(
    published: Callable[..., None],
) -> None:
    known = uuid.uuid4()
    receive(**{"dop-msg-id": str(known)})

    def received() -> None:
        # The command waits for the end of this one's transaction.
        for message_id in (known, uuid.uuid4(), uuid.uuid4()):
            make.InboxMessageFactory(stage="mails", message_id=message_id)

    with declared(print, "mails"):
        said = meanwhile(received, take_over)

    assert "Took 1 id of" in said
    assert InboxMessage.objects.count() == 3


@pytest.mark.postgresql
def test_stage_recognises_a_senders_repeated_message(
    theirs: Theirs, stomp_server: StompServer, destination: str
) -> None:
    sent = theirs(SENT.format(to=f"/queue/{destination}"), **broker(stomp_server))
    got: list[Message] = []

    with (
        txmsg(BROKERS={"default": {"URL": stomp_server.url()}}),
        declared(got.append, destination) as stage,
        running(stage),
    ):
        wait_until(lambda: InboxMessage.objects.filter(deliveries=2).exists())
    assert [str(message.id) for message in got] == [sent]
    assert json.loads(got[0].body) == {"number": 1}


@pytest.mark.postgresql
def test_messages_left_in_the_old_queue_are_moved_to_the_new_one(
    theirs: Theirs, rabbitmq: services.RabbitMQ, destination: str
) -> None:
    where = broker(rabbitmq)
    to = f"/topic/{destination}"
    theirs(SUBSCRIBED.format(destination=destination), **where)
    left = theirs(SENT.format(to=to), **where)
    got: list[Message] = []

    with (
        txmsg(BROKERS={"default": {"URL": rabbitmq.url()}}),
        declared(got.append, f"topic:{destination}") as stage,
        running(stage) as (thread,),
    ):
        wait_until(lambda: thread.dry)
        came = theirs(SENT.format(to=to), **where)
        wait_until(lambda: [str(message.id) for message in got] == [came])

        # As the management pages do.
        with amqp.Connection(f"127.0.0.1:{rabbitmq.amqp_port}", USER, PASSWORD) as link:
            channel = link.channel()
            while message := channel.basic_get(f"old.{destination}", no_ack=True):
                channel.basic_publish(message, routing_key=stage.subscriber)
        rows = InboxMessage.objects.filter(processed_at__isnull=False)
        wait_until(lambda: sorted(rows.values_list("deliveries", flat=True)) == [2, 4])
    assert [str(message.id) for message in got] == [came, left]
