"""Each system check reports its problem, and reports nothing for good settings."""

from __future__ import annotations

import datetime as dt
import io
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import CheckMessage
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.test import override_settings

from django_txmsg import RedeliveryPolicy, stages
from django_txmsg.checks import check, check_deployment
from django_txmsg.middleware import OutboxMiddleware
from tests.running import declared
from tests.shelved_flows import at_hand
from tests.trips import Trip, book, unbook

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "checks.md"
ACTIVEMQ = "stomp://user:long-secret@127.0.0.1:61613?dialect=activemq"
RABBITMQ = "stomp://user:long-secret@127.0.0.1:61613?dialect=rabbitmq"


class OwnMiddleware(OutboxMiddleware):
    pass


OWN_MIDDLEWARE = f"{__name__}.{OwnMiddleware.__name__}"


def txmsg(**settings: Any) -> override_settings:
    return override_settings(TXMSG={"SERVICE": "tests", **settings})


def broker(url: str) -> override_settings:
    return txmsg(BROKERS={"default": {"URL": url}})


def only(found: list[CheckMessage]) -> CheckMessage:
    (one,) = found
    return one


@contextmanager
def stage(**options: Any) -> Iterator[None]:
    with declared(lambda message: None, options.pop("to", ""), **options):
        yield


def not_a_definition(stage: stages.Stage) -> None:
    raise LookupError("no tenant")


def postgresql_only(stage: stages.Stage) -> stages.TransactionDefinition:
    return stages.TransactionDefinition(using="other")


def test_nothing_is_found_where_all_is_well() -> None:
    with stage(), txmsg():
        assert check() == []


# Django's own check of JSON columns asks every database.
@pytest.mark.django_db(databases=["default", "other"])
def test_manage_check_prints_an_unknown_key_with_the_nearest_one() -> None:
    with txmsg(RELAY={"BATCHSIZE": 5}), pytest.raises(SystemCheckError) as raised:
        call_command("check", stdout=io.StringIO())

    assert "txmsg.E001" in str(raised.value)
    assert 'TXMSG["RELAY"]["BATCHSIZE"] is not a setting' in str(raised.value)
    assert 'Did you mean "BATCH_SIZE"?' in str(raised.value)


def test_all_settings_errors_are_reported_together() -> None:
    with txmsg(RELAY={"LEASE": "60"}, DISPATCH_ON_COMMIT="later", SERVICE=None):
        found = check()

    assert [one.id for one in found] == ["txmsg.E001"] * 3
    assert all(one.hint for one in found)


def test_broken_settings_do_not_break_the_deployment_checks() -> None:
    with txmsg(RELAY={"LEASE": "60"}):
        assert check_deployment() == []


def test_naive_instants_are_an_error() -> None:
    with override_settings(USE_TZ=False):
        assert only(check()).id == "txmsg.E002"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafka://localhost", "known: amqp, amqps, celery, database, stomp, stomp+ssl"),
        ("amqp://localhost?heartbeet=1", "Did you mean 'heartbeat'?"),
        ("amqp://localhost?queue_type=stream", "it is quorum or classic"),
        ("amqp://localhost?declare=maybe", "it is yes or no"),
        ("amqp://localhost?ca=x.pem", "need an amqps:// URL"),
        ("database://nowhere", "no database 'nowhere'"),
        ("database://?lease=soon", "lease=soon"),
        ("database://?lease=inf", "lease=inf"),
        ("database://?poll=1e30", "poll=1e30"),
        ("stomp://localhost:port", "is not a host and port"),
        ("stomp://[::1", "an IPv6 address is not closed"),
        ("stomp://localhost?hartbeat=3", "Did you mean 'heartbeat'?"),
        ("stomp+ssl://localhost?ca=/no/such/file", "No such file"),
    ],
)
def test_a_broker_url_that_cannot_be_used_is_an_error(url: str, said: str) -> None:
    with broker(url):
        found = only(check())

    assert found.id == "txmsg.E003"
    assert said in found.msg


WITHOUT_STOMP = """
import sys
sys.modules["stomp"] = None
import django
django.setup()
from django_txmsg.brokers import get_broker
from django_txmsg.checks import check
from django_txmsg.errors import ConfigurationError
for found in check():
    print(found.id, found.hint)
try:
    get_broker()
except ConfigurationError as error:
    print(error)
"""


def test_missing_extra_names_its_install_command() -> None:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TXMSG_TEST_BROKER_URL": ACTIVEMQ,
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_STOMP],
        cwd=DOCS.parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )

    checked, raised = done.stdout.splitlines()
    assert checked == 'txmsg.E004 Run: pip install "django_txmsg[stomp]"', done.stderr
    assert raised.endswith('Run: pip install "django_txmsg[stomp]"')


@pytest.mark.parametrize("name", ["TRANSACTION_DEFINITION", "MASK"])
@pytest.mark.parametrize(
    "path", ["no.such.module", "tests.settings.DATABASES", "nothing"]
)
def test_a_dotted_path_that_leads_nowhere_is_an_error(name: str, path: str) -> None:
    with txmsg(**{name: path}):
        found = only(check())

    assert found.id == "txmsg.E005"
    assert repr(path) in found.msg


@pytest.mark.parametrize("path", ["os.path.join", "builtins.dict"])
def test_a_codec_that_is_no_codec_is_an_error(path: str) -> None:
    with txmsg(CODECS=[path]):
        found = only(check())

    assert found.id == "txmsg.E005"
    assert repr(path) in found.msg


def test_a_transaction_definition_that_fails_is_an_error() -> None:
    with (
        stage(name="tests.failing"),
        txmsg(TRANSACTION_DEFINITION="tests.unit.test_checks.not_a_definition"),
    ):
        found = only(check())

    assert found.id == "txmsg.E005"
    assert "'tests.failing': LookupError: no tenant" in found.msg


def test_stage_with_an_unknown_database_is_an_error() -> None:
    with stage(name="tests.lost", using="archive"), txmsg():
        found = only(check())

    assert found.id == "txmsg.E006"
    assert "stage 'tests.lost' uses the database 'archive'" in found.msg


def test_error_of_a_database_hides_no_error_of_a_stage() -> None:
    with (
        stage(name="tests.lost", using="archive"),
        stage(name="tests.elsewhere", broker="nowhere"),
        txmsg(),
    ):
        found = {one.id for one in check()}

    assert found == {"txmsg.E006", "txmsg.E008"}


def test_requests_with_an_unknown_database_are_an_error() -> None:
    with txmsg(HTTP={"USING": "archive"}):
        assert only(check()).id == "txmsg.E006"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (
            {"PIPELINE": {"DATABASES": ["other", "archive"]}},
            '["PIPELINE"]["DATABASES"]',
        ),
        (
            {"LAKE": {"URI": "file:///lake", "READER": "archive"}},
            '["LAKE"]["READER"]',
        ),
    ],
)
def test_a_pipeline_with_an_unknown_database_is_an_error(
    given: dict[str, Any], name: str
) -> None:
    with txmsg(**given):
        found = only(check())

    assert found.id == "txmsg.E006"
    assert f"{name} has 'archive', which is not in DATABASES" in found.msg


def test_a_database_of_another_vendor_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections["other"], "vendor", "mysql")
    path = "tests.unit.test_checks.postgresql_only"

    with stage(), txmsg(TRANSACTION_DEFINITION=path):
        found = only(check())

    assert found.id == "txmsg.E007"
    assert "'other', which is mysql" in found.msg


def test_the_embedded_broker_of_a_project_without_a_default_database_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A project without a default database has Django's dummy backend, whose vendor is
    "unknown". The check reports an embedded broker in such a database."""
    monkeypatch.setattr(connections["other"], "vendor", "unknown")
    with broker("database://other"):
        found = only(check())

    assert found.id == "txmsg.E003"
    assert "'other' is unknown" in found.msg


class Router:
    """Stores the package's rows in "other"."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_txmsg" else None


class OnlyThere(Router):
    """Also keeps the package's tables out of all other databases."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == "other" if app_label == "django_txmsg" else None


def routed(by: type[Router], **settings: Any) -> override_settings:
    return override_settings(
        DATABASE_ROUTERS=[by()], TXMSG={"SERVICE": "tests", **settings}
    )


def test_databases_without_our_tables_name_the_parts_that_use_them() -> None:
    with ExitStack() as entered:
        for number in range(7):
            entered.enter_context(stage(name=f"tests.many{number}"))
        entered.enter_context(stage(using="other"))
        entered.enter_context(routed(OnlyThere))
        found = [one for one in check() if one.id == "txmsg.E017"]

    (of_default,) = found
    assert "The database 'default' is used by" in of_default.msg
    assert "stage 'tests.many" in of_default.msg
    assert of_default.msg.count("stage ") + of_default.msg.count("flow ") == 5
    assert " more, but your routers forbid" in of_default.msg


@pytest.mark.parametrize("name", ["django_txmsg.middleware.OutboxMiddleware", None])
def test_requests_need_our_tables_only_with_the_middleware(name: str | None) -> None:
    installed = override_settings(MIDDLEWARE=[name] if name else [])
    with routed(OnlyThere), installed:
        found = [one for one in check() if 'TXMSG["HTTP"]["USING"]' in one.msg]

    assert [one.id for one in found] == (["txmsg.E017"] if name else [])


def test_parts_in_default_beside_the_routers_database_are_a_warning() -> None:
    middleware = ["django_txmsg.middleware.OutboxMiddleware"]
    with (
        override_settings(MIDDLEWARE=middleware),
        at_hand(Trip),
        stage(name="tests.implied"),
        stage(name="tests.chosen", using="default"),
        stage(name="tests.there", using="other"),
    ):
        with routed(Router):
            (found,) = [one for one in check() if one.id == "txmsg.W015"]
        with routed(Router, HTTP={"USING": "default"}):
            (later,) = [one for one in check() if one.id == "txmsg.W015"]

    assert 'TXMSG["HTTP"]["USING"]' in found.msg
    assert 'TXMSG["HTTP"]["USING"]' not in later.msg
    assert found.hint.endswith(
        "If you mean 'default', set using='default' of the stage, or "
        'TXMSG["HTTP"]["USING"]; for a flow, silence this check.'
    )
    for one in (found, later):
        assert "stage 'tests.implied'" in one.msg or " more is in" in one.msg
        assert "flow " in one.msg
        assert "tests.chosen" not in one.msg
        assert "tests.there" not in one.msg


def test_the_outbox_in_a_database_of_another_vendor_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "mysql")
    with txmsg():
        found = check()

    assert [one.id for one in found] == ["txmsg.E003", "txmsg.E007"]
    assert "the outbox uses the database 'default', which is mysql" in found[1].msg


def test_an_sqlite_without_returning_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))

    with stage(using="other"), txmsg():
        assert {one.id for one in check()} == {"txmsg.E007"}


def test_stage_with_an_unknown_broker_is_an_error() -> None:
    with stage(broker="backup"), txmsg():
        found = only(check())

    assert found.id == "txmsg.E008"
    assert found.hint == "Known here: default."


@pytest.mark.parametrize("url", [ACTIVEMQ, RABBITMQ, "database://"])
@pytest.mark.parametrize(
    ("to", "ids"), [("tests.placed", []), ("topic:tests.placed", ["txmsg.E009"])]
)
def test_broker_redelivery_is_for_queues(url: str, to: str, ids: list[str]) -> None:
    """The check refuses mode "broker" for a topic's stage, because a copy sent to the
    topic would reach the other subscribers too."""
    with stage(to=to, redelivery=RedeliveryPolicy(mode="broker")), broker(url):
        assert [one.id for one in check()] == ids


@pytest.mark.parametrize(
    ("url", "ids"),
    [(ACTIVEMQ, ["txmsg.W001"]), (RABBITMQ, []), ("database://", [])],
)
def test_a_topic_in_many_threads_is_a_warning_on_activemq(
    url: str, ids: list[str]
) -> None:
    with stage(to="topic:tests.placed", concurrency=4), broker(url):
        assert [one.id for one in check()] == ids


@pytest.mark.parametrize(
    ("url", "ids"),
    [
        ("amqp://rabbit", ["txmsg.E014"]), ("amqps://rabbit", ["txmsg.E014"]),
        (RABBITMQ, ["txmsg.E014"]), (ACTIVEMQ, []), ("database://", []),
    ],
)  # fmt: skip
def test_a_queue_that_rabbitmq_keeps_a_subscription_in_is_no_stage_s(
    url: str, ids: list[str]
) -> None:
    """RabbitMQ keeps a topic's subscription in a queue. The check refuses another stage
    that consumes this queue, because the topic's stage would lose half of its
    messages."""
    with (
        stage(to="topic:tests.placed", name="audit"),
        stage(to="topic:tests.placed", name="tests.audit"),
        stage(to="shop.audit", name="other"),
        override_settings(
            TXMSG={"SERVICE": "shop", "BROKERS": {"default": {"URL": url}}}
        ),
    ):
        assert [one.id for one in check()] == ids


@pytest.mark.parametrize(
    ("to", "ids"), [("tests.placed", []), ("topic:tests.placed", ["txmsg.E016"])]
)
def test_subscription_whose_name_is_too_long_is_an_error(
    to: str, ids: list[str]
) -> None:
    with stage(to=to, name="n" * 251), txmsg(SERVICE="shop"):
        assert [one.id for one in check()] == ids


def test_two_stages_of_one_queue_are_a_warning() -> None:
    with stage(to="tests.shared", name="tests.one"), txmsg():
        with stage(to="topic:tests.shared", name="tests.two"):
            assert check() == []
        with stage(to="tests.shared", name="tests.two"):
            found = only(check())

    assert found.id == "txmsg.W016"
    assert "'tests.one', 'tests.two' share the queue 'tests.shared'" in found.msg


@pytest.mark.parametrize(
    ("kept", "ids"),
    [
        ({"OUTBOX": 7, "INBOX": 6}, ["txmsg.W003"]),
        ({"OUTBOX": None, "INBOX": 365}, ["txmsg.W003"]),
        ({"OUTBOX": None, "INBOX": None}, []),
        ({"OUTBOX": 7, "INBOX": 7}, []),
    ],
)
def test_an_inbox_that_forgets_before_the_outbox_is_a_warning(
    kept: dict[str, Any], ids: list[str]
) -> None:
    with txmsg(RETENTION=kept):
        assert [one.id for one in check()] == ids


@pytest.mark.parametrize(
    ("kept", "longer"),
    [
        ({"FLOWS": 13}, "INBOX longer"),
        ({"FLOWS": 13, "OUTBOX": None, "INBOX": None}, "OUTBOX and INBOX longer"),
        ({"FLOWS": 14}, ""),
        ({"FLOWS": None, "INBOX": None}, ""),
    ],
)
def test_runs_that_are_pruned_before_their_messages_are_a_warning(
    kept: dict[str, Any], longer: str
) -> None:
    with txmsg(RETENTION=kept):
        assert check() == []
        with at_hand(Trip):
            found = [one for one in check() if one.id != "txmsg.W008"]

    assert [one.id for one in found] == ["txmsg.W012"] * bool(longer)
    assert all(longer in one.msg for one in found)


@pytest.mark.parametrize(
    ("kept", "within", "ids"),
    [
        ({"DEAD_LETTERS": 13}, 13, ["txmsg.W014"]),
        ({"DEAD_LETTERS": 14}, 14, []),
        ({}, 15, ["txmsg.W013"]),
        ({"INBOX": None, "FLOWS": None}, 15, []),
    ],
)
def test_rows_that_are_pruned_before_an_undo_needs_them_are_a_warning(
    kept: dict[str, Any], within: int, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trip._declaration, "within", dt.timedelta(days=within))
    undoing = stage(to=str(unbook), undoes=book)
    with txmsg(RETENTION=kept, EDIT_DEAD_LETTERS=True):
        assert check() == []
        with at_hand(Trip), stage(to=str(book)), undoing:
            found = [one.id for one in check() if one.id != "txmsg.W008"]
    assert found == ids


def test_an_inbox_that_forgets_before_the_last_attempt_is_a_warning() -> None:
    patient = RedeliveryPolicy(
        max_redeliveries=20, initial_delay=86_400, max_delay=86_400
    )

    with stage(redelivery=patient), txmsg():
        found = only(check())

    assert found.id == "txmsg.W004"
    assert "up to 23.0 days" in found.msg


def test_a_short_time_of_attempts_is_told_in_minutes() -> None:
    with stage(), txmsg(RETENTION={"INBOX": 0, "OUTBOX": 0}):
        found = only(check())

    assert found.id == "txmsg.W004"
    assert "up to 1.2 minutes, longer" in found.msg


@pytest.mark.parametrize(
    ("url", "ids"),
    [
        ("stomp://shop:long-secret@mq.example:61613", ["txmsg.W101"]),
        ("stomp://shop:long-secret@localhost,10.0.0.7", ["txmsg.W101"]),
        ("stomp://shop:long-secret@localhost", []),
        ("stomp://shop:long-secret@[::1]:61613,127.0.0.1", []),
        ("stomp+ssl://shop:long-secret@mq.example", []),
        ("stomp+ssl://guest:guest@mq.example", ["txmsg.W102"]),
        ("stomp+ssl://shop:shop@mq.example", ["txmsg.W102"]),
        ("stomp+ssl://admin@mq.example", ["txmsg.W102"]),
        ("database://", []),
    ],
)
def test_plain_text_and_guessed_passwords_are_warnings_of_a_deployment(
    url: str, ids: list[str]
) -> None:
    with broker(url):
        found = check_deployment()
        everyday = check()

    assert [one.id for one in found] == ids
    assert everyday == []
    assert not any("long-secret" in str(one) for one in found)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [("TIME_ZONE", "Europe/Berlin", "txmsg.E010"), ("AUTOCOMMIT", False, "txmsg.E011")],
)
def test_forbidden_option_of_a_database_is_an_error(
    option: str, value: object, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = connections["default"].settings_dict
    monkeypatch.setitem(options, option, value)
    # Whatever an engine is called that is made of Django's.
    monkeypatch.setitem(options, "ENGINE", "django.contrib.gis.db.backends.spatialite")
    monkeypatch.setattr(connections["default"], "vendor", "sqlite")
    with txmsg():
        assert only(check()).id == error


def test_a_time_zone_on_sqlite_shifts_what_is_due(tmp_path: Path) -> None:
    """With a TIME_ZONE on SQLite, due times and claims use different time zones. With
    Tokyo's, the due time of a new message is nine hours in the past. So a check refuses
    the setting."""
    program = """
import datetime as dt, django
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3",
        "NAME": "%s", "TIME_ZONE": "Asia/Tokyo"}},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth",
        "django_txmsg"],
    USE_TZ=True, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField", SECRET_KEY="x",
    TXMSG={"DISPATCH_ON_COMMIT": "off"},
)
django.setup()
from django.core.management import call_command
from django.utils import timezone
call_command("migrate", verbosity=0)
from django.db import transaction
from django_txmsg import send_message
from django_txmsg.models import OutboxMessage
with transaction.atomic():
    send_message("tests.q", 1)
row = OutboxMessage.objects.get()
print(round((timezone.now() - row.due_at).total_seconds() / 3600))
""" % (tmp_path / "db.sqlite3")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["9"]


def test_a_service_without_a_name_is_a_warning_of_a_deployment() -> None:
    with override_settings(TXMSG={}):
        assert only(check_deployment()).id == "txmsg.W103"


def test_sqlite_without_a_lock_at_the_begin_is_a_warning_of_a_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(
        connections["other"].settings_dict["OPTIONS"], "transaction_mode"
    )

    with txmsg():
        found = only(check_deployment())

    assert found.id == "txmsg.W104"
    assert "'other'" in found.msg


def test_control_messages_without_a_receiver_are_a_warning_of_a_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    middleware = [OWN_MIDDLEWARE]
    with txmsg(), override_settings(MIDDLEWARE=middleware):
        monkeypatch.setattr("django_txmsg.stages._stages", {"mails": object()})
        with_stages = check_deployment()
        monkeypatch.setattr("django_txmsg.stages._stages", {})
        found = only(check_deployment())
    with txmsg(), override_settings(MIDDLEWARE=[]):
        without_middleware = check_deployment()
    off = {"CONTROL_MESSAGE": "off"}
    with txmsg(HTTP=off), override_settings(MIDDLEWARE=middleware):
        switched_off = check_deployment()

    assert found.id == "txmsg.W105"
    assert [with_stages, without_middleware, switched_off] == [[], [], []]


@pytest.mark.parametrize(
    ("given", "id"),
    [
        ({"DISPATCH_ON_COMMIT": "inline"}, "txmsg.W106"),
        ({"REQUIRE_ATOMIC": False}, "txmsg.W107"),
    ],
)
def test_settings_of_tests_are_a_warning_of_a_deployment(
    given: dict[str, Any], id: str
) -> None:
    with txmsg(**given):
        assert only(check_deployment()).id == id
        assert check() == []


def test_the_middleware_twice_is_a_warning_of_a_deployment() -> None:
    middleware = ["django_txmsg.middleware.OutboxMiddleware", OWN_MIDDLEWARE]
    with (
        txmsg(HTTP={"CONTROL_MESSAGE": "off"}),
        override_settings(MIDDLEWARE=middleware),
    ):
        assert only(check_deployment()).id == "txmsg.W108"


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("stomp://shop:secret@localhost:5672", "amqp://HOST:5672"),
        ("stomp+ssl://shop:secret@localhost:61614,localhost:5671", "amqps://HOST:5671"),
        ("amqp://shop:secret@localhost:61613/shop", "stomp://HOST:61613"),
        ("amqps://shop:secret@localhost:61614?heartbeat=5", "stomp+ssl://HOST:61614"),
        ("stomp://shop:secret@[::1]:61616", "stomp://HOST:61613"),
        ("stomp://shop:5672@localhost:61613", None),
        ("amqps://shop:secret@localhost:5672", None),
        ("AMQP://shop:secret@localhost:5672", None),
        ("database://?lease=5672", None),
    ],
)
def test_a_port_of_another_protocol_is_a_warning(url: str, right: str | None) -> None:
    with txmsg(BROKERS={"default": {"URL": url}}):
        found = check()

    if right is None:
        assert found == []
    else:
        assert only(found).id == "txmsg.W009"
        assert right in str(only(found).hint)


def test_an_unknown_scheme_is_one_error_whatever_its_port() -> None:
    with txmsg(BROKERS={"default": {"URL": "rabbitmq://shop:secret@localhost:5672"}}):
        assert only(check()).id == "txmsg.E003"


@pytest.mark.parametrize("name", ["TXMSGS", "DJANGO_TXMSG", "TX_MSG"])
def test_settings_under_another_name_are_a_warning(name: str) -> None:
    with override_settings(**{name: {"SERVICE": "shop"}}):
        assert check() == []
        del settings.TXMSG
        assert only(check()).id == "txmsg.W010"


@pytest.mark.parametrize("name", ["IDEMPOTENCY", "ROLLBACK_ON_4XX"])
def test_what_the_middleware_does_is_not_asked_for_without_it(name: str) -> None:
    with txmsg(HTTP={name: True}), override_settings(MIDDLEWARE=["gone.Away"]):
        found = only(check())

    assert found.id == "txmsg.W011"
    assert name in found.msg
    for middleware in ("django_txmsg.middleware.OutboxMiddleware", OWN_MIDDLEWARE):
        with txmsg(HTTP={name: True}), override_settings(MIDDLEWARE=[middleware]):
            assert check() == []


def test_a_key_of_a_section_at_the_top_is_sent_to_its_section() -> None:
    with txmsg(IDEMPOTENCY=True):
        assert '"HTTP": {"IDEMPOTENCY": …}' in str(only(check()).hint)


def test_a_duration_is_asked_for_in_seconds() -> None:
    with txmsg(RELAY={"LEASE": dt.timedelta(minutes=1)}):
        found = only(check())

    assert found.msg.endswith("must be a number, not timedelta.")
    assert found.hint == "Give 60, in seconds."


def test_the_deployment_checks_run_under_deploy_only() -> None:
    written = io.StringIO()
    with override_settings(TXMSG={}):
        call_command("check", "--tag", "txmsg", stdout=written, stderr=written)
        assert "W103" not in written.getvalue()
        call_command(
            "check", "--tag", "txmsg", "--deploy", stdout=written, stderr=written
        )

    assert "txmsg.W103" in written.getvalue()


MIDDLEWARES = "tests.integration.test_stage_middleware."


def test_a_middleware_that_cannot_be_made_is_an_error() -> None:
    for name, said in [
        ("no_such", "ImportError"),
        ("asynchronous", "asynchronous"),
        ("nothing", "cannot be called"),
    ]:
        with stage(), txmsg(STAGE_MIDDLEWARE=[MIDDLEWARES + name]):
            found = only(check())
        assert found.id == "txmsg.E005"
        assert said in found.msg
    # `migrate` makes this check too, and has to make the table first.
    with stage(), txmsg(STAGE_MIDDLEWARE=[MIDDLEWARES + "asking"]):
        assert check() == []


def test_a_batch_broken_up_by_a_middleware_is_a_warning() -> None:
    for names, ids in [
        (["Inside"], []),
        (["Inside", "Around"], ["txmsg.W007"]),
        (["unused"], []),
    ]:
        paths = [MIDDLEWARES + name for name in names]
        with stage(batch=10), txmsg(STAGE_MIDDLEWARE=paths):
            assert [one.id for one in check()] == ids
        with stage(), txmsg(STAGE_MIDDLEWARE=paths):
            assert check() == []


def typed(body: dict[str, int]) -> None: ...


def test_a_contract_in_the_working_directory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with stage():
        assert check() == []
        (tmp_path / "asyncapi.json").write_text('{"asyncapi": "3.0.0"}')
        with txmsg():
            found = only(check())
        assert found.id == "txmsg.W008"
        assert str(tmp_path) in found.msg
        with txmsg(CONTRACT="asyncapi.json"):
            assert check() == []
        with txmsg(), override_settings(BASE_DIR=tmp_path):
            assert check() == []
    (tmp_path / "asyncapi.json").unlink()
    with declared(typed), txmsg():
        assert only(check()).id == "txmsg.W008"


@pytest.mark.parametrize("content", ["<<<<<<< HEAD", "[]", "{}"])
def test_an_invalid_contract_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "asyncapi.json"
    with txmsg(CONTRACT=str(file)):
        assert check() == []
        file.write_text(content)

        found = only(check())

    assert found.id == "txmsg.E015"
    assert str(file) in found.msg


def test_every_check_is_documented() -> None:
    package = DOCS.parents[2] / "django_txmsg"
    files = [*package.glob("checks/*.py"), package / "tasks_backend/__init__.py"]
    source = "".join(path.read_text() for path in files)
    ids = {part[:10] for part in source.split('"') if part.startswith("txmsg.")}
    page = DOCS.read_text()

    assert len(ids) > 15
    assert ids == {row.split("`")[1] for row in page.splitlines() if row[:3] == "| `"}


def test_small_pool_warns_with_the_needed_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"pool": True, "transaction_mode": "IMMEDIATE", "timeout": 20}
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
    with (
        broker(RABBITMQ),
        declared(lambda _: None, concurrency=6),
        declared(lambda _: None, using="other", broker="default"),
    ):
        consume, relay = (one for one in check() if one.id == "txmsg.W005")
        # main, bulk, leases, control, 6 threads, dispatcher; 4 lanes, leases, heart,
        # charts, recurring messages
        assert "consume` uses up to 11 at a time" in consume.msg
        assert "relay` uses up to 8 at a time" in relay.msg
        # both, with one thread for the leases, and pruning instead of charts
        assert "18 where `txmsg run` does" in str(relay.hint)
        options["pool"] = {"max_size": 11}
        assert not [one for one in check() if one.id == "txmsg.W005"]


def test_flows_and_alerts_need_connections_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        connections["default"].settings_dict,
        "OPTIONS",
        {"pool": {"max_size": 9}, "transaction_mode": "IMMEDIATE", "timeout": 20},
    )
    with at_hand(Trip), txmsg(ALERTS={"KINDS": ["dead"]}):
        (relay,) = (one for one in check() if "`manage.py relay`" in one.msg)
    # The same as without them (8), time-outs, and alerts.
    assert "relay` uses up to 10 at a time" in relay.msg


def test_lake_without_the_pipelines_app_is_an_error() -> None:
    apps = [one for one in settings.INSTALLED_APPS if one != "django_txmsg.spark"]
    with txmsg(LAKE="file:///var/lake"):
        assert check() == []
        with override_settings(INSTALLED_APPS=apps):
            found = only(check())

    assert found.id == "txmsg.E013"
    assert '"django_txmsg.spark" to INSTALLED_APPS' in str(found.hint)
