"""The page of the stages shows their states. An operator can pause a stage there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_txmsg import stages
from django_txmsg.models import AuditEntry, StageState
from tests import factories

URL = "/admin/django_txmsg/stagestate/"


@pytest.fixture
def declared() -> Iterator[str]:
    """Declare a stage, and return its name."""
    stages.stage("admin.tests", name="admin.tests")(lambda message: None)
    yield "admin.tests"
    stages.unregister("admin.tests")


def test_stages_declared_and_left_behind_are_shown(
    viewer: Client, declared: str
) -> None:
    factories.InboxMessageFactory(stage="long.gone")
    factories.InboxMessageFactory(stage=declared, parked=True)
    factories.DeadLetterFactory(stage=declared)
    factories.WorkerFactory(stages=[declared])

    response = viewer.get(URL)

    rows = {
        place.name: (place, one, place.workers)
        for place, one, _ in response.context["rows"]
    }
    place, found, workers = rows[declared]
    assert (place.waiting.count, place.dead, workers) == (1, 1, 1)
    assert found is not None
    assert rows["long.gone"][1] is None
    assert "unknown here" in response.content.decode()
    assert ">Pause<" not in response.content.decode()


def test_a_stage_is_paused_and_resumed(operator: Client, declared: str) -> None:
    paused = operator.post(f"{URL}pause/", {"stage": declared}, follow=True)

    assert StageState.objects.paused() == {declared}
    assert StageState.objects.get().paused_by.startswith("user-")
    assert "Paused stage admin.tests." in paused.content.decode()
    again = operator.post(f"{URL}pause/", {"stage": declared}, follow=True)
    assert "already paused" in again.content.decode()

    operator.post(f"{URL}resume/", {"stage": declared})

    assert StageState.objects.paused() == set()
    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        "Paused stage admin.tests.",
        "Resumed stage admin.tests.",
    ]


def test_each_button_is_called_by_the_name_of_its_stage(admin_client: Client) -> None:
    names = ("admin.one", "admin.two")
    for name in names:
        stages.stage(name, rate="900/m")(lambda message: None)
    admin_client.post(f"{URL}pause/", {"stage": "admin.two"})
    admin_client.post(f"{URL}limit/", {"stage": "admin.two", "rate": "9/m"})

    page = admin_client.get(URL).content.decode()

    for name in names:
        stages.unregister(name)
    found = re.findall(r'<button class="button" type="submit"([^>]*)>', page)
    called = {re.sub(r'.*aria-label="(.*)"', r"\1", one) for one in found}
    assert len(called) == len(found)
    assert called >= {
        "Pause admin.one",
        "Resume admin.two",
        "For an hour: admin.one",
        "Reset the rate of admin.two",
    }


def test_reason_of_a_pause_is_shown(operator: Client, declared: str) -> None:
    paused = {"stage": declared, "why": "until Hamburg is back"}

    page = operator.post(f"{URL}pause/", paused, follow=True).content.decode()
    overview = operator.get("/admin/django_txmsg/").content.decode()

    assert " ago: until Hamburg is back" in " ".join(page.split())
    assert " ago. Why: until Hamburg is back" in overview
    (entry,) = LogEntry.objects.all()
    assert entry.change_message == "Paused stage admin.tests: until Hamburg is back"
    operator.post(f"{URL}resume/", {"stage": declared})
    assert StageState.objects.get().paused_why == ""


def test_pausing_needs_its_permission(
    somebody: Callable[..., Client], declared: str
) -> None:
    client = somebody("view_stagestate")

    assert client.post(f"{URL}pause/", {"stage": declared}).status_code == 403
    assert client.post(f"{URL}resume/", {"stage": declared}).status_code == 403
    assert client.get(f"{URL}pause/").status_code == 405
    assert somebody("view_worker").get(URL).status_code == 403
    assert not StageState.objects.exists()


@pytest.mark.parametrize("name", ["nobody.knows", "", "x" * 5000])
def test_unknown_stage_cannot_be_paused(operator: Client, name: str) -> None:
    response = operator.post(f"{URL}pause/", {"stage": name}, follow=True)

    assert "There is no stage" in response.content.decode()
    assert not StageState.objects.exists()


def test_a_stage_that_left_something_behind_can_be_paused(operator: Client) -> None:
    factories.InboxMessageFactory(stage="long.gone")
    factories.DeadLetterFactory(stage="dead.only")

    for name in ("long.gone", "dead.only"):
        operator.post(f"{URL}pause/", {"stage": name})

    assert StageState.objects.paused() == {"long.gone", "dead.only"}


@pytest.fixture
def limited() -> Iterator[str]:
    """A stage with a rate."""
    stages.stage("admin.limited", rate="900/m", per="tenant")(lambda message: None)
    yield "admin.limited"
    stages.unregister("admin.limited")


def test_rate_is_shown_changed_for_an_hour_and_reset(
    somebody: Callable[..., Client], declared: str, limited: str
) -> None:
    client = somebody("view_stagestate", "limit_stage")
    assert "900/m <small" in " ".join(client.get(URL).content.decode().split())

    form = {"stage": limited, "rate": "60/m"}
    page = client.post(f"{URL}limit/", form, follow=True).content.decode()
    ((rate, seconds),) = StageState.objects.rates().values()
    assert rate == "60/m"
    assert 3590 < seconds <= 3600
    assert "Stage admin.limited has a rate of 60/m for 1 h." in page
    assert "<strong>60/m</strong>" in page
    assert "else 900/m" in page

    for stage, wrong in ((limited, "<b>fast</b>"), (declared, "1/s"), ("x", "1/s")):
        form = {"stage": stage, "rate": wrong}
        page = client.post(f"{URL}limit/", form, follow=True).content.decode()
        assert 'class="error"' in page
        assert "<b>fast" not in page

    for _ in range(2):
        client.post(f"{URL}limit/", {"stage": limited})
    assert StageState.objects.rates() == {}
    said = [
        "Stage admin.limited has a rate of 60/m for 1 h.",
        "Stage admin.limited has its own rate again.",
    ]
    entries = LogEntry.objects.order_by("pk")
    assert [entry.change_message for entry in entries] == said
    assert [entry.text for entry in AuditEntry.objects.order_by("pk")] == said


def test_changing_a_rate_needs_its_permission(
    operator: Client, viewer: Client, limited: str
) -> None:
    for client in (operator, viewer):
        assert "For an hour" not in client.get(URL).content.decode()
        form = {"stage": limited, "rate": "1/s"}
        assert client.post(f"{URL}limit/", form).status_code == 403
    assert not StageState.objects.exists()


def test_no_rate_is_shown_where_no_stage_has_one(viewer: Client, declared: str) -> None:
    assert "<th>Rate</th>" not in viewer.get(URL).content.decode()
