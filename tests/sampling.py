"""Which cases of a test `make test` runs. The matrix runs all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def sample(cases: Iterable[Any], *, every: int | None = None) -> Iterator[Any]:
    """Yield the cases of a parametrized test. The marker `matrix` is on all but the
    first, or with `every` on all but each `every`th."""
    for number, case in enumerate(cases):
        if number % every if every else number:
            values = case if isinstance(case, tuple) else (case,)
            yield pytest.param(*values, marks=pytest.mark.matrix)
        else:
            yield case
