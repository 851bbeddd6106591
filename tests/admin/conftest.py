"""What the tests of the operator's pages share: people with and without rights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_txmsg import stages

ALL_VIEWS = (
    "view_outboxmessage",
    "view_inboxmessage",
    "view_deadletter",
    "view_worker",
    "view_stagestate",
    "view_bulkoperation",
)


@pytest.fixture
def somebody(db: None) -> Callable[..., Client]:
    """Log in a member of staff who has these permissions of ours and no others."""

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
    """Declare stages for as long as the test runs."""
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
    """Somebody who may see rows and nothing else."""
    return somebody(*ALL_VIEWS)


@pytest.fixture
def operator(somebody: Callable[..., Client]) -> Client:
    """Somebody who may do everything."""
    return somebody(
        *ALL_VIEWS,
        "redeliver_deadletter",
        "discard_deadletter",
        "edit_deadletter",
        "view_message_body",
        "pause_stage",
    )
