"""`ask()` and `aask()`, which start a flow and wait for its answer."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.models import Model, QuerySet
from django.http.response import HttpResponseBase
from django.test import Client, override_settings
from django.urls import path
from django.views import View

from django_txmsg import Message, outbox_session, stages
from django_txmsg.errors import FlowError
from django_txmsg.flows import (
    AlreadyRunning,
    Cancelled,
    Flow,
    FlowView,
    Next,
    aask,
    ask,
    cancel,
    start,
    step,
)
from django_txmsg.flows.starting import ended
from django_txmsg.models import OutboxMessage, Run
from django_txmsg.testing import drain
from tests.running import committing, declared, send, ship
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@dataclass
class Question:
    text: str


@dataclass
class Answer:
    text: str


@shelved
class Oracle(Flow[Question, Answer | Cancelled | None], name="oracle", within=None):
    @step
    def start(self, question: Question) -> Next[Answer | Cancelled | None]:
        if question.text == "wait":
            return self.wait(then=self.told)
        if question.text == "other":
            return self.hand_over(Oracle, Question("who?"))
        return Answer(f"{question.text} 42")

    @step
    def told(self, text: str) -> Next[Answer | Cancelled | None]:
        return Answer(text)


class Guarded(View):
    """A mixin that overrides dispatch(), like LoginRequiredMixin."""

    def dispatch(self, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return super().dispatch(*args, **kwargs)


class OracleView(Guarded, FlowView):
    flow = Oracle

    def runs(self) -> QuerySet[Run]:
        assert not any(one.in_atomic_block for one in connections.all())
        return super().runs()


urlpatterns = [path("oracle/<uuid:run_id>/", OracleView.as_view())]


@pytest.fixture(autouse=True)
def oracle() -> Iterator[None]:
    with at_hand(Oracle):
        yield


@pytest.fixture
def working() -> Iterator[None]:
    """Until the test ends, relay and process messages in a thread, and cancel runs that
    wait for resume()."""
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.wait(0.05):
                ship()
                take(stages.find(["oracle"])[0])
                for run in Run.objects.filter(waits_for="resume"):
                    with transaction.atomic():
                        cancel(run, "no word")
                    ship()
                    take(stages.find(["oracle.steps"])[0])
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join(120)


@pytest.mark.usefixtures("working")
@pytest.mark.parametrize("is_async", [False, True])
def test_the_answer_comes_to_who_asks(is_async: bool) -> None:
    asking = async_to_sync(aask) if is_async else ask
    for question, answer in (
        ("what?", Answer("what? 42")),
        ("other", Answer("who? 42")),
        ("wait", Cancelled("no word")),
    ):
        assert asking(Oracle, Question(question), within=100) == answer


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_continues_after_ask_has_timed_out(is_async: bool) -> None:
    asking = async_to_sync(aask) if is_async else ask
    with pytest.raises(TimeoutError, match="goes on") as late:
        asking(Oracle, Question("what?"), within=dt.timedelta(milliseconds=50), key="1")
    with pytest.raises(AlreadyRunning):
        ask(Oracle, Question("what?"), within=0.01, key="1")
    drain()
    run = Run.objects.get()
    assert run.run_id == late.value.run_id  # type: ignore[attr-defined]
    assert run.answer == '{"text":"what? 42"}'


def test_ask_is_refused_inside_a_transaction() -> None:
    with transaction.atomic(), pytest.raises(FlowError, match="an open transaction"):
        ask(Oracle, Question("what?"), within=60)
    with outbox_session(), pytest.raises(FlowError, match="an outbox session"):
        ask(Oracle, Question("what?"), within=60)
    errors: list[str] = []

    def impatient(message: Message) -> None:
        with pytest.raises(FlowError) as refused:
            ask(Oracle, Question("what?"), within=60)
        errors.append(str(refused.value))

    for mode in ("outbox", "none"):
        with declared(impatient, "oracle.asked", transaction=mode) as stage:
            send("oracle.asked")
            take(stage)
    assert ["stage 'oracle.asked'" in one for one in errors] == [True, True]
    assert not Run.objects.exists()
    assert not OutboxMessage.objects.filter(destination="oracle").exists()


def asked(question: str) -> Run:
    with transaction.atomic():
        return start(Oracle, Question(question), key=question)


def test_a_view_tells_how_a_run_stands(client: Client) -> None:
    waiting, handed_over = asked("wait"), asked("other")
    drain()
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]):
        for query in ("", "?wait=0.1", "?wait=-1"):
            assert client.get(f"/oracle/{waiting.run_id}/{query}").json() == {
                "run_id": str(waiting.run_id),
                "key": "wait",
                "step": "told",
                "waits_for": "resume",
                "outcome": "",
                "answer": None,
                "answer_type": None,
            }
        over = client.get(f"/oracle/{handed_over.run_id}/").json()
        assert (over["outcome"], over["answer"]) == ("answered", {"text": "who? 42"})
        assert over["answer_type"] == "tests.Answer;v=1;min=1"
        assert client.get(f"/oracle/{waiting.run_id}/?wait=long").status_code == 400
        assert client.get(f"/oracle/{uuid.uuid4()}/").status_code == 404
        assert client.post(f"/oracle/{waiting.run_id}/").status_code == 405


def test_run_ends_if_it_is_cancelled_before_the_other_flow_begins() -> None:
    run = asked("other")
    ship()
    take(stages.find(["oracle"])[0])
    with transaction.atomic():
        cancel(run, "stop")
    for _ in range(2):
        ship()
        take(stages.find(["oracle.steps"])[0])
    drain()
    last = ended(run)
    assert last is not None
    assert (last.outcome, last.answer) == ("failed", '{"why":"stop"}')


class Replica:
    """A database router that reads from a replica, which lags behind."""

    def db_for_read(self, model: type[Model], **hints: object) -> str:
        return "other"

    def db_for_write(self, model: type[Model], **hints: object) -> str:
        return "default"


@pytest.mark.usefixtures("working")
@override_settings(
    ROOT_URLCONF=__name__, MIDDLEWARE=[], DATABASE_ROUTERS=[f"{__name__}.Replica"]
)
def test_an_answer_is_not_read_from_a_replica(client: Client) -> None:
    assert ask(Oracle, Question("what?"), within=100) == Answer("what? 42")
    run = asked("other")
    found = client.get(f"/oracle/{run.run_id}/?wait=30").json()
    assert found["answer"] == {"text": "who? 42"}


@pytest.mark.usefixtures("working")
@override_settings(
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["django_txmsg.middleware.OutboxMiddleware"],
)
def test_a_view_waits_for_the_end_in_no_transaction(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in connections.all():
        monkeypatch.setitem(one.settings_dict, "ATOMIC_REQUESTS", True)
    run = asked("what?")
    found = client.get(f"/oracle/{run.run_id}/?wait=30").json()
    assert found["answer"] == {"text": "what? 42"}
