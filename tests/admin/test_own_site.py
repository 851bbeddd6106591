"""A project's own admin site: all links stay on it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from tests import factories

URL = "/ops/django_txmsg/"


@pytest.fixture(autouse=True)
def editable(settings: Any) -> None:
    """Allow operators to edit dead letters."""
    settings.TXMSG = {**settings.TXMSG, "EDIT_DEAD_LETTERS": True}


def test_no_page_and_no_answer_leads_to_another_site(operator: Client) -> None:
    letters = factories.DeadLetterFactory.create_batch(6)
    letter, chosen = letters[0], letters[1]
    gone = factories.DeadLetterFactory(discarded=True)
    row = factories.OutboxMessageFactory()
    factories.InboxMessageFactory(parked=True)
    factories.WorkerFactory()
    state = factories.StageStateFactory()
    operation = factories.BulkOperationFactory()
    dead, one = f"{URL}deadletter/", f"{URL}outboxmessage/{letter.message_id}/"
    bulk = f"{URL}bulkoperation/"

    for path in (
        URL, dead, f"{dead}?resolution=open", f"{dead}confirm/?kind=discard", one,
        f"{URL}outboxmessage/", f"{URL}inboxmessage/", f"{URL}stagestate/",
        f"{URL}worker/", f"{dead}{letter.pk}/copy/", bulk,
        f"{bulk}{operation.pk}/change/",
    ):  # fmt: skip
        response = operator.get(path)
        assert response.status_code == 200, path
        found = re.findall(r'(?:href|action)="(/[^"]+)"', response.content.decode())
        strays = [to for to in found if not to.startswith(("/ops/", "/static/"))]
        assert not strays, path

    for path in (
        f"{dead}confirm/?kind=explode", f"{dead}{letter.pk}/change/",
        f"{dead}999/change/", f"{dead}{gone.pk}/copy/", f"{dead}999/copy/",
        f"{bulk}999/change/", f"{URL}outboxmessage/{row.pk}/change/",
        f"{URL}outboxmessage/00000000-0000-4000-8000-000000000000/",
    ):  # fmt: skip
        assert operator.get(path)["Location"].startswith("/ops/"), path

    for path, form in (
        (f"{dead}confirm/", {"kind": "discard", "ids": chosen.pk}),
        (f"{dead}confirm/", {"kind": "discard", "stage": letter.stage, "rate": "9"}),
        (f"{dead}note/", {"fingerprint": "feedfacefeedface", "note": "Ask Ada"}),
        (f"{dead}?resolution=open", {"action": "redeliver_selected",
                                     "_selected_action": letter.pk}),
        (f"{dead}{letter.pk}/copy/", {"headers": "", "body": "{}", "send": "1"}),
        (f"{URL}stagestate/pause/", {"stage": "mail.send"}),
        (f"{URL}stagestate/resume/", {"stage": state.stage}),
        (f"{bulk}{operation.pk}/cancel/", {}),
        (f"{bulk}999/cancel/", {}),
    ):  # fmt: skip
        response = operator.post(path, form)
        assert response["Location"].startswith("/ops/"), path
