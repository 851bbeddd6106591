"""The pages of runs: the list, the diagram of a run, and the operator's five
actions."""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now
from django.test import Client, override_settings
from django.utils import timezone

from django_txmsg.admin import runs
from django_txmsg.dead_letters import bulk
from django_txmsg.flows.deadlines import Deadlines
from django_txmsg.models import AuditEntry, BulkOperation, FlowStep, FlowUndo, Run
from django_txmsg.models.run import Outcome, WaitsFor
from django_txmsg.testing import drain
from tests.running import IMPATIENT, txmsg
from tests.trips import Shop, trips, waiting

URL = "/admin/django_txmsg/run/"
ACTS = ("resume", "time-out", "cancel", "answer", "go-back")
RIGHTS = [f"{name.replace('-', '_')}_run" for name in ACTS]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("shop"),
]


@pytest.fixture
def shop() -> Iterator[None]:
    with txmsg(), trips():
        yield


@pytest.fixture
def operator(somebody: Callable[..., Client]) -> Client:
    """A user who may see runs and their states, and may use all five actions."""
    return somebody("view_run", "view_message_body", *RIGHTS)


def page_of(client: Client, run: Run) -> str:
    return client.get(f"{URL}{run.pk}/change/").content.decode()


def drawing_of(page: str) -> str:
    return page.partition('<svg class="txmsg-sequence"')[2].partition("</svg>")[0]


def act(client: Client, run: Run, name: str, **fields: Any) -> str:
    answer = client.post(f"{URL}{run.pk}/act/{name}/", fields, follow=True)
    return answer.content.decode() if answer.status_code == 200 else "refused"


def stored(**fields: Any) -> Run:
    run_id = uuid.uuid4()
    made: Run = Run.objects.create(
        **{
            "run_id": run_id, "first_run": run_id, "service": "tests",
            "flow": "acts.trip", "version": 1, "step": "paid", "turn": uuid.uuid4(),
            "state": json.dumps({"number": 1, "said": []}), "waits_for": "answer",
        } | fields
    )  # fmt: skip
    return made


def test_list_shows_and_finds_runs(operator: Client) -> None:
    run = stored(key="A-1", asked="acts.pay")
    stored(key="<b>A-2</b>", failing=True, waits_for="undo")
    stored(key="A-3", turn=None, waits_for="", outcome=Outcome.ANSWERED,
           ended_at="2026-01-01T00:00:00Z")  # fmt: skip

    page = operator.get(URL).content.decode()

    assert "an answer of acts.pay" in page
    assert "&lt;b&gt;A-2&lt;/b&gt;" in page
    assert "acts.trip (2 open)" in page
    assert ">Flows</a>" in page
    assert "said" not in page, "the flow's own state is for the page of the run"
    for query, keys in (
        ("?state=open", {"A-1", "A-2"}),
        ("?state=undoing", {"A-2"}),
        ("?state=undo+stuck", set()),
        ("?state=answered", {"A-3"}),
        ("?flow=acts.trip&step=paid&q=A-1", {"A-1"}),
        (f"?q={run.run_id}", {"A-1"}),
        ("?flow=other", set()),
    ):
        rows = operator.get(URL + query).content.decode()
        assert set(re.findall(r"A-\d", rows.partition("result_list")[2])) == keys, query


def test_deadline_passes_by_the_databases_clock(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = timezone.now()
    run = stored(due_at=now + dt.timedelta(minutes=5))
    monkeypatch.setattr(timezone, "now", lambda: now + dt.timedelta(hours=1))
    for page in (operator.get(URL).content.decode(), page_of(operator, run)):
        assert re.search(r">in (5 min|4 min 5\d s)</time>", page)
        assert not re.search(r">(1 h|59 min)[^<]*</time>", page)


def test_page_lists_the_newest_undos_and_says_which_are_still_to_do(
    operator: Client,
) -> None:
    run = stored(failing=True, waits_for="undo", undos=52, kept_undos=50)
    FlowUndo.objects.bulk_create(
        FlowUndo(run=run, number=one, destination="acts.unpay", body=b"1")
        for one in range(1, 53)
    )

    page = page_of(operator, run)

    assert re.findall(r"<dt>Undo (\d+)</dt>", page) == [*map(str, range(52, 2, -1))]
    assert "2 older ones are not listed." in page
    assert page.count("</code> to do") == 2
    assert page.count("if it fails") == 48


def test_page_shows_the_dead_request_and_that_there_was_nothing_to_undo(
    operator: Client, somebody: Callable[..., Client]
) -> None:
    Shop.error = ValueError("no money")
    run = waiting()
    Shop.error = None
    reader = somebody("view_run", "view_deadletter")

    dead = "dead letter</a>: ValueError: no money"
    assert dead in page_of(reader, run)
    assert dead not in page_of(operator, run)

    act(operator, run, "time-out")
    Deadlines(["default"])._keep("default")
    drain()
    page = page_of(reader, run)
    assert dead not in page
    assert page.count("had nothing to undo (request revoked)") == 1
    assert page.count("</code> done") == 1


def test_page_of_a_cancelled_run_shows_the_type_of_its_answer(operator: Client) -> None:
    run = waiting()
    assert "<dt>Answer</dt>" not in page_of(operator, run)
    act(operator, run, "cancel", why="closed")
    drain()
    fact = "<dt>Answer</dt><dd><code>txmsg.Cancelled;v=1;min=1</code></dd>"
    assert fact in page_of(operator, run)


def test_run_that_has_handed_over_can_be_cancelled_until_its_successor_has_ended(
    operator: Client,
) -> None:
    over = {"turn": None, "waits_for": "", "ended_at": Now()}
    run = stored(
        outcome=Outcome.HANDED_OVER, asked="acts.trip", request_id=uuid.uuid4(), **over
    )
    last = stored(run_id=run.request_id)
    page = page_of(operator, run)
    assert "Cancels the run to which this run has handed over." in page
    assert [name for name in ACTS if f"/act/{name}/" in page] == ["cancel"]
    Run.objects.filter(pk=last.pk).update(outcome=Outcome.ANSWERED, **over)
    assert "/act/" not in page_of(operator, run)


def test_a_run_is_drawn_with_the_difference_of_each_step(operator: Client) -> None:
    run = waiting()

    page = page_of(operator, run)

    drawing = drawing_of(page)
    assert re.findall(r'class="step"[^>]*>([^<]+)', drawing) == [
        "start",
        "booked",
        "paid",
    ]
    for text in (
        "asks acts.book",
        "answer of acts.book",
        "asks acts.pay",
        "waits for a person",
        "+ number: 1",
        "- said: [&quot;first&quot;]",
        "+ said: [&quot;first&quot;, &quot;first&quot;]",
    ):
        assert text in drawing, text
    assert "<script" not in drawing
    assert "style=" not in drawing
    assert "acts.unpay" in page
    assert run.turn is not None
    assert run.turn.hex not in page, "whoever has the turn can resume the run"


def test_nothing_of_a_run_is_unescaped(operator: Client) -> None:
    evil = "<script>alert(1)</script>&\"'"
    run = stored(key=evil, state=json.dumps({"number": 1, "said": [evil]}),
                 asked=evil[:200], correlation_id=evil)  # fmt: skip
    FlowStep.objects.create(
        run=run, step=evil, message_id=uuid.uuid4(), version=1,
        state=json.dumps({evil: evil}), then=f"answer {evil}",
    )  # fmt: skip
    FlowUndo.objects.create(run=run, number=1, destination=evil, body=b"")

    for page in (page_of(operator, run), operator.get(URL).content.decode()):
        assert "<script>alert" not in page
        assert "&lt;script&gt;" in page


def test_states_need_the_permission_for_bodies_and_are_masked(
    somebody: Callable[..., Client], operator: Client
) -> None:
    run = waiting()
    page = page_of(somebody("view_run"), run)
    assert "said" not in page
    assert "Can view message bodies" in page
    assert "What you may do" not in page

    with override_settings(TXMSG={**IMPATIENT, "MASK": "tests.admin.test_runs.mask"}):
        page = page_of(operator, run)
    assert "hidden" in page
    assert "- said: &quot;hidden&quot;" not in drawing_of(page)
    assert "first&quot;" not in page
    assert somebody("view_worker").get(f"{URL}{run.pk}/change/").status_code == 403


def mask(destination: str, headers: Any, body: Any) -> Any:
    assert destination == "acts.trip"
    return headers, dict.fromkeys(body, "hidden")


def test_the_acts_continue_a_run_and_are_audited(operator: Client) -> None:
    run = waiting()
    seen = run.since.isoformat()
    booked = FlowStep.objects.get(run=run, step="booked")

    said = act(operator, run, "go-back", to=booked.pk, seen=seen, why="<i>price</i>")
    assert "Sent back to step booked run" in said
    assert "&lt;i&gt;price&lt;/i&gt;" in said
    drain()
    assert Shop.did == ["book", "pay", "unpay", "pay"]
    said = act(operator, run, "cancel", seen=seen)
    assert f"run {run.run_id} has gone on" in said
    assert "bool" in act(operator, run, "resume", value='"yes"')
    act(operator, run, "resume", value="true")
    drain()

    run.refresh_from_db()
    assert run.outcome == Outcome.ANSWERED
    page = page_of(operator, run)
    assert "True [" in page
    assert "What you may do" not in page
    drawing = drawing_of(page)
    assert drawing.count(' class="left">') == 2
    assert "an operator" in drawing
    assert "undo by acts.unpay" in drawing
    texts = list(AuditEntry.objects.order_by("pk").values_list("text", flat=True))
    log = list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))
    assert texts == log
    assert [text.partition(" run ")[0] for text in texts] == [
        "Sent back to step booked",
        "Resumed",
    ]


@pytest.mark.parametrize(
    ("name", "turns"),
    [("time-out", False), ("answer", False), ("cancel", False), ("go-back", True)],
)
def test_each_act_needs_its_own_permission(
    somebody: Callable[..., Client], name: str, turns: bool
) -> None:
    run = stored(key="A-1")
    FlowStep.objects.create(
        run=run, step="start", message_id=uuid.uuid4(), version=1, state=run.state,
        then="answer acts.book",
    )  # fmt: skip
    right = f"{name.replace('-', '_')}_run"
    others = somebody("view_run", *(one for one in RIGHTS if one != right))
    fields = {"to": "start", "value": '{"number": 1}'}

    assert f"/act/{name}/" not in page_of(others, run)
    assert act(others, run, name, **fields) == "refused"
    assert act(somebody(right), run, name, **fields) == "refused"
    assert not AuditEntry.objects.exists()
    client = somebody("view_run", right)
    assert f"/act/{name}/" in page_of(client, run)
    assert client.get(f"{URL}{run.pk}/act/{name}/").status_code == 405
    act(client, run, name, **fields)
    assert AuditEntry.objects.count() == 1
    changed = Run.objects.get(pk=run.pk)
    assert (changed.waits_for == WaitsFor.ITSELF) == turns
    assert (changed.due_at is not None) == (name == "time-out")


def test_address_of_a_run_takes_the_run_id(operator: Client) -> None:
    run = stored(key="A-1")

    page = operator.get(f"{URL}{run.run_id}/", follow=True)

    assert page.context["run"] == run
    gone = operator.get(f"{URL}{uuid.uuid4()}/", follow=True)
    assert "There is no run" in gone.content.decode()


def test_unknown_runs_acts_and_flows_are_no_errors(operator: Client) -> None:
    run = stored(flow="gone.flow")
    assert "not declared here" in page_of(operator, run)
    assert (
        "There is no run of a flow 99"
        in operator.get(f"{URL}99/change/", follow=True).content.decode()
    )
    assert act(operator, run, "explode") == "refused"
    assert "is not declared in this process" in act(operator, run, "cancel")


def test_only_the_newest_steps_of_a_long_run_are_drawn(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_STEPS", 3)
    run = stored()
    for number in range(8):
        FlowStep.objects.create(
            run=run, step="paid", message_id=uuid.uuid4(), version=1,
            state=json.dumps({f"f{one}": number for one in range(20)}), then="time",
        )  # fmt: skip

    page = page_of(operator, run)

    assert "5 earlier steps are not drawn." in page
    assert page.count('class="step"') == 3
    assert "and 28 more lines" in page


def back(client: Client, path: str = "", **fields: Any) -> str:
    address = f"{URL}go-back/{path}"
    answer = (
        client.post(address, fields, follow=True) if fields else client.get(address)
    )
    return answer.content.decode() if answer.status_code == 200 else "refused"


WHICH = {"flow": "acts.trip", "step": "approved"}
QUERY = "?flow=acts.trip&step=approved"


def shown_by(page: str) -> str:
    found = re.search(r'name="shown" value="([^"]+)"', page)
    assert found, page
    return found[1]


def test_all_runs_that_match_go_back_in_a_bulk_operation(operator: Client) -> None:
    runs = [waiting(f"A-{number}") for number in range(3)]
    listed = operator.get(URL, WHICH).content.decode()
    assert f"go-back/{QUERY.replace('&', '&amp;')}" in listed
    assert "go-back/?" not in operator.get(URL).content.decode()
    question = back(operator, QUERY)
    assert "Send 3 runs back" in question

    page = back(
        operator, **WHICH, to="booked", shown=shown_by(question), rate="5", why="wrong"
    )

    assert "of 3 runs" in page
    operation = BulkOperation.objects.get()
    assert (operation.kind, operation.total, operation.rate) == ("go-back", 3, 5.0)
    assert operation.by.startswith("user-")
    assert "Send 3 runs back to step booked" in LogEntry.objects.get().change_message
    with override_settings(TXMSG={**IMPATIENT, "SERVICE": "other"}):
        assert bulk.work_batch("default") is None, "another service's"
        assert not bulk.running("default")
    assert bulk.finish(operation).done == 3
    Shop.by = "second"
    drain()
    for run in runs:
        run.refresh_from_db()
        assert (run.step, run.waits_for) == ("approved", WaitsFor.RESUME)
        assert json.loads(run.state)["said"] == ["first", "second"]
    assert Shop.did.count("unpay") == 3
    assert Shop.did.count("unbook") == 0


def test_run_that_cannot_go_back_is_skipped_with_the_reason(operator: Client) -> None:
    good, bad = waiting("A-1"), waiting("A-2")
    FlowStep.objects.filter(run=bad).delete()

    back(operator, **WHICH, to="booked", shown=shown_by(back(operator, QUERY)))

    done = bulk.finish(BulkOperation.objects.get())
    assert (done.done, done.skipped) == (1, 1)
    page = operator.get(f"/admin/django_txmsg/bulkoperation/{done.pk}/change/")
    assert f"{URL}{bad.pk}/change/" in page.content.decode()
    assert "cannot go back to step" in page.content.decode()
    good.refresh_from_db()
    assert good.failing


def test_runs_that_went_on_since_the_page_was_opened_are_not_sent_back(
    operator: Client,
) -> None:
    waiting("A-1")
    gone = waiting("A-2")
    token = shown_by(back(operator, QUERY))
    act(operator, gone, "cancel")
    drain()

    page = back(operator, **WHICH, to="booked", shown=token)

    assert (
        "Nothing is done yet: 1 of the 2 that you were shown have changed since" in page
    )
    assert "Send 1 run back" in page
    assert not BulkOperation.objects.exists()


def test_a_run_that_reaches_the_step_after_the_page_is_not_sent_back(
    operator: Client,
) -> None:
    late, shown = waiting("A-1"), waiting("A-2")
    act(operator, late, "go-back", to="booked")
    token = shown_by(back(operator, QUERY))
    back(operator, **WHICH, to="booked", shown=token, rate="5")

    drain()
    done = bulk.finish(BulkOperation.objects.get())

    assert (done.total, done.done) == (1, 1)
    late.refresh_from_db()
    shown.refresh_from_db()
    assert (late.step, late.failing, shown.failing) == ("approved", False, True)


def test_as_many_other_runs_at_the_step_ask_for_confirmation_again(
    operator: Client,
) -> None:
    other, shown = waiting("A-1"), waiting("A-2")
    act(operator, other, "go-back", to="booked")
    token = shown_by(back(operator, QUERY))
    act(operator, shown, "cancel")
    drain()

    page = back(operator, **WHICH, to="booked", shown=token)

    assert ": 1 of the 1 that you were shown have changed since" in page
    assert not BulkOperation.objects.exists()


def test_going_back_in_bulk_needs_the_permission(
    somebody: Callable[..., Client],
) -> None:
    waiting()
    viewer = somebody("view_run")

    assert back(viewer, QUERY) == "refused"
    assert back(viewer, **WHICH, to="booked", shown="1.1.x") == "refused"
    assert "go-back/?" not in viewer.get(URL, WHICH).content.decode()


@pytest.mark.parametrize(
    "wrong", [{"to": "nowhere"}, {"rate": "-1"}, {"rate": "x"}, {"shown": "x"}]
)
def test_wrong_input_starts_nothing(operator: Client, wrong: dict[str, str]) -> None:
    waiting()
    good = {**WHICH, "to": "booked", "shown": shown_by(back(operator, QUERY))}

    back(operator, **{**good, **wrong})
    back(operator, "?flow=x&step=y")

    assert not BulkOperation.objects.exists()
