"""Settings under which a test waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.running import txmsg


@pytest.fixture
def impatient() -> Iterator[None]:
    """The package's settings for the tests of its core."""
    with txmsg():
        yield
