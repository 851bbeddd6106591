"""An action on "all that match" changes exactly the rows that the list shows."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.test import Client

from django_txmsg.admin.dead_letters import DeadLetterAdmin
from django_txmsg.models import DeadLetter
from tests import factories

URL = "/admin/django_txmsg/deadletter/"


@pytest.fixture
def letters(db: None) -> None:
    """Store dead letters, so that each filter finds some of them."""
    factories.DeadLetterFactory.create_batch(4)
    factories.DeadLetterFactory.create_batch(3, discarded=True)
    factories.DeadLetterFactory.create_batch(2, redelivered=True)
    factories.DeadLetterFactory(reason="expired", stage="", destination="mail.out")
    factories.DeadLetterFactory(deaths=2, stage="mail.send", fingerprint="b" * 16)
    factories.DeadLetterFactory(
        discarded=True, stage="mail.send", reason="refused", correlation_id="flow-1"
    )


@pytest.mark.parametrize(
    "query",
    [
        {"resolution": "open"},
        {"resolution": "discarded"},
        {"resolution": "redelivered"},
        {"resolution": "discarded", "stage": "mail.send"},
        {"resolution": "discarded", "stage": "nobody"},
        {"reason": "expired", "resolution": "open"},
        {"reason": "refused", "resolution": "discarded"},
        {"stage": "", "resolution": "open"},
        {"destination": "mail.out", "resolution": "open"},
        {"again": "1", "resolution": "open"},
        {"fingerprint": "b" * 16, "resolution": "open"},
        {"q": "flow-1", "resolution": "discarded"},
        {"q": "flow-1", "resolution": "open"},
    ],
)
@pytest.mark.usefixtures("letters")
def test_action_on_all_changes_exactly_the_listed_rows(
    operator: Client, query: dict[str, str]
) -> None:
    page = operator.get(URL, query)
    shown = {row.pk for row in page.context["cl"].result_list}
    before = dict(DeadLetter.objects.values_list("pk", "resolution"))
    kinds = [kind for kind, _ in page.context["deeds"]]

    for kind in ("redeliver", "discard", "restore"):
        asked = operator.post(
            f"{URL}?{'&'.join(f'{name}={value}' for name, value in query.items())}",
            {
                "action": f"{kind}_selected",
                "_selected_action": [next(iter(shown), 0)],
                "select_across": "1",
            },
        )
        links = [] if kind not in kinds else [link_of(page, kind)]
        if asked.status_code == 302 and "/confirm/" in asked["Location"]:
            links.append(asked["Location"])
        for link in links:
            response = operator.get(link)
            count = response.context["facts"].count if response.context else 0
            assert count == (len(shown) if kind in kinds else 0), link

    if kinds:
        form = parse_qsl(
            urlsplit(link_of(page, kinds[0])).query, keep_blank_values=True
        )
        operator.post(f"{URL}confirm/", dict(form))
        after = dict(DeadLetter.objects.values_list("pk", "resolution"))
        assert {pk for pk in after if after[pk] != before[pk]} == shown


def link_of(page: Any, kind: str) -> str:
    """Return the URL of the list's button for all rows."""
    return f"{URL}confirm/?kind={kind}&{page.context['cl'].bulk_query}"


@pytest.mark.usefixtures("letters")
def test_actions_on_a_list_of_all_states_name_the_affected_letters(
    operator: Client,
) -> None:
    page = operator.get(URL, {"stage": "mail.send"}).content.decode()

    assert "Redeliver all open that match…" in page
    assert "Restore all" not in page


@pytest.mark.usefixtures("letters")
def test_every_filter_of_the_list_is_a_bulk_operations_too(operator: Client) -> None:
    for one in DeadLetterAdmin.list_filter:
        query = {one.parameter_name: "nothing-has-this"}
        if one.parameter_name == "again":
            continue
        page = operator.get(URL, query)
        assert not page.context["cl"].result_list, query
        for kind in ("redeliver", "discard", "restore"):
            confirm = operator.get(f"{URL}confirm/", {"kind": kind, **query})
            assert confirm.status_code == 302, (kind, query)


@pytest.mark.parametrize(
    "lookup",
    [
        "headers__authorization__startswith",
        "headers__authorization",
        "headers",
        "body__contains",
        "exception__contains",
        "traceback__icontains",
        "message_id__startswith",
        "stage__startswith",
    ],
)
@pytest.mark.parametrize("model", ["deadletter", "outboxmessage", "inboxmessage"])
def test_a_list_is_narrowed_by_its_filters_only(
    operator: Client, model: str, lookup: str
) -> None:
    """A query with a lookup that is not a filter of the list is answered with 400.
    Otherwise a user could find out a masked header character by character."""
    factories.DeadLetterFactory(headers={"authorization": "Bearer s3cr3t"})
    factories.OutboxMessageFactory(headers={"authorization": "Bearer s3cr3t"})
    factories.InboxMessageFactory()

    response = operator.get(f"/admin/django_txmsg/{model}/", {lookup: "Bearer s"})

    assert response.status_code == 400


@pytest.mark.parametrize(
    "address",
    [
        "django_txmsg/bulkoperation/?state__exact=done",
        "django_txmsg/bulkoperation/?kind__exact=discard",
        "django_txmsg/worker/?kind=relay",
        "django_txmsg/outboxmessage/?state=pending&destination=orders.place&since=2026-01-01",
        "django_txmsg/inboxmessage/?state=processed&stage=orders.place&before=2026-01-01",
        "txmsg_spark/pipelinerun/?job__exact=archive",
    ],
)
def test_its_own_filters_narrow_a_list(admin_client: Client, address: str) -> None:
    assert admin_client.get(f"/admin/{address}").status_code == 200
