"""How many messages a stage processes in a time, as `@stage(rate="900/m")` says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigurationError

#: Seconds of each unit.
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
#: The part of a unit by which a slot may be used late. A line that was not used for a
#: while catches up on that much, in up to two places: less than 5 % of a unit.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of messages in each second, minute, hour or day."""

    text: str
    #: Seconds from one slot to the next.
    period: float
    #: Seconds by which a slot may be used late.
    tolerance: float

    @classmethod
    def parse(cls, text: object) -> Rate:
        """Return the rate that a text such as "900/m" says. Raises
        ConfigurationError."""
        found = re.fullmatch(r"([1-9]\d{0,8})/([smhd])", str(text))
        if found is None:
            raise ConfigurationError(
                f"rate={text!r} is not a number of messages in a second, minute, hour "
                f'or day, as "10/s" and "900/m" are.'
            )
        unit = UNITS[found[2]]
        return cls(found[0], unit / int(found[1]), unit * TOLERANCE)

    def __str__(self) -> str:
        return self.text
