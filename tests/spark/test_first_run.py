"""The commands of the first-run page print what the page shows. They are executed after
the commands of the quickstart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.typing import Typist
from tests.faults import wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.matrix]


def test_the_first_run_prints_what_its_page_says(tmp_path: Path) -> None:
    with Typist(tmp_path, Path(sys.executable).parent) as typist:
        typist.follow(ROOT / "docs" / "quickstart.md", until="## Part 3")
        run = "python manage.py txmsg run --reload"
        wait_until(lambda: typist.keeps_its_promises(run), deadline=60)
        typist.follow(ROOT / "docs" / "how-to" / "pipeline.md")

        assert (tmp_path / "report.html").exists()
        assert typist.typed[-1].startswith("python manage.py pipeline replay")
