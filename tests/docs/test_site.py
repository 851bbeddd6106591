"""The documentation builds as a site, without a warning, and leads to every page."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in the same way as by `make docs`. If several processes run the
    tests, only the first of them builds it, because a build takes half a minute."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    target, unfinished = shared / "site", tmp_path_factory.mktemp("unfinished")
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(unfinished)
            unfinished.rename(target)
    return target


def _build(target: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    built = subprocess.run(
        [*command, "-b", "html", str(ROOT / "docs"), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr


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


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    foreign = {
        f"{page.relative_to(site)}: {address}"
        for page in site.rglob("*.html")
        for address in re.findall(
            r"""(?:src=|import\(?\s*|from\s+)["'](https?://[^"']+)""", page.read_text()
        )
    }

    assert foreign == set()
    assert "./_static/mermaid/mermaid.esm.min.mjs" in (
        site / "explanation" / "states.html"
    ).read_text().replace("../", "./")


def test_every_page_has_its_markdown_beside_it_and_is_listed(site: Path) -> None:
    listed = re.findall(r"\]\((.+)\)", (site / "llms.txt").read_text())
    docs = ROOT / "docs"

    assert sorted(listed) == sorted(
        str(page.relative_to(docs)) for page in docs.rglob("*.md")
    )
    for page in listed:
        assert (site / page).read_text() == (docs / page).read_text()


def test_each_word_of_the_glossary_is_linked_once_on_a_page(site: Path) -> None:
    glossary = (site / "reference" / "glossary.html").read_text()
    linked = {
        page.stem: re.findall(r'glossary\.html#(word-[\w-]+)"', page.read_text())
        for page in site.rglob("*.html")
    }

    assert all(len(words) == len({*words}) for words in linked.values())
    assert {"word-relay", "word-dead-letter"} <= {*linked["keep-order"]}
    for word in {word for words in linked.values() for word in words}:
        assert f'id="{word}"' in glossary


def test_search_for_dead_letters_leads_to_their_page(site: Path) -> None:
    """The index of the search has a main entry for "dead letters", which leads to their
    how-to page. Main entries precede all pages that contain the words."""
    index = (site / "searchindex.js").read_text()
    entries = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    (place,) = entries["indexentries"]["dead letters"]
    page, _, main = place

    assert entries["docnames"][page] == "how-to/operate"
    assert main
