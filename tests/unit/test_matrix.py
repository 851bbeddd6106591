"""The Pythons and Djangos that are promised are those that are run."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.faults import ROOT

PAIRS = """
import sys
sys.path.insert(0, "scripts")
import matrix
print(*(f"{pair.python}/{pair.django}" for pair in matrix.PAIRS))
"""
PYSPARKS = PAIRS.replace(
    'f"{pair.python}/{pair.django}" for pair in matrix.PAIRS',
    "pair.pyspark for pair in matrix.PYSPARKS",
)
#: The environment of `make test`: what most machines have, and the oldest Django.
AT_HOME = "3.11/5.2"


def test_every_classifier_is_run() -> None:
    said = subprocess.check_output([sys.executable, "-c", PAIRS], cwd=ROOT, text=True)
    run = {tuple(pair.split("/")) for pair in [*said.split(), AT_HOME]}
    promised = (ROOT / "pyproject.toml").read_text()

    pythons = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', promised)
    djangos = re.findall(r'"Framework :: Django :: (\d\.\d+)"', promised)
    assert set(pythons) == {python for python, _ in run}
    assert set(djangos) == {django for _, django in run}


def test_every_pyspark_of_the_extra_is_run() -> None:
    said = subprocess.check_output(
        [sys.executable, "-c", PYSPARKS], cwd=ROOT, text=True
    )
    promised = re.search(
        r'"pyspark\[sql\]>=4\.(\d+),<4\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    )

    assert promised
    *earlier, _ = range(int(promised[1]), int(promised[2]))
    assert sorted(said.split()) == [f"4.{minor}" for minor in earlier]
