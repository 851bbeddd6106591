"""`txmsg alive` reads what a process has written about itself."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command, load_command_class
from django.core.management.base import CommandError
from django.test import override_settings

from django_txmsg.monitoring import process_states
from django_txmsg.runtime import liveness
from tests.faults import wait_until


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process_states, "INTERVAL", 0.01)
    yield
    liveness.ended()


def test_alive_is_answered_although_a_system_check_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    liveness.begin("loop")
    command = load_command_class("django_txmsg", "txmsg")
    failing = override_settings(FILE_UPLOAD_TEMP_DIR="/nowhere")  # files.E001
    with process_states.written(), failing:
        # As from the command line: call_command() would skip the checks.
        command.run_from_argv(["manage.py", "txmsg", "alive", "--ready"])
    assert capsys.readouterr().out == f"Alive: {os.getpid()}.\n"


@pytest.mark.django_db(transaction=True)
def test_without_a_temporary_directory_a_worker_runs_and_alive_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    nowhere = ["/nowhere"]
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: nowhere)

    call_command("relay", once=True, verbosity=0)

    assert "No usable temporary directory found in ['/nowhere']" in caplog.text
    assert "Set TMPDIR" in caplog.text
    with pytest.raises(CommandError, match="No usable temporary directory"):
        call_command("txmsg", "alive")


def test_a_short_state_is_read_after_a_long_one() -> None:
    liveness.begin("ü" * 300)
    with process_states.written():
        liveness.begin("short")

        def read() -> bool:
            state = process_states.read(os.getpid())
            return state is not None and state.loop == "short"

        wait_until(read, deadline=10)


@pytest.mark.parametrize(
    ("state", "known"),
    [({"ready": True, "loop": "a", "silent": 0.0, "new": 1}, True), ({}, False)],
)
def test_a_state_of_another_version_is_read_if_it_has_the_fields(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], known: bool
) -> None:
    monkeypatch.setattr(process_states, "_write", lambda file: None)
    with process_states.written():
        path = process_states.directory() / str(os.getpid())
        path.write_text(json.dumps({"at": time.monotonic(), "state": state}))
        assert (process_states.read(os.getpid()) is not None) == known


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_link_of_another_user_is_refused(tmp_path: Path) -> None:
    link, ours = process_states.directory().parent, tmp_path / "ours"
    ours.mkdir()
    link.symlink_to(ours)
    os.lchown(link, 65534, 65534)

    with (
        pytest.raises(PermissionError, match="belongs to another user"),
        process_states.written(),
    ):
        pass
    assert not [*ours.iterdir()]
