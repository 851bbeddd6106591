"""The documentation as a site: `make docs` builds it, and every warning is an error."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def setup(app: object) -> None:
    """Bring the pictures along: pages show them by HTML, for light and dark readers."""
    images = Path(__file__).parent / "images"

    def copy(app: object, error: Exception | None) -> None:
        if error is None:
            shutil.copytree(images, Path(app.outdir) / "images", dirs_exist_ok=True)

    app.connect("build-finished", copy)
