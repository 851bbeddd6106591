"""Settings with which tests need no long waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.running import txmsg


@pytest.fixture
def impatient() -> Iterator[None]:
    """The package's settings in these tests."""
    with txmsg():
        yield
