"""The list of idempotency keys shows no responses, and its keys can be deleted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db.models import Model
from django.test import Client, override_settings

from django_txmsg.models import AuditEntry, IdempotencyKey

URL = "/admin/django_txmsg/idempotencykey/"


@pytest.fixture
def keys(db: None) -> list[IdempotencyKey]:
    return [
        IdempotencyKey.objects.create(
            caller=f"user:{number}",
            key=f"key-{number}",
            fingerprint="f" * 64,
            status_code=201,
            headers=[["Location", "/secret"]],
            body=b"IBAN DE00",
        )
        for number in range(2)
    ]


def test_responses_are_not_shown(
    somebody: Callable[..., Client], keys: list[IdempotencyKey]
) -> None:
    client = somebody("view_idempotencykey")

    page = client.get(URL).content.decode()

    assert "key-0" in page
    assert "user:1" in page
    assert "9 bytes" in page
    assert "IBAN" not in page
    assert "secret" not in page
    assert client.get(f"{URL}{keys[0].pk}/change/").status_code in (302, 403)
    assert "key-1" not in client.get(URL, {"q": "key-0"}).content.decode()
    assert somebody("view_outboxmessage").get(URL).status_code == 403


def test_keys_are_deleted_only_with_permission(
    somebody: Callable[..., Client], keys: list[IdempotencyKey]
) -> None:
    chosen = {
        "action": "delete_selected",
        "_selected_action": str(keys[0].pk),
        "post": "yes",
    }

    somebody("view_idempotencykey").post(URL, chosen)
    assert IdempotencyKey.objects.count() == 2
    deleter = somebody("view_idempotencykey", "delete_idempotencykey")
    deleter.post(URL, chosen)

    assert IdempotencyKey.objects.get() == keys[1]
    assert LogEntry.objects.exclude(action_flag=CHANGE).get().object_repr == "key-0"
    deleter.post(f"{URL}{keys[1].pk}/delete/", {"post": "yes"})
    assert not IdempotencyKey.objects.exists()
    assert list(AuditEntry.objects.values_list("text", flat=True).order_by("pk")) == [
        "Deleted idempotency key key-0 of user:0.",
        "Deleted idempotency key key-1 of user:1.",
    ]


class KeysOnAReplica:
    """A database router that reads idempotency keys from a replica."""

    def db_for_read(self, model: type[Model], **hints: object) -> str | None:
        return "other" if model is IdempotencyKey else None


@pytest.mark.django_db(databases=["default", "other"])
def test_keys_read_from_a_replica_are_deleted_at_the_primary(
    somebody: Callable[..., Client], keys: list[IdempotencyKey]
) -> None:
    client = somebody("view_idempotencykey", "delete_idempotencykey")
    for one in keys:
        one.save(using="other", force_insert=True)
    chosen = {
        "action": "delete_selected",
        "_selected_action": str(keys[0].pk),
        "post": "yes",
    }

    with override_settings(DATABASE_ROUTERS=[f"{__name__}.KeysOnAReplica"]):
        assert client.post(URL, chosen).status_code == 302

    assert IdempotencyKey.objects.using("default").get() == keys[1]
    assert IdempotencyKey.objects.using("other").count() == 2
    assert AuditEntry.objects.using("default").count() == 1
    assert not AuditEntry.objects.using("other").exists()
