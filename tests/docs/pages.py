"""The pages of the documentation, and the code they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Where the project is at home, and how a file of it is addressed there.
HOME = "https://github.com/django-txmsg/django_txmsg"
#: Where CI publishes docs/ as a site.
SITE = "https://django-txmsg.github.io/django_txmsg/"
_AT_HOME = re.compile(
    rf"{HOME}/(?:blob|tree)/main/"
    r"|https://raw\.githubusercontent\.com/django-txmsg/django_txmsg/main/"
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]

#: A block that cannot run in a test has a comment above it that says why.
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
_BLOCK = re.compile(r"^( *)```(\w*)[^\n`]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One piece of code of a page."""

    language: str
    code: str
    line: int
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    """Return the fenced blocks of a page, in their order."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        before = text[: found.start()]
        indent = len(found[1])
        code = "".join(line[indent:] for line in found[3].splitlines(keepends=True))
        yield Block(
            language=found[2],
            code=code,
            line=before.count("\n") + 2,
            runs=not NOT_RUN.search(before),
        )


def links(page: Path) -> Iterator[str]:
    """Return the targets of a page's links. Links in code blocks do not count."""
    text = _BLOCK.sub("", page.read_text())
    for found in re.finditer(r"\]\(([^)\s]+)\)|\bsrc(?:set)?=\"([^\"]+)\"", text):
        yield found[1] or found[2]
    named = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE))
    for label in re.findall(r"\]\[([^]\"]+)\]", text):
        yield named.get(label, label)


def here(link: str) -> str:
    """Return the path of the file if the link leads to one of our files on GitHub.
    Return any other link unchanged."""
    found = _AT_HOME.match(link)
    return str(ROOT / link[found.end() :]) if found else link


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = _BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in headings
    }


#: Pages that are projects of their own. The one that needs a broker's certificates is
#: followed by test_secure_the_broker.py.
HOW_TO = [
    page
    for page in PAGES
    if page.parent.name == "how-to"
    and page.stem != "secure-the-broker"
    and any(block.language == "python" and block.runs for block in blocks(page))
]
