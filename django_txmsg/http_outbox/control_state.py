"""The state of a control message between two checks of its session."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from django.utils import timezone

from .. import conf
from .control_message import ControlMessage

#: Seconds, beyond the longest lease, after which committed messages that cannot be sent
#: are left to the relay.
PATIENCE = 60.0
#: Number of messages whose checks are remembered. A forgotten one starts anew.
REMEMBERED = 10_000


@dataclass
class Look:
    """How often a session was checked, since when, and until when checking makes
    sense."""

    began: float = field(default_factory=time.monotonic)
    attempts: int = 0
    transit_time: float | None = None
    #: Since when only the dispatch of the messages is outstanding.
    stuck_since: float | None = None

    @property
    def waited(self) -> float:
        """Seconds since the first check."""
        return time.monotonic() - self.began

    def pause(self, first: float, most: float) -> float:
        """Seconds until the next check: doubled each time."""
        return min(most, first * 2.0 ** min(self.attempts - 1, 30))

    def patient(self) -> bool:
        """Whether to wait once more for something that should not take long: the
        process that holds the messages may be dead, and its lease as long as a
        relay's."""
        if self.stuck_since is None:
            self.stuck_since = time.monotonic()
        return time.monotonic() - self.stuck_since < conf.get().RELAY.LEASE + PATIENCE


_looks: OrderedDict[str, Look] = OrderedDict()
_lock = threading.Lock()


def remember(control: ControlMessage) -> Look:
    """Count one more check, perhaps the first, and return the state."""
    with _lock:
        look = _looks.pop(control.id, None)
        if look is None:
            since = (timezone.now() - control.sent_at).total_seconds()
            look = Look(transit_time=max(0.0, since))
        _looks[control.id] = look
        while len(_looks) > REMEMBERED:
            _looks.popitem(last=False)
        look.attempts += 1
    return look


def forget(control: ControlMessage) -> None:
    """Remove the state: no further check is needed."""
    with _lock:
        _looks.pop(control.id, None)
