"""Fixtures of the admin tests: users with and without permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_txmsg import stages
from tests.forgetting import forget_counts

ALL_VIEWS = (
    "view_outboxmessage",
    "view_inboxmessage",
    "view_deadletter",
    "view_worker",
    "view_stagestate",
    "view_bulkoperation",
)


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    """Clear the counts that this process has cached for another test's rows."""
    forget_counts()


@pytest.fixture
def somebody(db: None) -> Callable[..., Client]:
    """Return a function that logs in a staff user with exactly the named
    permissions."""

    def log_in(*codenames: str) -> Client:
        user = User.objects.create_user(f"user-{User.objects.count()}", is_staff=True)
        wanted = Permission.objects.filter(
            content_type__app_label="django_txmsg", codename__in=codenames
        )
        assert len(wanted) == len(set(codenames))
        user.user_permissions.set(wanted)
        client = Client()
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def declared() -> Iterator[Callable[..., None]]:
    """Return a function that declares stages until the end of the test."""
    names: list[str] = []

    def declare(*wanted: str) -> None:
        for name in wanted:
            stages.register(stages.Stage(name, name, handler=lambda message: None))
            names.append(name)

    yield declare
    for name in names:
        stages.unregister(name)


@pytest.fixture
def viewer(somebody: Callable[..., Client]) -> Client:
    """A user who may only view rows."""
    return somebody(*ALL_VIEWS)


@pytest.fixture
def operator(somebody: Callable[..., Client]) -> Client:
    """A user with all permissions."""
    return somebody(
        *ALL_VIEWS,
        "redeliver_deadletter",
        "discard_deadletter",
        "edit_deadletter",
        "view_message_body",
        "pause_stage",
    )
