"""Fixtures for projects that use pytest. Tests use no broker unless they request one.

pytest finds this module by its entry point. The fixtures wrap `django_txmsg.testing`.
The plugin imports nothing of Django before a test runs. If the app is not installed,
the plugin has no effect.
"""

from __future__ import annotations

import sys
from collections import UserList
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .envelope.message import Message
    from .testing import Drained, ScriptedBroker

REAL, ON_COMMIT = "txmsg_real_broker", "txmsg_on_commit"


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        f'{REAL}: the test may reach the brokers of TXMSG["BROKERS"]; all others '
        f"use the embedded broker",
    )
    config.addinivalue_line(
        "markers",
        f'{ON_COMMIT}(mode="inline"): what TXMSG["DISPATCH_ON_COMMIT"] is for the '
        f'test; it is "off" for all others',
    )


class SentMessages(UserList["Message"]):
    """The messages stored so far, in order. Call the list with a destination to get
    only the messages to that destination."""

    def __call__(self, destination: str) -> list[Message]:
        """Return the messages to one destination."""
        return [message for message in self if message.destination == destination]


class Txmsg:
    """The object that the fixture `txmsg` returns."""

    @property
    def sent(self) -> SentMessages:
        """The messages stored so far, dispatched or not. `txmsg.sent("orders.place")`
        returns only the messages to one destination."""
        from .testing import outbox_messages

        return SentMessages(outbox_messages())

    def drain(self, *stages: str, **options: Any) -> Drained:
        """Call `django_txmsg.testing.drain()`, which relays and processes messages
        until none is left."""
        from .testing import drain

        return drain(*stages, **options)


@pytest.fixture
def txmsg(db: None) -> Txmsg:
    """Gives a test access to the database, and an object with `sent` and `drain()`."""
    # As a parameter: pytest-django creates the test databases of the tests whose
    # fixtures name `db` when they are collected. All others would use the real one.
    return Txmsg()


@pytest.fixture
def scripted_broker(request: pytest.FixtureRequest) -> Iterator[ScriptedBroker]:
    """A STOMP broker that follows a script. During the test it is TXMSG's default
    broker. It imitates ActiveMQ Classic. For another broker, give its profile as the
    fixture's indirect parameter.
    """
    from .testing import CLASSIC, ScriptedBroker

    with ScriptedBroker(getattr(request, "param", CLASSIC)) as broker:
        if not _installed():
            yield broker
            return
        from django.conf import settings
        from django.test import override_settings

        given = getattr(settings, "TXMSG", None) or {}
        brokers = {**given.get("BROKERS", {}), "default": {"URL": broker.url}}
        with override_settings(TXMSG={**given, "BROKERS": brokers}):
            yield broker


@pytest.fixture(scope="session", autouse=True)
def _txmsg_without_brokers() -> Iterator[Any]:
    """Use the embedded broker for the whole test session, including the set-up of test
    classes. Yields two values of TXMSG: the project's, and a copy with the embedded
    broker."""
    if not _installed() or not _sound():
        yield None, None  # a project may be set up by its first test
        return
    from django.conf import settings

    from .testing import embedded

    given = getattr(settings, "TXMSG", None) or {}
    with embedded():
        yield given, settings.TXMSG


@pytest.fixture(autouse=True)
def _txmsg_without_broker(
    request: pytest.FixtureRequest, _txmsg_without_brokers: Any
) -> Iterator[None]:
    """Use the embedded broker for one test, even if the test's class overrides TXMSG.
    If the test has the marker `txmsg_real_broker`, use the brokers of TXMSG instead:
    the brokers of the class's TXMSG if the class overrides it, otherwise the
    project's."""
    if not _installed():
        yield
        return
    from django.conf import settings
    from django.test import override_settings

    from .testing import embedded

    mark = request.node.get_closest_marker(ON_COMMIT)
    mode = (mark.args or [mark.kwargs.get("mode", "inline")])[0] if mark else "off"
    if request.node.get_closest_marker(REAL):
        given, inside = _txmsg_without_brokers
        now = getattr(settings, "TXMSG", None) or {}
        own = dict(given if given is not None and inside == now else now)
        if mark:
            own["DISPATCH_ON_COMMIT"] = mode
        with override_settings(TXMSG=own):
            yield
        return
    with embedded(dispatch_on_commit=mode) if _sound() else nullcontext():
        yield


def _installed() -> bool:
    """Return whether Django is set up and the app installed."""
    apps: Any = getattr(sys.modules.get("django.apps"), "apps", None)
    return apps is not None and apps.ready and apps.is_installed("django_txmsg")


def _sound() -> bool:
    """Return whether TXMSG is valid. A test class may override TXMSG with an invalid
    value."""
    from . import conf

    return not conf.problems()
