"""The admin shows dead letters in two ways: grouped by their errors, and as a list.
Both pages have links to the actions that the user may take."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone

from django_txmsg.admin import dead_letters as admin_dead_letters
from django_txmsg.models import FailureNote
from django_txmsg.monitoring import alarms, status
from tests import factories

URL = "/admin/django_txmsg/deadletter/"


def found(client: Client, **query: str) -> set[int]:
    """Return the ids of the dead letters that the list shows."""
    response = client.get(URL, query)
    assert response.status_code == 200
    return {row.pk for row in response.context["cl"].result_list}


def test_open_dead_letters_are_grouped_by_error_most_first(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(2, fingerprint="a" * 16, exception="A: 1")
    factories.DeadLetterFactory.create_batch(3, fingerprint="b" * 16, exception="B: 2")
    factories.DeadLetterFactory(fingerprint="b" * 16, stage="mail.send", deaths=2)
    factories.DeadLetterFactory(fingerprint="c" * 16, discarded=True)
    factories.FailureNoteFactory(fingerprint="b" * 16, note="Ticket 7.")

    response = operator.get(URL)

    groups = response.context["groups"]
    assert [(one["fingerprint"], one["count"]) for one in groups] == [
        ("b" * 16, 4),
        ("a" * 16, 2),
    ]
    assert groups[0]["places"] == {"orders.place": 3, "mail.send": 1}
    page = response.content.decode()
    assert "Ticket 7." in page
    assert page.count("failed again") == 1
    assert "Redeliver 4…" in page


def test_a_new_error_is_marked(operator: Client) -> None:
    for error, ages in (("a", (300, 90, 1)), ("b", (300, 200)), ("c", (2,))):
        for age in ages:
            factories.DeadLetterFactory(
                fingerprint=error * 16, created_at=factories.ago(minutes=age)
            )

    response = operator.get(URL)

    groups = response.context["groups"]
    assert [one["fingerprint"][0] for one in groups] == ["a", "b", "c"]
    assert [one["new"] for one in groups] == [False, False, True]
    assert ">new<" in response.content.decode()


def test_an_error_is_not_new_when_a_message_dies_again(operator: Client) -> None:
    factories.DeadLetterFactory(deaths=2)

    page = operator.get(URL).content.decode()

    assert (">failed again<" in page, ">new<" in page) == (True, False)


def test_the_filter_by_error_says_which(operator: Client) -> None:
    for number in range(2):
        factories.DeadLetterFactory(
            fingerprint="c0ffee11c0ffee11", exception=f"OutOfStock: {number} left"
        )

    page = operator.get(URL, {"resolution": "open"}).content.decode()

    assert "OutOfStock: 1 left (2)" in page
    assert "c0ffee11c0ffee11 (2)" not in page


def test_no_dead_letters_is_good_news(viewer: Client) -> None:
    assert "No open dead letters." in viewer.get(URL).content.decode()


def test_the_list_is_filtered(operator: Client) -> None:
    stage = factories.DeadLetterFactory(stage="mail.send")
    relay = factories.DeadLetterFactory(stage="", destination="mail.out")
    again = factories.DeadLetterFactory(deaths=2, fingerprint="b" * 16)
    gone = factories.DeadLetterFactory(discarded=True)

    assert found(operator, stage="mail.send") == {stage.pk}
    assert found(operator, stage="") == {relay.pk}
    assert found(operator, destination="mail.out") == {relay.pk}
    assert found(operator, again="1") == {again.pk}
    assert found(operator, fingerprint="b" * 16) == {again.pk}
    assert found(operator, resolution="discarded") == {gone.pk}
    assert found(operator, resolution="open") == {stage.pk, relay.pk, again.pk}
    page = operator.get(URL, {"resolution": "open"}).content.decode()
    assert "open (3)" in page
    assert "mail.send (1)" in page


def test_choices_count_the_dead_letters_of_the_chosen_resolution(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        factories.DeadLetterFactory(
            stage="mail.send", discarded=True, exception="OutOfStock: 0 left",
            fingerprint="b" * 16,
        )  # fmt: skip
    factories.DeadLetterFactory(stage="orders.place")

    page = operator.get(URL, {"resolution": "discarded"}).content.decode()
    monkeypatch.setattr(admin_dead_letters, "CAP", 2)
    capped = operator.get(URL, {"resolution": "discarded"}).content.decode()

    assert "mail.send (2)" in page
    assert "OutOfStock: 0 left (2)" in page
    assert "orders.place (1)" not in page
    assert "mail.send (2+)" in capped


def test_a_dead_letter_is_found_by_its_ids(operator: Client) -> None:
    letter = factories.DeadLetterFactory(correlation_id="flow-1")
    letter.headers["txmsg-key"] = 'customer "7%s"'
    letter.fingerprint = "badcafe2badcafe2"
    letter.save()
    factories.DeadLetterFactory()

    texts = (letter.message_id, "flow-1", 'customer "7%s"', letter.fingerprint)
    for text in texts:
        assert found(operator, q=str(text)) == {letter.pk}, text
        query = {"kind": "discard", "search": str(text)}
        page = operator.get(f"{URL}confirm/", query).content.decode()
        assert "Discard 1 message?" in page
    assert found(operator, q="customer") == set()


def test_a_selection_is_confirmed_by_its_ids(operator: Client) -> None:
    chosen = factories.DeadLetterFactory.create_batch(2)
    factories.DeadLetterFactory()

    response = operator.post(
        f"{URL}?resolution=open",
        {
            "action": "redeliver_selected",
            "_selected_action": [one.pk for one in chosen],
            "select_across": "0",
        },
    )

    query = parse_qs(urlsplit(response["Location"]).query)
    assert query["kind"] == ["redeliver"]
    assert set(query["ids"][0].split(",")) == {str(one.pk) for one in chosen}
    page = operator.get(response["Location"]).content.decode()
    assert "Redeliver 2 messages" in page


def test_all_that_match_are_confirmed_by_their_filter(operator: Client) -> None:
    letters = factories.DeadLetterFactory.create_batch(3, stage="mail.send")
    factories.DeadLetterFactory()

    response = operator.post(
        f"{URL}?stage=mail.send",
        {
            "action": "discard_selected",
            "_selected_action": [letters[0].pk],
            "select_across": "1",
        },
    )

    query = parse_qs(urlsplit(response["Location"]).query)
    assert query == {"kind": ["discard"], "stage": ["mail.send"]}
    page = operator.get(f"{URL}?stage=mail.send").content.decode()
    assert "kind=redeliver&amp;stage=mail.send" in page


def test_a_list_between_two_times_is_confirmed_with_both(operator: Client) -> None:
    for days in (1, 3, 5):
        factories.DeadLetterFactory(created_at=factories.ago(days=days))
    since, before = factories.ago(days=4), factories.ago(days=2)
    bounds = urlencode({"since": f"{since:%Y-%m-%dT%H:%M}", "before": before})

    page = operator.get(f"{URL}?{bounds}").content.decode()
    (link,) = re.findall(r'href="([^"]+kind=discard[^"]+)"', page)
    asked = operator.get(unescape(link))
    nonsense = operator.get(f"{URL}confirm/?kind=discard&since=monday", follow=True)

    assert asked.context["facts"].count == 1
    here = timezone.localtime(before)
    assert f"before {here:%Y-%m-%d %H:%M:%S %Z}" in asked.context["filters"]
    assert "Not an instant" in nonsense.content.decode()


@pytest.mark.parametrize(
    ("permission", "offered", "hidden"),
    [
        ("redeliver_deadletter", "redeliver_selected", "discard_selected"),
        ("discard_deadletter", "discard_selected", "redeliver_selected"),
    ],
)
def test_actions_are_offered_only_with_permission(
    somebody: Callable[..., Client], permission: str, offered: str, hidden: str
) -> None:
    letter = factories.DeadLetterFactory()
    client = somebody("view_deadletter", permission)

    page = client.get(f"{URL}?resolution=open").content.decode()

    assert offered in page
    assert hidden not in page
    client.post(
        f"{URL}?resolution=open",
        {"action": hidden, "_selected_action": [letter.pk]},
    )
    letter.refresh_from_db()
    assert letter.resolution == "open"


def test_a_note_is_kept_and_audited(operator: Client, viewer: Client) -> None:
    factories.DeadLetterFactory()

    refused = viewer.post(
        f"{URL}note/", {"fingerprint": "feedfacefeedface", "note": "no"}
    )
    operator.post(f"{URL}note/", {"fingerprint": "feedfacefeedface", "note": "Ask Ada"})

    assert refused.status_code == 403
    assert FailureNote.objects.get().note == "Ask Ada"
    assert "Ask Ada" in operator.get(URL).content.decode()
    assert "Ask Ada" in LogEntry.objects.get().change_message
    assert operator.get(f"{URL}note/").status_code == 405


@pytest.mark.parametrize("above", ["2.000", "0", "1" * 10, "many"])
def test_bad_limit_of_a_mute_is_an_error_and_changes_nothing(
    operator: Client, above: str
) -> None:
    letter = factories.DeadLetterFactory()
    form = {"fingerprint": letter.fingerprint, "note": "Ask Ada", "muted": "1"}
    operator.post(f"{URL}note/", {**form, "above": "2000"})

    page = operator.post(f"{URL}note/", {**form, "above": above}, follow=True)

    assert "The limit of a mute is a number" in page.content.decode()
    assert FailureNote.objects.get().muted_above == 2000
    assert LogEntry.objects.count() == 1


def test_a_dead_letter_leads_to_its_message(viewer: Client) -> None:
    letter = factories.DeadLetterFactory()

    response = viewer.get(f"{URL}{letter.pk}/change/")

    assert response["Location"].endswith(f"/outboxmessage/{letter.message_id}/")
    gone = viewer.get(f"{URL}999/change/", follow=True)
    assert "There is no dead letter 999 here." in gone.content.decode()


def test_the_pages_need_their_permission(somebody: Callable[..., Client]) -> None:
    client = somebody("view_worker")
    assert client.get(URL).status_code == 403
    assert client.get(f"{URL}?resolution=open").status_code == 403
    assert client.get(f"{URL}1/change/").status_code == 403


@pytest.mark.parametrize(("url", "queries"), [(URL, 8), (f"{URL}?resolution=open", 12)])
def test_the_number_of_queries_is_fixed(
    operator: Client,
    django_assert_num_queries: Callable[..., object],
    url: str,
    queries: int,
) -> None:
    factories.DeadLetterFactory()
    with django_assert_num_queries(queries):
        operator.get(url)
    for number in range(12):
        factories.DeadLetterFactory.create_batch(3, fingerprint=f"{number:016}")
    with django_assert_num_queries(queries):
        operator.get(url)


def test_a_muted_error_is_off_the_overview_and_the_alarms(
    operator: Client, viewer: Client
) -> None:
    factories.WorkerFactory(kind="relay", stages=[])
    muted = {"fingerprint": "a" * 16, "muted": "1"}
    factories.DeadLetterFactory.create_batch(3, fingerprint="a" * 16)
    factories.DeadLetterFactory(fingerprint="b" * 16, stage="mail.send")

    operator.post(f"{URL}note/", {**muted, "note": " "})
    assert not FailureNote.objects.exists()
    operator.post(f"{URL}note/", {**muted, "note": "Until the gateway is back"})

    groups = operator.get(URL).context["groups"]
    assert [(one["count"], one["muted"]) for one in groups] == [(1, False), (3, True)]
    picture = status.read()
    assert (picture.dead, picture.muted) == (1, 3)
    assert (picture.stages["orders.place"].dead, alarms.well(picture)) == (0, False)
    page = viewer.get("/admin/django_txmsg/").content.decode()
    assert "3 more muted" in page
    assert 'txmsg_stage_dead{stage="orders.place"} 0.0' in scrape(viewer)
    assert 'txmsg_stage_muted{stage="orders.place"} 3.0' in scrape(viewer)

    operator.post(
        f"{URL}confirm/", {"kind": "discard", "fingerprint": "b" * 16}, follow=True
    )
    assert alarms.well(status.read())
    assert "All is well." in viewer.get("/admin/django_txmsg/").content.decode()
    # Muted or not, they can be redelivered, and the next one that dies is muted too.
    factories.DeadLetterFactory(fingerprint="a" * 16)
    assert status.read().muted == 4

    operator.post(f"{URL}note/", {"fingerprint": "a" * 16, "note": "It is back"})
    picture = status.read()
    assert (picture.dead, picture.muted) == (4, 0)
    assert [one.change_message for one in LogEntry.objects.order_by("pk")][::2] == [
        f"Muted failures {'a' * 16}: Until the gateway is back",
        f"Unmuted failures {'a' * 16}: It is back",
    ]


def scrape(client: Client) -> str:
    """Return a Prometheus scrape."""
    text = client.get("/txmsg/metrics/").content.decode()
    return text.replace('database="default",', "")
