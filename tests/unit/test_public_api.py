"""The names that users write. If a name is removed or renamed, a user's code or alarm
breaks. So the changelog must mention it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import django_txmsg
from django_txmsg import (
    Message,
    RedeliveryPolicy,
    every,
    send_message,
    send_messages,
    stage,
)
from tests.docs.pages import PAGES, ROOT, blocks

NAMES = [
    "Destination",
    "Message",
    "Redeliver",
    "RedeliveryPolicy",
    "Refuse",
    "cancel_message",
    "every",
    "make_recurring",
    "message_type",
    "no_outbox",
    "outbox_session",
    "remove_recurring",
    "reschedule_message",
    "send_message",
    "send_messages",
    "stage",
    "upgrade",
]

PUBLIC = {
    "django_txmsg": """
        Destination Message Redeliver RedeliveryPolicy Refuse __version__
        cancel_message every make_recurring message_type no_outbox outbox_session
        remove_recurring reschedule_message send_message send_messages stage upgrade
        conf jms metrics signals wire
    """,
    "django_txmsg.brokers": """
        Broker Delivery Outgoing Session find_broker get_broker make_broker
    """,
    "django_txmsg.celery": "Celery OnceTask TransactionalTask",
    "django_txmsg.codecs": "Codec Misfit",
    "django_txmsg.conf": "get problems",
    "django_txmsg.errors": """
        AlreadyPending
        BlockLeftOpen BrokerError BrokerUnavailable CommitTimedOut ConfigurationError
        DecodeError DeliveryLost DestinationUnavailable DispatchHeld DispatchRejected
        DispatchUnknown DuplicateMessage DurableInStage InvalidMessage MiddlewareMisused
        NewerCodeNeeded Redeliver Refuse SessionError StageError StageStopped
        StageTimedOut AlreadyResumed AlreadyRunning FlowError StoreError
        SwallowedDatabaseError TaskGivenUp TransactionRequired TxmsgError WorkerFailed
    """,
    "django_txmsg.flows": """
        AlreadyResumed AlreadyRunning Answers Ask BatchEnded Cancelled Dead Fail Flow
        FlowView Gather HandOver Later Next Request Sleep TimedOut Wait aask ask batch
        cancel resume signal start step
    """,
    "django_txmsg.health": "health",
    "django_txmsg.jms": """
        AckMode CompletionFuture CompletionListener Connection ConnectionFactory
        ConnectionFailedError ConnectionLostError Context ContextProducer Delivery
        DeliveryMode Destination IllegalStateError InvalidDestinationError Message
        MessageConsumer MessageFormatError MessageNotAccessibleError MessageProducer
        MessagingError Options Policy Queue RequestRejectedError RequestTimeoutError
        SendHeldBackError SendOutcomeUnknownError SendRejectedError SendTimeoutError
        Session Topic TransactionInDoubtError TransactionRolledBackError
        UnsupportedOperationError WindowFullError
    """,
    "django_txmsg.metrics": "Collector install metrics uninstall",
    "django_txmsg.middleware": "OutboxMiddleware no_outbox",
    "django_txmsg.models": """
        Alert Attempt AuditEntry Batch Branch BulkOperation DatabaseIdentity DeadLetter
        FailureNote FlowStep FlowUndo IdempotencyKey InboxMessage KeyTail OutboxMessage
        PeriodCount QueueMessage QueueSubscription RateLine Run Schedule SessionRecord
        StageState StopRequest TaskRun Worker
    """,
    "django_txmsg.signals": """
        control_message_handled control_message_sent dangerous_window lease_lost
        message_buried message_dispatched message_duplicate message_processed
        flow_ended flow_late message_redelivered message_stored messages_committed
        outcome_unknown session_ended
    """,
    "django_txmsg.spark": "register",
    "django_txmsg.spark.cli": "main",
    "django_txmsg.spark.models": (
        "ArchiveMark Finding PipelineAlert PipelineRun StagedMessage StoredRun"
    ),
    "django_txmsg.spark.source.snapshot": "snapshot",
    "django_txmsg.stages": "CallNext Stage TransactionDefinition stage",
    "django_txmsg.tasks": "prune_messages relay_outbox",
    "django_txmsg.tasks_backend": "TransactionalBackend",
    "django_txmsg.testing": """
        ARTEMIS CLASSIC RABBITMQ Drained Profile ReceivedFrame ScriptedBroker answers
        drain
        embedded outbox_messages
    """,
    "django_txmsg.testing.broker_suite": "SOON BrokerSuite bodies take",
    "django_txmsg.tracing": "install uninstall",
    "django_txmsg.urls": "app_name urlpatterns",
    "django_txmsg.wire": """
        CONTENT_LENGTH CONTENT_TYPE CORRELATION_ID CREATED EXPIRES FAILED_ATTEMPT KEY
        FLOW HOP MESSAGE_ID PERSISTENT PROP REPLY_TO SERVICE TICKET TRACEPARENT TYPE
        UNDOES
    """,
}

LOGGERS = {
    "django_txmsg.alerts",
    "django_txmsg.arrival",
    "django_txmsg.audit",
    "django_txmsg.breaker",
    "django_txmsg.brokers.database",
    "django_txmsg.bulk",
    "django_txmsg.celery",
    "django_txmsg.codecs",
    "django_txmsg.consumer",
    "django_txmsg.control",
    "django_txmsg.control_thread",
    "django_txmsg.deadline",
    "django_txmsg.demarcation",
    "django_txmsg.dispatcher",
    "django_txmsg.flows",
    "django_txmsg.inbox",
    "django_txmsg.intake",
    "django_txmsg.jms.callbacks",
    "django_txmsg.jms.consumer",
    "django_txmsg.jms.link",
    "django_txmsg.jms.pool",
    "django_txmsg.jms.sends",
    "django_txmsg.jms.session",
    "django_txmsg.leases",
    "django_txmsg.masking",
    "django_txmsg.messages",
    "django_txmsg.middleware",
    "django_txmsg.notify",
    "django_txmsg.outage",
    "django_txmsg.pending",
    "django_txmsg.pruning",
    "django_txmsg.rates",
    "django_txmsg.relay",
    "django_txmsg.session",
    "django_txmsg.stage_middleware",
    "django_txmsg.stage_thread",
    "django_txmsg.storing",
    "django_txmsg.supervisor",
    "django_txmsg.tasks",
    "django_txmsg.testing.peer",
    "django_txmsg.threads",
    "django_txmsg.throttle",
    "django_txmsg.timekeeper",
}

PACKAGE = Path(django_txmsg.__file__).parent


def test_the_public_names_are_these() -> None:
    assert sorted(django_txmsg.__all__) == NAMES
    for name in NAMES:
        assert getattr(django_txmsg, name) is not None
        assert name in dir(django_txmsg)


def test_send_message_takes_the_contract_s_arguments() -> None:
    names = list(inspect.signature(send_message).parameters)

    assert names[:2] == ["destination", "body"]
    assert set(names[2:]) >= {
        "headers", "message_id", "key", "delay", "expires", "using", "broker",
    }  # fmt: skip
    assert set(inspect.signature(send_messages).parameters) >= {"using", "broker"}


def test_every_takes_the_contract_s_arguments() -> None:
    names = list(inspect.signature(every).parameters)

    assert names[:3] == ["expression", "destination", "body"]
    assert set(names[3:]) >= {"name", "tz", "missed"}


def test_stage_takes_the_contract_s_arguments() -> None:
    parameters = inspect.signature(stage).parameters

    assert set(parameters) >= {
        "destination", "name", "transaction", "redelivery", "isolation", "using",
        "concurrency", "broker", "batch", "timeout",
    }  # fmt: skip
    assert parameters["transaction"].default == "outbox"


def test_a_policy_has_the_contract_s_fields() -> None:
    policy = RedeliveryPolicy()

    assert policy.max_attempts == 7
    assert (policy.initial_delay, policy.backoff, policy.max_delay) == (1.0, 2.0, 300.0)
    assert (policy.jitter, policy.mode, policy.refuse_on) == (0.15, "non_blocking", ())


def test_a_message_has_the_contract_s_fields() -> None:
    assert set(Message.__slots__) >= {
        "id", "destination", "body", "headers", "key", "created_at",
        "delivery_attempt", "redelivered", "correlation_id",
    }  # fmt: skip


def test_importing_the_package_imports_no_django() -> None:
    code = (
        "import sys; sys.modules['django'] = None; import django_txmsg;"
        "import django_txmsg.wire, django_txmsg.jms, django_txmsg.envelope.message;"
        "from django_txmsg import Message, RedeliveryPolicy, Refuse; print('ok')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert result.stdout.strip() == "ok", result.stderr


@pytest.mark.parametrize("missing", ["stomp", "websocket"])
def test_without_stomp_py_the_import_of_the_client_says_what_to_install(
    missing: str,
) -> None:
    """If only a dependency of stomp.py is missing, the error names the dependency."""
    program = f"import sys; sys.modules[{missing!r}] = None; import django_txmsg.jms"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    says = {
        "stomp": 'Run: pip install "django_txmsg[stomp]"',
        "websocket": "import of websocket halted; None in sys.modules",
    }
    # Python 3.15 adds a guess to the last line.
    assert says[missing] in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_where_users_import_them(module: str) -> None:
    for name in PUBLIC[module].split():
        exec(f"from {module} import {name}", {})


def test_whatever_a_module_declares_public_is_listed() -> None:
    for module, names in PUBLIC.items():
        declared = set(getattr(import_module(module), "__all__", ()))
        assert declared <= set(names.split()), module


def test_the_documentation_imports_from_public_paths_only() -> None:
    unlisted = [
        (page.name, module, name)
        for page in PAGES
        for module, name in imported(page)
        if name not in PUBLIC.get(module, "").split()
    ]

    assert unlisted == []


def imported(page: Path) -> Iterator[tuple[str, str]]:
    """Yield a pair for each name that a page's Python code imports from the package:
    the module and the name."""
    for block in blocks(page):
        if block.language != "python" or not block.runs:
            continue
        for node in ast.walk(ast.parse(block.code)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.split(".")[0] == "django_txmsg":
                yield from ((module, one.name) for one in node.names)


def test_every_logger_has_a_name_that_alarms_may_be_set_on() -> None:
    unknown = [
        (path.relative_to(ROOT).as_posix(), ast.unparse(name))
        for path in PACKAGE.rglob("*.py")
        for name in loggers(path)
        if not (isinstance(name, ast.Constant) and name.value in LOGGERS)
    ]

    assert unknown == [], (
        "Name it in LOGGERS, and in the changelog when it replaces one"
    )


def loggers(path: Path) -> Iterator[ast.expr]:
    """Yield the names that a module passes to `logging.getLogger()`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and "getLogger" in ast.unparse(node.func):
            yield from node.args or [ast.Constant(None)]
