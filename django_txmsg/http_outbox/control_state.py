"""What is remembered of a control message between two looks at its session."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from django.utils import timezone

from .. import conf
from .control_message import ControlMessage

#: Seconds, beyond the longest lease, after which messages that are committed and
#: cannot be sent are left to the relay.
PATIENCE = 60.0
#: Messages whose looks are remembered. A forgotten one is looked at as if it were new.
REMEMBERED = 10_000


@dataclass
class Look:
    """How often a session was looked at, since when, and until when it is worth it."""

    began: float = field(default_factory=time.monotonic)
    attempts: int = 0
    transit_time: float | None = None
    #: Since when it is nothing but the messages' dispatch that is waited for.
    stuck_since: float | None = None

    @property
    def waited(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self.began

    def pause(self, first: float, most: float) -> float:
        """Seconds until the next look: doubled each time."""
        return min(most, first * 2.0 ** min(self.attempts - 1, 30))

    def patient(self) -> bool:
        """Whether it is worth while to wait, once more, for what should not take long:
        whoever holds the messages may be dead, and its lease be a relay's."""
        if self.stuck_since is None:
            self.stuck_since = time.monotonic()
        return time.monotonic() - self.stuck_since < conf.get().RELAY.LEASE + PATIENCE


_looks: OrderedDict[str, Look] = OrderedDict()
_lock = threading.Lock()


def remember(control: ControlMessage) -> Look:
    """Count one more look, the first one perhaps, and return all that is known."""
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
    """There is nothing more to look at."""
    with _lock:
        _looks.pop(control.id, None)
