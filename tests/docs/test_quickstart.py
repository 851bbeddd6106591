"""README and quickstart, typed to the letter in a new folder, print what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.typing import Typist

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_a_newcomer_sees_what_the_page_says(name: str, tmp_path: Path) -> None:
    typist = Typist(tmp_path)
    typist.follow(ROOT / name)

    # It ends well: nothing is waiting that nobody explained.
    assert len(typist.typed) >= 5
    typist._run("python manage.py check --fail-level WARNING", [], name)
    typist._run("python manage.py message_status", [], name)
