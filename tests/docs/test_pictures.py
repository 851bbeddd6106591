"""The admin's pictures match its pages: `make pictures` renews them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.utils.text import capfirst

from django_txmsg.admin import overview
from django_txmsg.models import OutboxMessage
from tests import factories
from tests.admin import shop
from tests.docs.outline import likeness, outline
from tests.docs.pages import PAGES, ROOT
from tests.docs.pictures import ADMIN, IMAGES, OUTLINES

#: A picture with one other word is not worth a new one; with a quarter of them it is.
ENOUGH = 0.75
TAKEN = json.loads(OUTLINES.read_text())

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite]


@pytest.fixture
def pages() -> dict[str, str]:
    """The current HTML of each page that has a picture, by the picture's name."""
    client = Client()
    client.force_login(User.objects.create_superuser("grace"))
    shop.open_shop(orders=8)
    letter = shop.trouble(failed_orders=2)
    factories.OutboxMessageFactory(
        message_id=letter.message_id, destination=letter.destination, dispatched=True,
        key="A-1", correlation_id="A-1",
    )  # fmt: skip
    factories.StageStateFactory(stage="shipping.send")
    operation = factories.BulkOperationFactory(rate=1.0, done=20)
    flow = OutboxMessage.objects.filter(destination="payments.charge").first()
    assert flow is not None
    copy = f"{ADMIN}/deadletter/{letter.pk}/copy/"
    group = f"/deadletter/confirm/?fingerprint={letter.fingerprint}&kind="
    paths = {
        "overview": "/",
        "groups": "/deadletter/",
        "message": f"/outboxmessage/{letter.message_id}/",
        "flow": f"/outboxmessage/{flow.message_id}/",
        "stages": "/stagestate/",
        "discard": f"{group}discard",
        "confirm": f"{group}redeliver",
        "bulk": f"/bulkoperation/{operation.pk}/change/",
    }
    with override_settings(TXMSG={"SERVICE": "shop", "EDIT_DEAD_LETTERS": True}):
        shown = {
            name: client.get(ADMIN + path).content.decode()
            for name, path in paths.items()
        }
        edited = {"headers": "tenant: south", "body": '{"order": 1}'}
        shown["copy"] = client.post(copy, edited).content.decode()
    return shown


def test_every_picture_resembles_its_page(pages: dict[str, str]) -> None:
    assert pages.keys() == TAKEN.keys()
    lies = {}
    for name, page in pages.items():
        today = outline(page)
        assert len(today) >= 3, name
        if likeness(today, TAKEN[name]) < ENOUGH:
            lies[name] = sorted({*today} ^ {*TAKEN[name]})

    assert lies == {}, "make pictures, and look at them"


def test_the_overviews_picture_lists_todays_pages(pages: dict[str, str]) -> None:
    """The picture of the overview lists exactly the pages that exist now. If one page
    was added or removed, the comparison of outlines might not notice it."""
    known = {capfirst(model._meta.verbose_name_plural) for model in apps.get_models()}
    registered = {
        capfirst(model._meta.verbose_name_plural)
        for model in admin.site._registry
        if model._meta.app_label == "django_txmsg"
    }

    assert len(registered) >= 9
    assert known & {*outline(pages["overview"])} == registered
    assert known & {*TAKEN["overview"]} == registered, "make pictures"


def test_the_overviews_picture_has_todays_tabs() -> None:
    """The picture has all tabs except Alerts, because the example project has no
    alerts."""
    lists = {title for _, title in overview._LISTS} - {"Alerts"}
    tabs = {"Overview", "What changed", "May I?", *lists}

    assert {one for one in TAKEN["overview"] if one.startswith("tab ")} == {
        f"tab {title}" for title in tabs
    }, "make pictures"


def test_other_columns_are_noticed(pages: dict[str, str]) -> None:
    page = pages["stages"]
    changed = re.sub(r">\s*(Stage|Dead|Workers|Attempts)\s*<", ">Renamed<", page)

    assert likeness(outline(page), outline(page)) == 1
    assert likeness(outline(changed), outline(page)) < ENOUGH


def test_every_picture_is_there_in_light_and_dark() -> None:
    pictures = {path.stem for path in IMAGES.glob("*.png")}

    assert {*TAKEN} | {f"{name}-dark" for name in TAKEN} == pictures - {
        "overview-phone"
    }


def test_every_picture_is_shown() -> None:
    shown = {
        Path(found).stem
        for page in PAGES
        for found in re.findall(r"images/[\w-]+\.png", page.read_text())
    }

    assert {path.stem for path in (ROOT / "docs" / "images").glob("*.png")} == shown
