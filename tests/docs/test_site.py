"""The documentation builds as a site, without a warning, and leads to every page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    built = subprocess.run(
        [*command, "-b", "html", str(ROOT / "docs"), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return target


def test_the_menu_leads_to_every_page(site: Path) -> None:
    menu = (site / "index.html").read_text() + (
        site / "decisions" / "index.html"
    ).read_text()
    absent = [
        page.relative_to(ROOT / "docs").with_suffix(".html").name
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
        and page.relative_to(ROOT / "docs").with_suffix(".html").name not in menu
    ]

    assert absent == []


def test_the_api_page_names_what_the_package_offers(site: Path) -> None:
    import django_txmsg

    page = (site / "reference" / "api.html").read_text()
    shown = set(re.findall(r'id="django_txmsg\.(\w+)"', page))

    assert set(django_txmsg.__all__) <= shown


def test_no_page_links_out_of_the_site_to_a_file() -> None:
    out = {
        f"{page.name}: {link}"
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
        for link in links(page)
        if "://" not in link
        and not (page.parent / link.partition("#")[0])
        .resolve()
        .is_relative_to(ROOT / "docs")
    }

    assert out == set()
