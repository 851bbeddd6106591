"""The structure of an admin page, without the contents of its rows."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import django_txmsg

PACKAGE = Path(django_txmsg.__file__).parent
#: Elements whose texts are the page's structure.
TELLING = {"h1", "h2", "h3", "th", "button", "label", "legend", "summary", "dt"}
#: What in them tells of the rows: badges, counts, names, ages.
OF_ROWS = {"span", "small", "code", "time"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.tabs: set[str] = set()
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in TELLING | OF_ROWS or ("class", "txmsg-nav") in attrs:
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            self._inside.remove(tag)

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if "nav" in self._inside and text:
            self.tabs.add(f"tab {text}")
        within = TELLING & {*self._inside[-1:]}
        if within and re.search("[A-Za-z]{3}", text):
            self.found.add(text)


def outline(page: str) -> list[str]:
    """Return the texts of a page's tabs, headings, columns, buttons and labels. Only
    texts of the package are included, not names and texts from rows."""
    content = page.partition('id="content')[2] or page
    reader = _Reader()
    reader.feed("<div " + content)
    written = {text for text in reader.found if text.casefold() in _written()}
    return sorted(written | reader.tabs)


@cache
def _written() -> str:
    """Return every text that the package can show on a page."""
    sources = [*PACKAGE.glob("templates/**/*.html"), *PACKAGE.glob("admin/*.py")]
    sources += PACKAGE.glob("models/*.py")
    text = " ".join(" ".join(path.read_text().split()) for path in sources)
    # Django names a model's page by the class's words.
    classes = re.findall(r"(?<=\bclass )\w+", text)
    pages = [re.sub(r"(?<!^)(?=[A-Z])", " ", name) + "s" for name in classes]
    return f"{text} {text.replace('_', ' ')} {' '.join(pages)}".casefold()


def likeness(one: list[str], other: list[str]) -> float:
    """Return how similar two outlines are, from 0 to 1."""
    return len({*one} & {*other}) / max(1, len({*one} | {*other}))
