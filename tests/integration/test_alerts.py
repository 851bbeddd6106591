"""Each alert is reported once when it begins and once when it ends, over every channel,
whichever process reports it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import socketserver
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import django
import pytest
from django.conf import settings
from django.core import mail
from django.core.mail.backends.base import BaseEmailBackend
from django.db import OperationalError, connections
from django.test import Client, override_settings

from django_txmsg import checks, signals
from django_txmsg import webhook as webhooks
from django_txmsg.conf.schema import KINDS
from django_txmsg.models import Alert, DeadLetter, InboxMessage, StageState, Worker
from django_txmsg.monitoring import alarms, alerting, status
from django_txmsg.monitoring.alerting import Alerting
from tests import factories
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, declared, txmsg

MAIL = "ops@example.com"


class Receiver(ThreadingHTTPServer):
    """A webhook that records its calls. It answers each call with the next status in
    `answers`, and with 204 after the last one. If the status is 0, it does not
    answer."""

    daemon_threads = True

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.answers, self.over = [*answers], threading.Event()
        self.calls: list[dict[str, Any]] = []
        self.signatures: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class Call(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls.append(json.loads(body))
        signature = self.headers.get(webhooks.SIGNATURE, "")
        self.server.signatures.append((signature, body))
        answer = self.server.answers.pop(0) if self.server.answers else 204
        if not answer:
            self.server.over.wait()
        self.send_response(answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(webhooks, "PAUSES", ())
    with Receiver() as server:
        monkeypatch.setenv("TXMSG_WEBHOOK_URL", server.url)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.over.set()
        server.shutdown()


def alerts(*kinds: str, **more: Any) -> override_settings:
    return txmsg(ALERTS={"KINDS": kinds, "AFTER": 0, **more})


@pytest.mark.django_db(databases=["default", "other"])
def test_each_error_is_raised_once_and_ended_once(receiver: Receiver) -> None:
    heard: list[str] = []

    def hear(*, name: str, status: str, **_: Any) -> None:
        heard.append(f"{status} {name}")

    signals.alert_changed.connect(hear)
    with alerts("dead", MAIL=[MAIL]):
        first, second = Alerting(["default"]), Alerting(["default"])
        one = factories.DeadLetterFactory(fingerprint="a" * 16)
        for loop in (first, second, first):
            loop.tick()
        factories.DeadLetterFactory.create_batch(2, fingerprint="b" * 16)
        factories.DeadLetterFactory(fingerprint="c" * 16)
        factories.FailureNoteFactory(fingerprint="c" * 16, note="known", muted=True)
        for loop in (second, first):
            loop.tick()
        DeadLetter.objects.filter(pk=one.pk).delete()
        for loop in (first, second, first):
            loop.tick()
    signals.alert_changed.disconnect(hear)

    names = [f"dead/{'a' * 16} orders.place", f"dead/{'b' * 16} orders.place"]
    assert heard == [f"firing {names[0]}", f"firing {names[1]}", f"resolved {names[0]}"]
    assert [f"{call['status']} {call['alert']}" for call in receiver.calls] == heard
    assert receiver.calls[0]["id"] == receiver.calls[2]["id"] != receiver.calls[1]["id"]
    assert receiver.calls[1]["summary"].startswith("2 dead letters of orders.place")
    assert [message.to for message in mail.outbox] == [[MAIL]] * 3
    assert mail.outbox[2].subject.startswith("[resolved] ")
    since = r"\n\nSince \d{4}-\d\d-\d\d \d\d:\d\d:\d\d C[SD]T\.$"
    assert re.search(since, str(mail.outbox[2].body))
    assert Alert.objects.filter(ended_at=None).count() == 1


@pytest.mark.django_db(databases=["default", "other"])
def test_what_lasts_for_a_moment_is_not_raised(receiver: Receiver) -> None:
    with alerts("dead", AFTER=60):
        loop = Alerting(["default"])
        factories.DeadLetterFactory()
        loop.tick()
        DeadLetter.objects.all().delete()
        loop.tick()
        assert not Alert.objects.exists()

        factories.DeadLetterFactory()
        loop.tick()
        loop._first_seen = {name: at - 60 for name, at in loop._first_seen.items()}
        loop.tick()

    assert [call["status"] for call in receiver.calls] == ["firing"]


@pytest.mark.django_db(databases=["default", "other"])
def test_a_refused_alert_is_delivered_later_and_its_end_only_after_it(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers = [500]
    with alerts("dead", "paused"):
        loop = Alerting(["default"])
        factories.DeadLetterFactory()
        loop.tick()
        loop.tick()
        assert len(receiver.calls) == 1  # the next try is not at once
        Alert.objects.update(lease_until=factories.ago(seconds=1))
        loop.tick()
        loop.tick()
        assert [call["id"] for call in receiver.calls] == [receiver.calls[0]["id"]] * 2

        # It may have been delivered although the receiver failed, so its end follows.
        receiver.answers = [500]
        StageState.objects.pause("orders.place")
        loop.tick()
        StageState.objects.resume("orders.place")
        loop.tick()
        loop.tick()
    assert [(call["alert"], call["status"]) for call in receiver.calls[2:]] == [
        ("paused/orders.place", "firing"),
        ("paused/orders.place", "resolved"),
    ]


@pytest.mark.django_db(databases=["default", "other"])
def test_a_new_alert_does_not_wait_for_receivers_that_refuse_many_old_ones(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerting, "EVERY", 1e-9)  # one delivery for each comparison
    receiver.answers = [500] * 6
    for name, hours in (("given up", 25), ("second", 2), ("third", 1)):
        Alert.objects.create(
            service="tests", name=name, kind="dead", ended_at=factories.ago(hours=hours)
        )

    with alerts("dead"):
        loop = Alerting(["default"])
        factories.DeadLetterFactory(fingerprint="a" * 16)
        loop.tick()
        loop.tick()
        factories.DeadLetterFactory(fingerprint="b" * 16)
        for _ in range(3):
            loop.tick()
        # As if a minute had passed: the first to be tried again is tried first.
        newest = Alert.objects.order_by("pk").last()
        Alert.objects.exclude(lease_until=None).update(lease_until=factories.ago())
        Alert.objects.filter(pk=newest.pk).update(lease_until=factories.ago(hours=1))
        loop.tick()

    new = [f"dead/{one * 16} orders.place" for one in "ab"]
    called = [call["alert"] for call in receiver.calls]
    assert called == [new[0], "second", new[1], "third", new[1]]


@pytest.mark.django_db(databases=["default", "other"])
def test_line_end_in_a_key_forges_no_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = factories.InboxMessageFactory(processed_at=None, headers={}, body=b"null")
    InboxMessage.objects.filter(pk=row.pk).update(
        key="k\n\x1b[31mall is well", waits_for=uuid.uuid4(),
        waits_since=factories.ago(hours=1), after_at=factories.ago(hours=2),
        due_at=factories.ago(hours=-1),
    )  # fmt: skip

    with alerts("order", MAIL=[MAIL]):
        Alerting(["default"]).tick()

    (line,) = [text for text in caplog.messages if "firing" in text]
    assert "all is well" in line
    assert line.isprintable()
    assert str(mail.outbox[0].body).partition("\n")[0].isprintable()
    assert "all is well" in str(mail.outbox[0].body).partition("\n")[0]


class MailServer(socketserver.ThreadingTCPServer):
    """An SMTP server that records the lines that it receives, in lower case."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Mailing)
        self.lines: list[str] = []


class Mailing(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        in_text = False
        self.wfile.write(b"220 ready\r\n")
        for sent in self.rfile:
            line = sent.decode().strip().lower()
            self.server.lines.append(line)
            in_text = line == "data" or (in_text and line != ".")
            if line == "data":
                self.wfile.write(b"354 continue\r\n")
            elif not in_text:
                self.wfile.write(b"250 done\r\n")


#: The settings that name a mail server. Django 6.1 deprecates the first one.
MAIL_SETTINGS = ["EMAIL_HOST", *["MAILERS"] * (django.VERSION >= (6, 1))]


@contextmanager
def mailed_through(setting: str, host: str, port: int) -> Iterator[None]:
    """Let the project's settings name this mail server."""
    backend = "django.core.mail.backends.smtp.EmailBackend"
    given: dict[str, Any] = {
        "EMAIL_BACKEND": backend, "EMAIL_HOST": host, "EMAIL_PORT": port
    }  # fmt: skip
    if setting == "MAILERS":
        options = {"host": host, "port": port}
        given = {"MAILERS": {"default": {"BACKEND": backend, "OPTIONS": options}}}
    with override_settings(**given):
        if setting != "MAILERS":
            del settings.MAILERS
        yield


@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.filterwarnings("ignore:.*MAILERS")
@pytest.mark.parametrize("setting", MAIL_SETTINGS)
def test_alert_reaches_the_mail_server_of_the_settings(setting: str) -> None:
    factories.DeadLetterFactory()
    with MailServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        host, port = server.server_address
        with (
            alerts("dead", MAIL=[MAIL]),
            mailed_through(setting, str(host), int(port)),
            override_settings(DEFAULT_FROM_EMAIL="shop@example.com"),
        ):
            Alerting(["default"]).tick()
        server.shutdown()

    assert {f"rcpt to:<{MAIL}>", "from: shop@example.com"} <= {*server.lines}
    (subject,) = [one for one in server.lines if one.startswith("subject: ")]
    assert subject.startswith("subject: [firing] ")
    assert Alert.objects.get().delivered == "firing"


class Refusing(BaseEmailBackend):
    """A mail backend that raises its own type of exception, as mail providers' backends
    do."""

    def send_messages(self, email_messages: Any) -> int:
        raise LookupError("the provider refuses")


@pytest.mark.django_db(databases=["default", "other"])
def test_a_receiver_that_fails_keeps_neither_the_relay_nor_the_other_one(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alerts("dead", MAIL=[MAIL]):
        loop = Alerting(["default"])
        factories.DeadLetterFactory()
        backend = f"{__name__}.{Refusing.__name__}"
        refusing: dict[str, Any] = {"EMAIL_BACKEND": backend}
        if django.VERSION >= (6, 1):
            refusing = {"MAILERS": {"default": {"BACKEND": backend}}}
        with override_settings(**refusing):
            loop.tick()
        loop.tick()  # a lease: the mail is not tried again yet
        for _ in range(2):
            Alert.objects.update(lease_until=factories.ago(seconds=1))
            loop.tick()
        assert (len(receiver.calls), len(mail.outbox)) == (1, 1)

        receiver.answers = [500]
        DeadLetter.objects.all().delete()
        loop.tick()
        assert len(mail.outbox) == 2
        assert Alert.objects.get().delivered == "firing"

        monkeypatch.setenv("TXMSG_WEBHOOK_URL", "no address")
        Alert.objects.update(lease_until=None)
        Alerting(["default"]).tick()
        assert Alert.objects.get().delivered == "firing"


@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.filterwarnings("ignore:.*MAILERS")
@pytest.mark.parametrize("setting", MAIL_SETTINGS)
def test_a_mail_server_that_says_nothing_does_not_block_alerts(
    setting: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerting, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        named = mailed_through(setting, *silent.getsockname())
        factories.DeadLetterFactory()
        # Ends the wait of a mail that has no time-out.
        rescue = threading.Timer(20, silent.close)
        rescue.start()
        with alerts("dead", MAIL=[MAIL]), named:
            Alerting(["default"]).tick()
        rescue.cancel()
        assert silent.fileno() >= 0
    assert len(receiver.calls) == 1
    assert Alert.objects.get().delivered == ""


@pytest.mark.django_db(databases=["default", "other"])
def test_alert_is_mailed_and_called_later_if_no_thread_can_be_started(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with alerts("dead", MAIL=[MAIL]):
        loop = Alerting(["default"])
        factories.DeadLetterFactory()
        with monkeypatch.context() as limited:
            limited.setattr(threading.Timer, "start", refuse)
            loop.tick()
        assert (len(receiver.calls), len(mail.outbox)) == (0, 1)
        Alert.objects.update(lease_until=factories.ago(seconds=1))
        loop.tick()
        assert (len(receiver.calls), len(mail.outbox)) == (1, 1)


@pytest.mark.django_db(databases=["default", "other"])
def test_nothing_is_over_only_because_a_database_does_not_answer() -> None:
    def refuse(*_: Any) -> Any:
        raise OperationalError("it is away")

    def names() -> set[str]:
        opened = Alert.objects.filter(ended_at=None, kind__in=("dead", "database"))
        return set(opened.values_list("name", flat=True))

    in_use = declared(lambda message: None, using="other")
    with alerts("dead", "database"), in_use:
        loop = Alerting(["default"])
        letter = factories.DeadLetterFactory.build()
        letter.save(using="other")
        loop.tick()
        (before,) = names()
        with connections["other"].execute_wrapper(refuse):
            loop.tick()
        assert names() == {before, "database/other"}
        outage = {"kind": "database", "name": "other", "seconds": 9, "error": "away"}
        worker = factories.WorkerFactory(outages=[outage])
        loop.tick()
        assert names() == {before, "database/other"}, "another process cannot reach it"
        worker.delete()
        loop.tick()
        assert names() == {before}
        letter.delete()
        loop.tick()
        assert names() == set()


@pytest.mark.django_db(databases=["default", "other"])
def test_an_alert_contains_no_words_of_databases_brokers_and_operators(
    receiver: Receiver,
) -> None:
    def refuse(*_: Any) -> Any:
        raise OperationalError("no user s3cr3t on host s3cr3t")

    outage = {"kind": "broker", "name": "far", "seconds": 300, "error": "s3cr3t"}
    factories.WorkerFactory(outages=[outage])
    StageState.objects.pause("mail.send", by="grace", why="s3cr3t")
    in_use = declared(lambda message: None, using="other")
    with (
        alerts("database", "outage", "paused", MAIL=[MAIL]),
        in_use,
        connections["other"].execute_wrapper(refuse),
    ):
        Alerting(["default"]).tick()
        assert str(list(map(str, alarms.of(status.read())))).count("s3cr3t") == 4

    assert {call["kind"] for call in receiver.calls} == {"database", "outage", "paused"}
    assert "s3cr3t" not in str(receiver.calls)
    assert "s3cr3t" not in str([(one.subject, one.body) for one in mail.outbox])


@pytest.mark.django_db(databases=["default", "other"])
def test_an_alert_of_many_is_not_over_because_others_are_more() -> None:
    with alerts("dead"):
        loop = Alerting(["default"])
        for number in range(alerting.MOST_DEAD):
            factories.DeadLetterFactory(fingerprint=f"{number:016x}")
        loop.tick()
        opened = set(Alert.objects.values_list("name", flat=True))
        factories.DeadLetterFactory.create_batch(2, fingerprint="f" * 16)
        loop.tick()
        assert not Alert.objects.exclude(ended_at=None).exists()
        assert opened < set(Alert.objects.values_list("name", flat=True))
        DeadLetter.objects.filter(fingerprint__in=["f" * 16, f"{3:016x}"]).delete()
        loop.tick()
        loop.tick()
        opened = set(Alert.objects.filter(ended_at=None).values_list("name", flat=True))
        assert len(opened) == alerting.MOST_DEAD - 1


@pytest.mark.django_db(databases=["default", "other"])
def test_a_renamed_service_ends_its_alerts(receiver: Receiver) -> None:
    factories.DeadLetterFactory()
    with alerts("dead"):
        Alerting(["default"]).tick()
    renamed = {"SERVICE": "new", "FORMER_SERVICES": ("tests",)}
    with txmsg(ALERTS={"KINDS": ["dead"], "AFTER": 0}, **renamed):
        loop = Alerting(["default"])
        loop.tick()
        assert Alert.objects.count() == 1
        DeadLetter.objects.all().delete()
        loop.tick()

    assert [call["status"] for call in receiver.calls] == ["firing", "resolved"]


@pytest.mark.django_db(databases=["default", "other"])
def test_calls_are_signed(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXMSG_WEBHOOK_SECRET", "s3cr3t")
    with alerts("dead"):
        factories.DeadLetterFactory()
        Alerting(["default"]).tick()

    ((signature, body),) = receiver.signatures
    at, _, digest = signature.removeprefix("t=").partition(",v1=")
    signed = f"{at}.".encode() + body
    assert digest == hmac.new(b"s3cr3t", signed, hashlib.sha256).hexdigest()


@pytest.mark.django_db(databases=["default", "other"])
def test_an_alert_keeps_its_name_while_its_numbers_change() -> None:
    def names() -> set[str]:
        return set(alerting.wanted(alerting.status.read(), KINDS))

    for minutes in (5, 6):
        late = factories.ago(minutes=minutes)
        factories.OutboxMessageFactory(due_at=late, service="shop")
        factories.InboxMessageFactory(parked=True, due_at=late)
        factories.DeadLetterFactory()
        if minutes == 5:
            StageState.objects.pause("mail.send", by="grace")
            factories.WorkerFactory(host="gone", heartbeat_at=late)
            before = names()

    assert names() == before
    assert {"overdue/outbox", "overdue/redeliveries", "paused/mail.send"} <= before
    assert len(before) == len(list(alarms.of(alerting.status.read())))
    assert {kind for kind, *_ in alarms._FINDERS} == set(KINDS)


@pytest.mark.django_db(databases=["default", "other"])
def test_alarms_beyond_the_limit_of_a_kind_are_counted() -> None:
    for number in range(alarms.LINES + 2):
        factories.OutboxMessageFactory(
            due_at=factories.ago(minutes=5), service=f"service-{number}"
        )

    found = [str(one) for one in alarms.of(alerting.status.read())]

    named = [one for one in found if "and no relay of service-" in one]
    assert len(named) == alarms.LINES
    assert "2 more services have no relay." in found


def test_an_unknown_kind_is_an_error_of_check() -> None:
    with txmsg(ALERTS={"KINDS": ["overdue", "deaf"]}):
        (error,) = checks.check()

    assert "'deaf', which is not a kind of alarm." in error.msg
    assert "newer-code" in (error.hint or "")


@pytest.mark.django_db(databases=["default", "other"])
def test_alerts_have_a_page(admin_client: Client) -> None:
    with alerts("dead"):
        factories.DeadLetterFactory()
        Alerting(["default"]).tick()
        page = admin_client.get("/admin/django_txmsg/alert/").content.decode()
    assert ">firing<" in page
    assert "1 dead letter of orders.place" in page
    with alerts("paused"):
        again = admin_client.get("/admin/django_txmsg/alert/").content.decode()
    assert ">firing<" in again
    assert "KINDS" not in page + again


@pytest.mark.django_db(databases=["default", "other"])
def test_alerts_that_no_relay_watches_any_more_are_reported(
    admin_client: Client,
) -> None:
    with alerts("dead"):
        factories.DeadLetterFactory()
        Alerting(["default"]).tick()
    with alerts():
        page = admin_client.get("/admin/django_txmsg/alert/").content.decode()
        assert "do not end them" in page
        Alert.objects.update(service="another")
        page = admin_client.get("/admin/django_txmsg/alert/").content.decode()
        assert "do not end them" not in page


@committing
@pytest.mark.parametrize("command", ["relay", "txmsg run"])
def test_a_killed_relays_alert_is_delivered_by_another(
    command: str, receiver: Receiver
) -> None:
    receiver.answers = [0]
    alert = {"KINDS": ["paused"], "AFTER": 0}
    settings = {**IMPATIENT, "ALERTS": alert, "VERSION": "4f2a"}
    StageState.objects.pause("mail.send")
    with ManageProcess(*command.split(), txmsg=settings) as relay:
        wait_until(lambda: receiver.calls, deadline=60, message=lambda: relay.output)
        assert {one.version for one in Worker.objects.all()} == {"4f2a"}
        relay.kill()
    Alert.objects.update(lease_until=factories.ago(seconds=1))
    with ManageProcess(*command.split(), txmsg=settings) as relay:
        wait_until(
            lambda: Alert.objects.filter(delivered="firing").exists(),
            deadline=60,
            message=lambda: relay.output,
        )

    first, second = receiver.calls
    assert first["id"] == second["id"]
    assert Alert.objects.count() == 1
