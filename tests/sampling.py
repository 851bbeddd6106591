"""Chooses some cases of a parametrized test. `make test` runs only these cases. The
matrix runs all cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def sample(cases: Iterable[Any], *, every: int | None = None) -> Iterator[Any]:
    """Yield the cases of a parametrized test. `make test` runs only the first case.
    With `every=3`, it runs every third case. The other cases get the marker
    `matrix`."""
    for number, case in enumerate(cases):
        if number % every if every else number:
            values = case if isinstance(case, tuple) else (case,)
            yield pytest.param(*values, marks=pytest.mark.matrix)
        else:
            yield case
