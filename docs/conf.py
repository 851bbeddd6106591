"""The documentation as a site: `make docs` builds it, and every warning is an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import django
from django.conf import settings

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
    """Bring along what pages show by HTML, and each page's Markdown."""
    app.connect("build-finished", bring_along)


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
