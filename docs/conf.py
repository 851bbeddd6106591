"""The documentation as a site: `make docs` builds it, and every warning is an error."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from docutils import nodes

import django_txmsg

# The API's pages are made from the docstrings, so the package is imported.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django_txmsg",
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()

project = "django_txmsg"
version = release = django_txmsg.__version__
copyright = "The django_txmsg contributors"
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["build"]
# References such as [states](states.md#outbox) are checked, the heading too.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# The page of failures is generated, and begins its sections at the third level.
suppress_warnings = ["myst.header"]
# Docstrings are Markdown's dialect: `name` is code.
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
add_module_names = False
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"django_txmsg {release}"
html_copy_source = False
# The reader's browser draws the diagrams, by a script of the site's own: no third party
# is asked. `make docs` fetches it; without it a diagram shows its source.
mermaid_use_local = "mermaid/mermaid.esm.min.mjs"

DOCS = Path(__file__).parent
MERMAID = DOCS.parent / "build" / "mermaid" / "package" / "dist"


def setup(app: Any) -> None:
    """Link the words of the glossary, and copy the files that the site needs."""
    app.connect("doctree-resolved", link_words)
    app.connect("build-finished", bring_along)


GLOSSARY = "reference/glossary"
#: Words that also occur in a general sense, so their first use is not linked.
AMBIGUOUS = {
    "archive", "batch", "blocked", "cancel", "join", "key", "rate", "refuse", "run",
    "session", "signal", "step", "store",
}  # fmt: skip
#: Where a word is not linked.
APART = (
    nodes.title, nodes.reference, nodes.literal, nodes.FixedTextElement, nodes.thead,
    nodes.raw,
)  # fmt: skip


def link_words(app: Any, page: nodes.document, name: str) -> None:
    """Link each word of the glossary from its first use on a page. In the Markdown
    itself, that many links would hide the text."""
    if name == GLOSSARY:
        for row in _rows(page):
            row["ids"].append(_anchor(row[0].astext()))
        return
    if name == "reference/api":
        return  # its texts are docstrings
    words = {
        row[0].astext(): row[1].astext() for row in _rows(app.env.get_doctree(GLOSSARY))
    }
    left = {word: words[word] for word in words if word not in AMBIGUOUS}
    address = app.builder.get_relative_uri(name, GLOSSARY)
    for text in list(page.findall(nodes.Text)):
        parent: Any = text.parent
        outer = parent
        while outer is not None and not isinstance(outer, APART):
            outer = outer.parent
        if outer is not None:
            continue
        parts: list[nodes.Node] = []
        rest = text.astext()
        while left and (found := _any_of(left).search(rest)):
            word = found[1].lower()
            link = nodes.reference("", found[0], internal=True)
            link["refuri"] = f"{address}#{_anchor(word)}"
            link["reftitle"] = left.pop(word)
            parts += [nodes.Text(rest[: found.start()]), link]
            rest = rest[found.end() :]
        if parts:
            parent.replace(text, [*parts, nodes.Text(rest)])


def _rows(page: nodes.document) -> list[nodes.row]:
    return [
        row for row in page.findall(nodes.row) if isinstance(row.parent, nodes.tbody)
    ]


def _anchor(word: str) -> str:
    return "word-" + word.lower().replace(" ", "-")


def _any_of(words: dict[str, str]) -> re.Pattern[str]:
    longest = "|".join(sorted(words, key=len, reverse=True))
    return re.compile(rf"\b({longest})(?:s|d|ed|(?<=ch)es)?\b", re.IGNORECASE)


def bring_along(app: Any, error: Exception | None) -> None:
    """Copy pictures, the diagrams' script and the Markdown, and list the pages."""
    if error is not None:
        return
    site = Path(app.outdir)
    shutil.copytree(DOCS / "images", site / "images", dirs_exist_ok=True)
    if MERMAID.exists():
        script, parts = "mermaid.esm.min.mjs", "chunks/mermaid.esm.min"
        target = site / "_static" / "mermaid"
        shutil.copytree(MERMAID / parts, target / parts, dirs_exist_ok=True)
        shutil.copy(MERMAID / script, target)
    pages = sorted(app.env.found_docs, key=lambda name: (name != "index", name))
    for page in pages:
        shutil.copy(DOCS / f"{page}.md", site / f"{page}.md")
    listed = [f"- [{app.env.titles[page].astext()}]({page}.md)" for page in pages]
    (site / "llms.txt").write_text("\n".join([LLMS, *listed, ""]))


#: What the list of all pages begins with: https://llmstxt.org
LLMS = """\
# django_txmsg

> A Django app for transactional messaging: a message is sent if, and only if, the
> transaction that stored it commits, and its effect in the receiver's database happens
> once. Brokers: RabbitMQ (AMQP, STOMP), ActiveMQ (STOMP), or the database.

## Pages
"""
