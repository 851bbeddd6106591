"""State shared by the scripted broker's connections: script, store, loop and
settings."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .loop import Loop
from .profiles import Profile
from .record import Record
from .script import Script
from .store import Store, StoredMessage


@dataclass(frozen=True, slots=True)
class Split:
    """How written bytes are split, with a pause after each piece."""

    every: int | None = None
    at: tuple[int, ...] = ()
    pause: float = 0.0

    def pieces(self, data: bytes) -> list[bytes]:
        """Split bytes written together."""
        if self.every:
            return [data[i : i + self.every] for i in range(0, len(data), self.every)]
        borders = [0, *(b for b in sorted(self.at) if 0 < b < len(data)), len(data)]
        return [data[a:b] for a, b in itertools.pairwise(borders)]


class BrokerState(Record):
    """The broker without its sockets; used only with the lock held."""

    def __init__(
        self,
        profile: Profile,
        *,
        versions: Sequence[str],
        users: Mapping[str, str] | None,
        heart_beat: tuple[int, int] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        """See ``ScriptedBroker``."""
        super().__init__()
        self.profile, self.versions, self.users = profile, versions, users
        self.heart_beat, self.tls = heart_beat, tls
        self.loop = Loop(self.changed, self.failed)
        self.script = Script()
        self.store = Store()
        self.split = Split()
        self.silent = False

    def is_topic(self, headers: Mapping[str, str]) -> bool:
        """Whether a frame's destination is a topic, according to the profile."""
        if not self.profile.routes_by_header:
            return headers.get("destination", "").startswith("/topic/")
        routing = headers.get("destination-type", headers.get("subscription-type"))
        return routing != "ANYCAST"

    def store_message(self, message: StoredMessage) -> None:
        """Put a message into its destination."""
        if self.is_topic({**message.headers, "destination": message.destination}):
            self.store.publish(message)
        else:
            self.store.queue(message.destination).put(message)
