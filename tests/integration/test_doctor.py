"""`txmsg doctor` tests an installation. `txmsg init` prints what the installation
lacks."""

from __future__ import annotations

import json
import uuid
from importlib import metadata
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection
from django.test import override_settings

from django_txmsg.envelope.message import Message
from django_txmsg.models import OutboxMessage
from tests import factories
from tests.faults import ManageProcess, wait_until
from tests.running import committing, declared, set_sequence, txmsg
from tests.services import ByAmqp, RabbitMQ, free_port
from tests.services.rabbitmq import READER


def doctor() -> tuple[int, list[dict[str, str]]]:
    """Return the exit code and the results of `txmsg doctor`."""
    output, code = StringIO(), 0
    try:
        call_command("txmsg", "doctor", "--json", stdout=output)
    except SystemExit as ended:
        code = int(ended.code or 0)
    report = json.loads(output.getvalue())
    assert report["well"] is (code == 0)
    for one in report["examined"]:
        assert one["state"] == "good" or one["cure"], one
    return code, report["examined"]


def of(examined: list[dict[str, str]], subject: str) -> list[dict[str, str]]:
    """Return the results about one subject."""
    return [one for one in examined if one["subject"] == subject]


def printed(command: str) -> str:
    """Return the output of a `txmsg` subcommand."""
    output = StringIO()
    call_command("txmsg", command, stdout=output)
    return output.getvalue()


@committing
def test_a_healthy_installation_is_well_and_left_as_it_was() -> None:
    with txmsg():
        code, examined = doctor()

    assert code == 0
    said = {one["subject"]: one["text"] for one in examined}
    assert said["tables in database 'default'"] == "all migrations are applied"
    assert "rolled back" in said["writing to database 'default'"]
    assert "went through 'tests.doctor' and back" in said["broker 'default'"]
    assert not OutboxMessage.objects.exists()


@committing
@pytest.mark.parametrize("kind", ["activemq", "rabbitmq", "rabbitmq_amqp"])
def test_a_message_goes_through_each_broker_and_back(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(kind)
    # AMQP and STOMP each have a queue of their own.
    service = f"doctor-{kind.replace('_', '-')}"
    with txmsg(SERVICE=service, BROKERS={"default": {"URL": server.url()}}):
        code, examined = doctor()
        again, _ = doctor()

    assert (code, again) == (0, 0), examined
    assert "and back" in of(examined, "broker 'default'")[-1]["text"]


@committing
def test_a_queue_of_the_other_protocol_is_cured_by_the_url(rabbitmq: RabbitMQ) -> None:
    def by(url: str) -> tuple[int, dict[str, str]]:
        with txmsg(SERVICE="doctor-of-two", BROKERS={"default": {"URL": url}}):
            code, examined = doctor()
        return code, of(examined, "broker 'default'")[-1]

    assert by(ByAmqp(rabbitmq).url())[0] == 0
    code, found = by(rabbitmq.url())
    assert (code, found["state"]) == (1, "bad")
    assert "cannot send to and receive from it" in found["text"]
    assert "?existing=" in found["cure"]
    assert by(rabbitmq.url(existing="*"))[0] == 0


@committing
def test_a_broker_that_is_not_there_is_bad_and_the_rest_is_tried() -> None:
    wrong = f"amqp://user:secret@127.0.0.1:{free_port()}"
    with txmsg(BROKERS={"default": {"URL": wrong}, "good": {"URL": "database://"}}):
        code, examined = doctor()

    (bad,) = of(examined, "broker 'default'")
    assert (code, bad["state"]) == (1, "bad")
    assert "cannot connect to it" in bad["text"]
    assert 'TXMSG["BROKERS"]["default"]' in bad["cure"]
    assert "secret" not in json.dumps(examined)
    assert of(examined, "broker 'good'")[-1]["state"] == "good"


@committing
def test_a_user_who_may_not_write_is_bad(rabbitmq_amqp: Any) -> None:
    url = rabbitmq_amqp.url(user=READER)
    with txmsg(SERVICE="doctor-reader", BROKERS={"default": {"URL": url}}):
        code, examined = doctor()

    found = of(examined, "broker 'default'")
    assert code == 1
    assert [one["state"] for one in found] == ["good", "bad"]
    assert "access" in found[1]["text"].lower()


@committing
def test_without_stages_doctor_says_where_they_are_searched() -> None:
    with txmsg():
        code, examined = doctor()

    (found,) = of(examined, "stages")
    assert (code, found["state"], found["text"]) == (0, "warning", "none is declared")
    assert "module named stages" in found["cure"]


@committing
def test_a_stage_without_a_worker_is_named_until_one_runs() -> None:
    def handler(message: Message) -> None: ...

    with txmsg(), declared(handler, "tests.doctored"):
        factories.OutboxMessageFactory(dead=True)
        _, examined = doctor()
        (stages,) = of(examined, "stages")
        assert stages["state"] == "warning"
        assert "tests.doctored" in stages["text"]
        assert of(examined, "relay")[0]["text"] == "none is running"
        factories.OutboxMessageFactory()
        (relay,) = of(doctor()[1], "relay")
        assert relay["text"] == "none is running, and messages wait"

        with ManageProcess("relay"):
            wait_until(lambda: of(doctor()[1], "relay")[0]["state"] == "good")


@committing
@pytest.mark.postgresql
def test_a_server_that_takes_no_writes_is_bad() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")
    try:
        with txmsg():
            code, examined = doctor()
    finally:
        connection.close()

    (bad,) = of(examined, "writing to database 'default'")
    assert (code, bad["state"]) == (1, "bad")
    assert "read-only" in bad["text"]


@committing
@pytest.mark.postgresql
def test_a_sequence_that_is_behind_is_bad_until_the_cure_is_applied() -> None:
    factories.OutboxMessageFactory(dispatched_at=factories.ago(hours=1))
    set_sequence(OutboxMessage, 1)
    subject = "sequences of database 'default'"
    with txmsg():
        code, examined = doctor()
        (bad,) = of(examined, subject)
        assert (code, bad["state"]) == (1, "bad")
        assert "django_txmsg_outboxmessage" in bad["text"]
        _, _, command = bad["cure"].partition("manage.py ")
        name, app = command.split()[:2]
        cure = StringIO()
        call_command(name, app, stdout=cure, no_color=True)
        with connection.cursor() as cursor:
            cursor.execute(cure.getvalue())
        code, examined = doctor()
    (good,) = of(examined, subject)
    assert (code, good["state"]) == (0, "good")


@committing
@pytest.mark.parametrize(
    ("queues", "service"), [("", "tests"), ("other", "tests"), ("", "before")]
)
def test_messages_in_a_database_that_no_relay_serves_are_bad(
    queues: str, service: str
) -> None:
    """The embedded broker may keep its queues in that database."""

    def stored(**columns: Any) -> tuple[int, list[dict[str, str]]]:
        factories.OutboxMessageFactory.build(**columns).save(using="other")
        code, examined = doctor()
        return code, of(examined, "outbox in database 'other'")

    with txmsg(
        BROKERS={"default": {"URL": f"database://{queues}"}}, FORMER_SERVICES=["before"]
    ):
        # A relay with `--database other` may be about to dispatch the first; the second
        # is another service's.
        assert stored(service=service) == (0, [])
        hour = {"created_at": factories.ago(hours=1)}
        assert stored(service="another", **hour) == (0, [])
        code, (bad,) = stored(service=service, **hour)

    assert (code, bad["state"]) == (1, "bad")
    assert "relay --database other" in bad["cure"]


@committing
def test_messages_to_a_broker_that_is_not_in_the_settings_are_bad() -> None:
    for broker, service in [("default", "tests"), ("old", "tests"), ("its", "another")]:
        factories.OutboxMessageFactory(
            broker=broker, service=service, due_at=factories.ago(days=-1)
        )
    with txmsg():
        code, examined = doctor()
    bad = [one for one in examined if one["state"] == "bad"]
    assert code == 1
    assert [one["subject"] for one in bad] == [
        "messages to broker 'old' in database 'default'"
    ]


@committing
def test_a_missing_migration_is_named_with_its_command() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM django_migrations WHERE app = 'django_txmsg' AND name ="
            " (SELECT max(name) FROM django_migrations WHERE app = 'django_txmsg')"
            " RETURNING name"
        )
        (name,) = cursor.fetchone()
    try:
        with txmsg():
            code, examined = doctor()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO django_migrations (app, name, applied)"
                " VALUES ('django_txmsg', %s, CURRENT_TIMESTAMP)",
                [name],
            )

    (bad,) = of(examined, "tables in database 'default'")
    assert code == 1
    assert bad["text"] == f"migrations missing: 1, the first django_txmsg.{name}"
    assert bad["cure"] == "Run manage.py migrate."
    # What is in those tables is not tried, and so not called bad for another reason.
    assert not of(examined, "writing to database 'default'")
    assert not of(examined, "broker 'default'")


@committing
def test_a_copy_of_the_package_that_pip_has_not_installed_is_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    (versions,) = of(doctor()[1], "versions")
    assert versions["text"].startswith("Django ")


def test_unreadable_settings_are_reported_without_a_connection() -> None:
    with override_settings(TXMSG={"BROKER": {}}):
        code, examined = doctor()

    assert code == 1
    assert [one["subject"] for one in examined] == [
        "versions",
        "settings (txmsg.E001)",
    ]
    assert "BROKERS" in examined[1]["cure"]


def test_init_prints_what_a_bare_project_lacks() -> None:
    bare = "django.contrib.auth.urls"
    with override_settings(TXMSG={}, MIDDLEWARE=[], LOGGING={}, ROOT_URLCONF=bare):
        said = printed("init")

    for line in (
        'TXMSG = {"SERVICE": "django"}',
        'path("txmsg/", include("django_txmsg.urls"))',
        'MIDDLEWARE = [..., "django_txmsg.middleware.OutboxMiddleware"]',
        '"loggers": {"django_txmsg": {"handlers": ["console"], "level": "INFO"}},',
        "python manage.py migrate",
        "python manage.py txmsg run",
    ):
        assert line in said


def test_init_prints_lines_for_projects_without_urls() -> None:
    with override_settings(TXMSG={}):
        del settings.ROOT_URLCONF  # as where no settings file has it
        said = printed("init")

    assert 'TXMSG = {"SERVICE": "project"}' in said
    assert "django_txmsg.urls" not in said


def test_init_prints_only_missing_settings() -> None:
    with override_settings(
        MIDDLEWARE=["tests.unit.test_checks.OwnMiddleware"],
        LOGGING={"version": 1, "incremental": True, "loggers": {"django_txmsg": {}}},
    ):
        said = printed("init")

    for word in ("MIDDLEWARE", "LOGGING", "SERVICE"):
        assert word not in said
    assert said.strip().startswith("1. ")


@committing
@pytest.mark.postgresql
def test_doctor_reports_unreadable_migrations() -> None:
    own, name = connection.settings_dict, f"unread_{uuid.uuid4().hex[:8]}"
    # The settings of a process put "test_" in front.
    database = str(own["NAME"]).removeprefix("test_")
    url = f"postgres://{name}:secret@{own['HOST']}:{own['PORT']}/{database}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
        try:
            cursor.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
            cursor.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}")
            cursor.execute(f"REVOKE ALL ON django_migrations FROM {name}")
            env = {"TXMSG_TEST_DATABASE_URL": url}
            with ManageProcess("txmsg", "doctor", "--json", env=env) as process:
                process.wait()
                said = process.output
        finally:
            cursor.execute(f"DROP OWNED BY {name}")
            cursor.execute(f"DROP ROLE {name}")
    assert "Traceback" not in said
    assert "permission denied for table django_migrations" in said
    assert "SELECT from django_migrations" in said
