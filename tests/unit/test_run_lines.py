"""The lines that `txmsg run` prints beside the project's own log."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management.color import no_style

from django_txmsg import signals
from django_txmsg.management.commands._run import Lines

PROCESSED, REDELIVERED = uuid.uuid4(), uuid.uuid4()


@pytest.fixture
def _log_of_its_own() -> Iterator[None]:
    """Make the package's logger log from INFO on, and restore the logger after the
    test."""
    log = signals.log
    before = log.level, log.handlers[:], log.propagate
    log.setLevel(logging.INFO)
    yield
    log.setLevel(before[0])
    log.handlers[:], log.propagate = before[1:]


def lines() -> list[str]:
    """Return the lines that `txmsg run` itself prints about two messages."""
    printed: list[str] = []
    with Lines(printed.append, no_style(), ()).printing():
        signals.announce(
            signals.message_processed,
            id=PROCESSED, stage="shop.pay", destination="shop.pay", attempt=1,
            duration=0.01,
        )  # fmt: skip
        signals.announce(
            signals.message_redelivered,
            id=REDELIVERED, stage="shop.pay", destination="shop.pay", attempt=1,
            delay=1.0, error="ValueError: no",
        )  # fmt: skip
    return printed


@pytest.mark.usefixtures("_log_of_its_own")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("above", [False, True], ids=["own handler", "root's handler"])
def test_a_line_in_the_terminals_log_is_not_printed_again(
    stream: str, above: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(getattr(sys, stream))
    logger = logging.getLogger() if above else signals.log
    logger.addHandler(handler)
    try:
        assert lines() == []
    finally:
        logger.removeHandler(handler)

    logged = getattr(capsys.readouterr(), "out" if stream == "stdout" else "err")
    assert logged.count(str(PROCESSED)) == logged.count(str(REDELIVERED)) == 1


@pytest.mark.usefixtures("_log_of_its_own")
def test_only_what_the_terminals_log_leaves_out_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    signals.log.addHandler(handler)

    (printed,) = lines()

    logged = capsys.readouterr().err
    assert str(PROCESSED) in printed
    assert str(PROCESSED) not in logged
    assert logged.count(str(REDELIVERED)) == 1


@pytest.mark.usefixtures("_log_of_its_own")
def test_a_log_in_a_file_leaves_the_lines_on_the_terminal(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "txmsg.log")
    signals.log.addHandler(handler)

    printed = lines()

    handler.close()
    assert len(printed) == 2
    assert str(PROCESSED) in (tmp_path / "txmsg.log").read_text()


@pytest.mark.usefixtures("_log_of_its_own")
def test_a_logger_that_keeps_to_itself_leaves_the_lines_to_us() -> None:
    root = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root)
    signals.log.propagate = False
    try:
        assert len(lines()) == 2
    finally:
        logging.getLogger().removeHandler(root)
