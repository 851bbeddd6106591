"""Hop 4: selects the messages of a batch that may be sent now, so that the messages of
each key stay in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

Error = TypeVar("Error")


class KeyOrder(Generic[Error]):
    """Selects the messages of a batch that may be sent now. The second message of a key
    may be sent only after the broker has stored the first message.

    `keys` and `outcomes` have an item for each message of the batch. `indices` are the
    messages to send. `held` creates the outcome of a message that may not be sent,
    because an earlier message of its key is not stored.
    """

    def __init__(
        self,
        indices: Container[int],
        keys: Sequence[str],
        outcomes: list[Error | None],
        held: Callable[[str], Error],
    ) -> None:
        self.outcomes, self._keys, self._held = outcomes, keys, held
        self.ready: deque[int] = deque()
        #: Indices without an outcome.
        self.open: set[int] = set()
        self._waiting: dict[str, deque[int]] = {}
        spoilt: set[str] = set()
        for index, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if outcome is not None:
                spoilt.add(key)
            elif index not in indices:
                continue
            elif key and key in spoilt:
                self._hold(index)
            elif key and key in self._waiting:
                self._waiting[key].append(index)
                self.open.add(index)
            else:
                self.ready.append(index)
                self.open.add(index)
                if key:
                    self._waiting[key] = deque()

    def settle(self, index: int, error: Error | None) -> None:
        """Record the outcome of a message. If the message was stored, release the next
        message of its key. If not, hold back all later messages of its key."""
        self.outcomes[index] = error
        self.open.discard(index)
        waiting = self._waiting.get(self._keys[index])
        if waiting and error is None:
            self.ready.append(waiting.popleft())
        while waiting and error is not None:
            self._hold(waiting.popleft())

    def leave(self, index: int, error: Error) -> None:
        """Record the outcome of a message that will not be sent."""
        if index in self.ready:
            self.ready.remove(index)
        waiting = self._waiting.get(self._keys[index])
        if waiting and index in waiting:
            waiting.remove(index)
        self.settle(index, error)

    def _hold(self, index: int) -> None:
        self.open.discard(index)
        key = self._keys[index]
        self.outcomes[index] = self._held(
            f"The message was not sent: an earlier one of its key {key!r} is not "
            f"stored."
        )
