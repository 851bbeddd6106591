"""Executes a page: writes its files, runs its commands, compares their output."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import Block, blocks
from tests.faults import wait_until
from tests.services import free_port

#: Commands that run until they are stopped.
ENDLESS = (
    "python manage.py txmsg run --reload",
    "python manage.py txmsg run",
    "python orders.py txmsg run",
    "python orders.py runserver",
)
#: What a test cannot type: it is in the environment already, asks, or takes a port.
UNTYPED = ("python -m venv", "pip install", "python manage.py createsuperuser",
           "python manage.py runserver")  # fmt: skip


@dataclass
class Typist:
    """Follows a page literally, in a new folder, with the programs of one environment.
    Processes that the page's commands start run until the end of the `with` block."""

    folder: Path
    programs: Path
    typed: list[str] = field(default_factory=list)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: What a command that runs is said to print, sooner or later.
    promised: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    #: In place of the port that `runserver` takes.
    port: int = field(default_factory=free_port)

    def __enter__(self) -> Typist:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(60)

    def follow(self, page: Path, since: str = "", until: str = "") -> dict[str, str]:
        """Execute the page, block by block, from the line `since` to the line `until`.
        Both are optional. Returns the outputs of the commands that have ended."""
        outputs = {}
        text = page.read_text()
        begin = text[: text.index(since)].count("\n")
        end = text[: text.index(until)].count("\n") if until else text.count("\n")
        for block in blocks(page):
            if not begin <= block.line <= end:
                continue
            if block.language == "python":
                self._write(block)
            elif block.language == "console":
                for command, expected in _commands(block):
                    if command in ENDLESS:
                        where = f"{page.name}:{block.line}: {command}"
                        self.promised[command] = (expected, where)
                        self.start(command)
                    elif not command.startswith(UNTYPED):
                        said = self.run(command, f"{page.name}:{block.line}")
                        _compare(said, expected, f"{page.name}:{block.line}: {command}")
                        outputs[command] = said
        return outputs

    def run(self, command: str, where: str = "") -> str:
        """Run a command, check that it succeeds, and return its output."""
        done = subprocess.run(
            [_shell(), "-c", command], cwd=self.folder, env=self._environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{where}: {command}\n{done.stdout}"
        self.typed.append(command)
        return done.stdout

    def _write(self, block: Block) -> None:
        first, _, rest = block.code.partition("\n")
        found = re.fullmatch(r"# (\S+\.py)(, at the end)?", first)
        if found is None:
            return
        with (self.folder / found[1]).open("a" if found[2] else "w") as file:
            file.write(rest)

    def interrupt(self, command: str) -> None:
        """Press Ctrl-C, and check that the command exits without an error."""
        self.running[command].send_signal(signal.SIGINT)
        assert self.running.pop(command).wait(60) == 0, self.said(command)

    def keeps_its_promises(self, command: str = "") -> bool:
        """Return whether the running commands have printed the lines that the page
        shows. Pass `command` to check only that command."""
        for one in [command] if command else self.promised:
            expected, where = self.promised[one]
            try:
                _compare(self.said(one), expected, where)
            except AssertionError:
                return False
        return True

    def said(self, command: str) -> str:
        """Return the output of a running command."""
        return self._output(command).read_text()

    def _output(self, command: str) -> Path:
        return self.folder / f"{command.replace(' ', '-')}.txt"

    def start(self, command: str) -> None:
        """Start a command that runs until it is stopped, and wait for its first line of
        output."""
        typed = command
        if command.endswith("runserver"):
            typed = f"{command} 127.0.0.1:{self.port}"
        with self._output(command).open("wb") as output:
            self.running[command] = subprocess.Popen(
                [_shell(), "-c", f"exec {typed}"], cwd=self.folder,
                env=self._environment(), stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        # Somebody who types sees the first line before going on.
        first = "development server at " if typed != command else "Running: "
        wait_until(
            lambda: first in self.said(command),
            deadline=60,
            message=lambda: self.said(command),
        )

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DJANGO_", "PYTHON", "TXMSG_"))
        }
        kept["PYTHONUNBUFFERED"] = "1"  # as on a terminal
        kept["PATH"] = f"{self.programs}{os.pathsep}{kept['PATH']}"
        return kept


def _shell() -> str:
    found = shutil.which("sh")
    assert found is not None
    return found


def _compare(said: str, expected: list[str], where: str) -> None:
    printed = said.splitlines()
    for line in expected:
        pattern = ".*".join(map(re.escape, line.split("…")))
        while printed and not re.fullmatch(pattern, printed[0].strip()):
            printed.pop(0)
        assert printed, f"{where}\nno line {line!r} in\n{said}"
        printed.pop(0)


def _commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Return each command of a block with its expected output."""
    command, printed = "", list[str]()
    for line in block.code.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, printed
            command, printed = line[2:], []
        else:
            printed.append(line.strip())
    if command:
        yield command, printed
