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
