"""The supervisor of `--processes`, without child processes."""

from __future__ import annotations

import sys

import pytest

from django_txmsg.management.commands._supervisor import Supervisor


def test_a_child_that_cannot_be_started_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    supervisor = Supervisor(1)
    (slot,) = supervisor.slots
    for pause in ("1", "2", "4"):
        slot.start_at = 0.0
        supervisor._look(slot)
        assert f"/nowhere/python'; next try in {pause} s" in caplog.text
    assert not supervisor.ready
    slot.failures, slot.start_at = 5_000, 0.0
    supervisor._look(slot)
    assert "next try in 30 s" in caplog.text
