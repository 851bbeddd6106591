"""What a serializer writes as something else, without an error: NaN and infinities as
null, secrets as asterisks. Pure: no Django, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Location = tuple[int | str, ...]


def not_kept(sent: Any, read: Any, at: Location = ()) -> Iterator[tuple[Location, str]]:
    """Yield where `read`, which is what `sent` becomes on its way, has lost it."""
    if isinstance(sent, float):
        if not math.isfinite(sent) and read is None:
            yield at, "finite_number"
    elif isinstance(sent, dict):
        if isinstance(read, dict):
            for name in sent.keys() & read.keys():
                yield from not_kept(sent[name], read[name], (*at, str(name)))
    elif isinstance(sent, list | tuple):
        if isinstance(read, list | tuple):
            for index, (one, two) in enumerate(zip(sent, read, strict=False)):
                yield from not_kept(one, two, (*at, index))
    elif (
        hasattr(sent, "get_secret_value") and type(sent) is type(read) and sent != read
    ):
        yield at, "masked_secret"
