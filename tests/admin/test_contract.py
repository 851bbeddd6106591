"""The page of the contract: channels, types, and breaking changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client, override_settings

from django_txmsg import Destination, Message, codecs, message_type, stages
from django_txmsg.sending import destination
from tests.running import declared

URL = "/admin/django_txmsg/stagestate/contract/"


@message_type("shop.Told", version=2, readable_from=1)
@dataclass
class Told:
    text: str


def tell(told: Told) -> None:
    """Do nothing."""


def anything(message: Message) -> None:
    """Do nothing."""


@pytest.fixture(autouse=True)
def _service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Any
) -> Iterator[None]:
    monkeypatch.setattr(stages, "_stages", {})
    monkeypatch.setattr(destination, "_declared", [])
    file = str(tmp_path / "asyncapi.json")
    with (
        override_settings(TXMSG={**settings.TXMSG, "CONTRACT": file}),
        declared(tell, "shop.told"),
        declared(anything, "shop.any"),
    ):
        Destination("shop.told", Told)
        yield
    codecs.forget()


def test_the_contract_is_shown(viewer: Client) -> None:
    page = viewer.get(URL).content.decode()

    assert "No contract is committed" in page
    assert "sent, taken by shop.told" in page
    assert "version 2, read by version 1 and above" in page
    assert "&quot;text&quot;" in page
    assert "any: the stage takes the message as it is" in page
    assert URL in viewer.get("/admin/django_txmsg/stagestate/").content.decode()


def test_contract_page_shows_breaking_changes(viewer: Client) -> None:
    call_command("txmsg", "contracts", "export")
    assert "matches the code" in viewer.get(URL).content.decode()

    stages.unregister("shop.any")

    page = viewer.get(URL).content.decode()
    assert "shop.any: no stage consumes it any more" in page


@pytest.mark.parametrize("content", ["[]", "<<<<<<< HEAD"])
def test_a_broken_contract_file_is_reported_as_broken(
    viewer: Client, settings: Any, content: str
) -> None:
    Path(settings.TXMSG["CONTRACT"]).write_text(content)

    page = viewer.get(URL).content.decode()

    assert "No contract is committed" not in page
    assert f"{settings.TXMSG['CONTRACT']} is not " in page


def test_page_needs_permission_to_view_stages(somebody: Callable[..., Client]) -> None:
    assert somebody("view_outboxmessage").get(URL).status_code == 403
