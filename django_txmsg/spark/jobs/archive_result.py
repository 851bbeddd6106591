"""The batches that an archive has written, and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..lakefile import LakeFile
from ..ledger import Batch
from ..standstill import Held


@dataclass(frozen=True)
class Written:
    """A batch with written and proven files."""

    batch: Batch
    files: list[LakeFile]
    rows: int
    checksum: int


@dataclass
class ArchiveResult:
    """The result of an archive, and where its time went."""

    rows: int = 0
    batches: int = 0
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held: Held = field(default_factory=lambda: Held(0))
    seconds: dict[str, float] = field(default_factory=dict)

    def spent(self, step: str, since: float) -> None:
        """Add the time since `since` to a step's."""
        self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - since
