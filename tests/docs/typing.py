"""Types a page: writes its files, runs its commands, compares what they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import Block, blocks

#: What a test cannot type: it is in the suite's environment already, or never ends.
UNTYPED = ("python -m venv", "pip install", "python manage.py createsuperuser",
           "python manage.py runserver")  # fmt: skip


@dataclass
class Typist:
    """Somebody who follows a page to the letter, in a new folder."""

    folder: Path
    typed: list[str] = field(default_factory=list)

    def follow(self, page: Path) -> None:
        """Do what the page says, block by block."""
        for block in blocks(page):
            if block.language == "python":
                self._write(block)
            elif block.language == "console":
                for command, expected in _commands(block):
                    if not command.startswith(UNTYPED):
                        self._run(command, expected, f"{page.name}:{block.line}")

    def _write(self, block: Block) -> None:
        first, _, rest = block.code.partition("\n")
        found = re.fullmatch(r"# (\S+\.py)(, at the end)?", first)
        if found is None:
            return
        with (self.folder / found[1]).open("a" if found[2] else "w") as file:
            file.write(rest)

    def _run(self, command: str, expected: list[str], where: str) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DJANGO_", "PYTHON", "TXMSG_"))
        }
        here = Path(sys.executable).parent
        kept["PATH"] = f"{here}{os.pathsep}{kept['PATH']}"
        shell = shutil.which("sh")
        assert shell is not None
        done = subprocess.run(
            [shell, "-c", command],
            cwd=self.folder,
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{where}: {command}\n{done.stdout}"
        self.typed.append(command)
        printed = done.stdout.splitlines()
        for line in expected:
            pattern = ".*".join(map(re.escape, line.split("…")))
            while printed and not re.fullmatch(pattern, printed[0].strip()):
                printed.pop(0)
            assert printed, f"{where}: {command}\nno line {line!r} in\n{done.stdout}"
            printed.pop(0)


def _commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Return each command of a block with the lines that it is said to print."""
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
