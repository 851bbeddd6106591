"""The checks refuse Celery settings with which a task could be lost or executed
twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery as PlainCelery
from celery.contrib.django.task import DjangoTask
from django.core.checks import CheckMessage
from django.test import override_settings
from kombu import Exchange, Queue
from kombu.entity import binding

from django_txmsg.brokers.celery_publication import Publication
from django_txmsg.celery import Celery, OnceTask
from django_txmsg.checks import check
from tests.celery_shop import app
from tests.running import declared

plain = PlainCelery("plain", set_as_current=False, broker="amqp://")
careless = Celery("careless", set_as_current=False, broker="amqp://")


@careless.task(base=OnceTask, acks_late=False, shared=False)
def lost() -> None:
    """A task that Celery acknowledges before executing it."""


retrying = Celery("retrying", set_as_current=False, broker="amqp://")
retrying.conf.task_retry_on_worker_lost = True


@retrying.task(base=OnceTask, shared=False)
def usual_once() -> None:
    """A task that has the options of OnceTask."""


@retrying.task(base=OnceTask, retry_on_worker_lost=True, shared=False)
def retried() -> None:
    """A task that Celery sends again, if its worker dies, until it fails."""


def nothing() -> None:
    """Do nothing."""


def through(path: str, alias: str = "celery") -> override_settings:
    brokers = {
        "default": {"URL": "database://"},
        alias: {"URL": f"celery://{path}"},
    }
    return override_settings(TXMSG={"SERVICE": "tests", "BROKERS": brokers})


def found() -> list[tuple[str, str]]:
    messages: list[CheckMessage] = check()
    # W008 is about the typed messages of other tests that this process has run.
    ours = [one for one in messages if one.id != "txmsg.W008"]
    return [(str(one.id), str(one.msg)) for one in ours]


@pytest.fixture
def usual() -> Iterator[None]:
    """Restore the app's settings after the test."""
    names = ("broker_url", "result_backend", "task_protocol", "task_always_eager")
    more = ("task_default_delivery_mode", "worker_deduplicate_successful_tasks")
    before = {name: app.conf[name] for name in (*names, *more, "accept_content")}
    yield
    app.conf.update(before)


def test_nothing_is_found_where_all_is_well() -> None:
    with through("tests.celery_shop:app"):
        assert found() == []


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("result_backend", "rpc://", "rpc://"),
        ("task_protocol", 1, "task_protocol"),
        ("broker_url", "memory://", "memory://"),
        ("task_default_delivery_mode", "transient", "transient"),
        ("worker_deduplicate_successful_tasks", True, "deduplicate"),
        ("accept_content", ["pickle"], "'json', which is not in accept_content"),
        ("accept_content", ["json", "jsn"], "does not know: No encoder/decoder "),
    ],
)
def test_a_setting_that_loses_tasks_is_an_error(
    name: str, value: Any, said: str
) -> None:
    app.conf.update({name: value})
    with through("tests.celery_shop:app"):
        ((code, message),) = found()

    assert code == "txmsg.E020"
    assert said in message


@pytest.mark.usefixtures("usual")
def test_a_project_s_tests_that_run_tasks_eagerly_need_no_broker() -> None:
    app.conf.update(broker_url="memory://", task_always_eager=True)
    with through("tests.celery_shop:app"):
        assert found() == []


def test_a_once_task_that_is_acknowledged_early_is_an_error() -> None:
    with through(f"{__name__}:careless"):
        ((code, message),) = found()

    assert (code, "acks_late=False" in message) == ("txmsg.E020", True)


def test_once_task_that_celery_retries_for_a_lost_worker_is_an_error() -> None:
    """The setting of the app does not apply to a OnceTask."""
    with through(f"{__name__}:retrying"):
        ((code, message),) = found()

    assert code == "txmsg.E020"
    assert "retried' has retry_on_worker_lost=True" in message


def test_a_task_that_its_workers_would_drop_is_an_error() -> None:
    global pickled
    pickled = Celery("pickled", set_as_current=False, broker="amqp://")
    pickled.task(serializer="pickle", name="pickled", shared=False)(nothing)
    with through(f"{__name__}:pickled"):
        ((code, message),) = found()

    assert (code, "'pickle', which is not" in message) == ("txmsg.E020", True)


def test_copies_may_be_dropped_if_there_is_no_once_task() -> None:
    global dropping
    dropping = Celery("dropping", set_as_current=False, broker="amqp://")
    dropping.tasks.clear()  # those of the tests' other apps, which Celery shares
    dropping.conf.worker_deduplicate_successful_tasks = True
    with through(f"{__name__}:dropping"):
        assert found() == []


def test_task_registered_later_logs_its_problems(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = Celery("late", set_as_current=False, broker="amqp://")
    late.task(base=OnceTask, acks_late=False, name="lost", shared=False)(nothing)
    late.task(base=OnceTask, name="kept", shared=False)(nothing)

    late.finalize()

    (said,) = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert said[0] == "ERROR"
    assert "'lost' has acks_late=False" in said[1]


def test_a_class_that_forgets_the_outbox_upon_commit_is_a_warning() -> None:
    global other
    other = Celery("other", set_as_current=False, broker="amqp://")
    other.task(base=DjangoTask, name="lossy", shared=False)(nothing)
    other.task(name="sound", shared=False)(nothing)
    with through(f"{__name__}:other"):
        ((code, message),) = found()

    assert (code, "of lossy is" in message) == ("txmsg.W020", True)


@pytest.mark.usefixtures("usual")
def test_chords_whose_tasks_the_database_counts_are_a_warning() -> None:
    app.conf.result_backend = "django-db"
    with through("tests.celery_shop:app"):
        ((code, message),) = found()

    assert (code, "django-db" in message) == ("txmsg.W021", True)


def test_an_app_whose_tasks_go_around_the_outbox_is_a_warning() -> None:
    with through(f"{__name__}:plain"):
        ((code, _),) = found()

    assert code == "txmsg.W020"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tests.nowhere:app", "ModuleNotFoundError"),
        ("tests.celery_shop:nobody", "AttributeError"),
        ("tests.celery_shop:step", "not a Celery app"),
    ],
)
def test_a_url_that_names_no_app_is_an_error(path: str, said: str) -> None:
    with through(path):
        ((code, message),) = found()

    assert code == "txmsg.E003"
    assert said in message


def test_a_stage_cannot_consume_tasks_nor_can_the_default_broker_be_celery_s() -> None:
    with (
        through("tests.celery_shop:app"),
        declared(lambda message: None, broker="celery"),
    ):
        assert [code for code, _ in found()] == ["txmsg.E021"]
    with through("tests.celery_shop:app", alias="default"):
        assert [code for code, _ in found()] == ["txmsg.E021"]


@pytest.mark.parametrize("missing", ["celery", "kombu"])
def test_without_celery_the_import_says_what_to_install(missing: str) -> None:
    """If only a dependency of Celery is missing, the error names the dependency."""
    program = f"import sys; sys.modules[{missing!r}] = None; import django_txmsg.celery"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )

    assert done.returncode == 1
    says = {
        "celery": 'Run: pip install "django_txmsg[celery]"',
        "kombu": "No module named 'kombu.utils'; 'kombu' is not a package",
    }
    assert done.stderr.rstrip().endswith(says[missing])


def test_an_app_is_made_before_django_s_models() -> None:
    program = (
        "from django_txmsg.celery import Celery, OnceTask\n"
        "app = Celery('early')\n"
        "app.task(base=OnceTask)(print)\n"
        "import django\n"
        "django.setup()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


def test_a_publication_is_read_as_it_was_written() -> None:
    exchange = Exchange("orders", type="topic", durable=False)
    queue = Queue(
        "orders.eu",
        exchange,
        routing_key="eu.#",
        max_priority=9,
        queue_arguments={"x-queue-type": "quorum"},
    )
    bound = Queue("orders.de", bindings=[binding(exchange, routing_key="de.#")])
    made = Publication.make(
        ((1,), {"b": 2}, {}),
        {
            "serializer": "json",
            "compression": "zlib",
            "headers": {"id": "1", "raw": b"\x00\xff"},
            "exchange": exchange,
            "routing_key": "eu.1",
            "declare": [queue, bound],
            "delivery_mode": None,
            "priority": 0,
            "retry": True,
        },
    )
    made.then.append(Publication.make({"type": "task-sent"}, {"serializer": "json"}))

    again = Publication.read(made.text(), made.body, made.content_type)

    assert again == made
    assert again.headers["compression"] == "application/x-gzip"
    assert again.properties == {"priority": 0, "delivery_mode": exchange.delivery_mode}
    assert again.entities() == [queue, bound]
    assert again.entities()[0].exchange == exchange
    (one,) = again.entities()[1].bindings
    assert (one.exchange, one.routing_key) == (exchange, "de.#")
