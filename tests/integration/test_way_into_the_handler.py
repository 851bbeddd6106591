"""A reader who follows a delivery to its handler opens few files, and rarely returns to
one. The test counts the files and the returns while a delivery runs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from django_txmsg import consuming
from django_txmsg.consuming.stage_thread import StageThread
from tests.running import committing, declared, put, thread_of

pytestmark = committing

HERE = consuming.__path__[0]
MOST_FILES, MOST_RETURNS = 10, 12


class _Way:
    """The files of `consuming/` that execute code between `StageThread._work()` and the
    handler, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._entered = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is StageThread._work.__code__:
            self._entered = True
        there: FrameType | None = frame
        if event == "return":
            there = frame.f_back
            while there is not None and "django_txmsg" not in there.f_code.co_filename:
                there = there.f_back
        elif event != "call":
            return
        file = "" if there is None else there.f_code.co_filename
        if self._entered and file.startswith(HERE) and self.files[-1:] != [file]:
            self.files.append(file)

    def end(self, message: Any) -> None:
        """Stop recording: the delivery has reached its handler."""
        sys.setprofile(None)


@pytest.mark.parametrize("options", [{}, {"transaction": "none"}, {"ordered": "skip"}])
def test_few_calls_lead_to_the_handler(options: dict[str, Any]) -> None:
    way = _Way()
    with declared(way.end, **options) as stage:
        thread = thread_of(stage)
        try:
            put(stage.destination)
            thread._step()  # connects
            put(stage.destination)
            before = sys.getprofile()
            sys.setprofile(way)
            try:
                thread._step()
            finally:
                sys.setprofile(before)
        finally:
            thread._close()
    files = set(way.files)
    assert 5 <= len(files) <= MOST_FILES
    assert len(way.files) - len(files) <= MOST_RETURNS, way.files
