"""Runs the tests on the other Pythons and Djangos that we promise.

    scripts/matrix.py            the whole suite on each pair
    scripts/matrix.py --newest   what needs no server, on the newest pair that is here
    scripts/matrix.py --pyspark  the pipeline's tests, on each PySpark but the newest

A Python is looked for on PATH and among pyenv's. A missing one is named with the
command that installs it; a run of the whole matrix then fails where CI=true.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import side_by_side

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = (
    "amqp,celery,docs,example,opentelemetry,postgres,prometheus,stomp,tasks,test,typed"
)

#: What `--newest` runs: minutes, beside the halves of `make test`.
SAMPLE = ["-m", "not server and not soak", "tests"]


@dataclass(frozen=True)
class Pair:
    """A Python and a Django, run together."""

    python: str
    django: str
    #: PySpark 4.3 needs Python 3.11.
    spark: bool = True
    #: The PySpark of a pair that runs nothing but the pipeline's tests.
    pyspark: str = ""

    def __str__(self) -> str:
        told = f"Python {self.python} with Django {self.django}"
        return told + f" and PySpark {self.pyspark}" * bool(self.pyspark)

    @property
    def directory(self) -> Path:
        """Where its environment is."""
        name = f"py{self.python}-django{self.django}"
        return ROOT / ".matrix" / (name + f"-spark{self.pyspark}" * bool(self.pyspark))

    def interpreter(self) -> str | None:
        """Find a Python of this version that runs."""
        for candidate in self._candidates():
            told = subprocess.run(
                [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
            )
            if told.stdout.strip() == self.python:
                return candidate
        return None

    def _candidates(self) -> Iterator[str]:
        yield sys.executable
        found = shutil.which(f"python{self.python}")
        if found:  # a shim of pyenv's may be there and refuse to run
            yield found
        root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
        versions = [
            path
            for path in root.glob(f"versions/{self.python}.*")
            if re.fullmatch(r"[\d.]+", path.name)  # no free-threaded build
        ]
        for path in sorted(versions, key=lambda path: int(path.name.split(".")[2])):
            yield str(path / "bin" / "python")

    def how_to_install(self) -> str:
        """Return the command that brings the Python."""
        if shutil.which("pyenv"):
            return f"pyenv install {self.python}"
        by_pyenv = f"pyenv install {self.python}"
        return f"apt-get install python{self.python}-venv, or {by_pyenv}"

    def environment(self, interpreter: str) -> str:
        """Make the environment, unless it is as new as the list of dependencies."""
        python = self.directory / "bin" / "python"
        made = self.directory / ".made"
        listed = ROOT / "pyproject.toml"
        if not made.exists() or made.stat().st_mtime < listed.stat().st_mtime:
            subprocess.run([interpreter, "-m", "venv", str(self.directory)], check=True)
            extras = f"{EXTRAS},spark" if self.spark else EXTRAS
            pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            wanted = ["--editable", f"{ROOT}[{extras}]", f"django=={self.django}.*"]
            if self.pyspark:
                wanted.append(f"pyspark[sql]=={self.pyspark}.*")
            subprocess.run([*pip, *wanted], cwd=ROOT, check=True)
            made.touch()
        return str(python)

    def told(self, python: str) -> str:
        """Return the exact versions, as the environment itself tells them."""
        code = "import django as d, sys; print(sys.version.split()[0], d.__version__)"
        said = subprocess.check_output([python, "-c", code], text=True).split()
        told = f"Python {said[0]} with Django {said[1]}"
        if self.pyspark:
            code = "import pyspark; print(pyspark.__version__)"
            said = subprocess.check_output([python, "-c", code], text=True).split()
            told += f" and PySpark {said[0]}"
        return told

    def commands(self, python: str) -> list[list[str]]:
        """Return what is run on this pair."""
        if self.pyspark:
            return [[python, "-m", "pytest", "tests/spark"]]
        tests = [] if self.spark else ["--ignore=tests/spark"]
        half = ["-m", "database and not soak"]
        spark = [[python, "-m", "pytest", "tests/spark"]] if self.spark else []
        return [
            [python, "-m", "tests.on_postgresql", *half, *tests],
            [python, "-m", "pytest", "--ignore=tests/spark"],
            *spark,
        ]


PAIRS = (
    Pair("3.13", "6.1"),
    Pair("3.12", "6.0"),
    Pair("3.10", "5.2", spark=False),
)
#: The pipeline on the PySparks before the newest, on which the others are.
PYSPARKS = (
    Pair("3.12", "6.0", pyspark="4.2"),
    Pair("3.11", "5.2", pyspark="4.1"),
    Pair("3.10", "5.2", pyspark="4.0"),
)


def newest() -> int:
    """Run the sample on the newest pair whose Python is here."""
    for pair in PAIRS[:2]:
        interpreter = pair.interpreter()
        if interpreter:
            python = pair.environment(interpreter)
            say(f"A sample on {pair.told(python)}:")
            os.execv(python, [python, "-m", "pytest", *SAMPLE])
        say(f"Not run on {pair}: no such Python. To run it: {pair.how_to_install()}")
    return 0


def every(pairs: Sequence[Pair]) -> int:
    """Run what there is to run on every pair whose Python is here."""
    there = [(pair, found) for pair in pairs if (found := pair.interpreter())]
    pythons = [(pair, pair.environment(found)) for pair, found in there]
    # The parts of all pairs in one row, so that the longest leaves no core idle.
    planned = [
        (pair, command) for pair, python in pythons for command in pair.commands(python)
    ]
    codes = side_by_side.run([command for _, command in planned])
    failed = {pair for (pair, _), code in zip(planned, codes, strict=True) if code}
    say("")
    for pair, python in pythons:
        say(f"{pair.told(python)}: {'FAILED' if pair in failed else 'passed'}")
    missing = [pair for pair in pairs if pair not in dict(there)]
    for pair in missing:
        say(f"{pair}: NOT RUN. To run it: {pair.how_to_install()}")
    return int(bool(failed or (missing and os.environ.get("CI") == "true")))


def say(line: str) -> None:
    """Say it before what the tests say."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.chdir(ROOT)
    if sys.argv[1:] == ["--newest"]:
        sys.exit(newest())
    sys.exit(every(PYSPARKS if sys.argv[1:] == ["--pyspark"] else PAIRS + PYSPARKS))
