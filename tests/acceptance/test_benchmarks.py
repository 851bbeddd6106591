"""Every benchmark runs, and all results are in one table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_benchmark_has_rows_in_the_table() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| .* \| \d+\.\d\d \| .*\|$", result.stdout, re.MULTILINE)
    assert len(rows) > 25
