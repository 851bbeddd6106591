"""Turns a page into a project: its blocks, in order, become a user's files.

Settings go to `settings.py`, URL patterns to `shop/urls.py`, declarations to
`shop/stages.py`, and test cases to `test_page.py`. All other code becomes the body of
one test in `test_page.py`. But if a block begins with the name of a file, such as
`# shop/tasks.py`, the block goes to that file. Nothing else is configured, stubbed or
overridden.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import django

from tests.docs.pages import ROOT, Block, blocks

#: What `startproject` and `startapp` leave, as far as it is needed.
FILES = {
    "manage.py": """\
import os, sys
from django.core.management import execute_from_command_line
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
execute_from_command_line(sys.argv)
""",
    "settings.py": """\
import os
SECRET_KEY = "of a project that is thrown away"
USE_TZ = True
APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions",
        "django.contrib.messages", "django.contrib.admin", "shop", "django_txmsg"]
INSTALLED_APPS = list(APPS)
MIDDLEWARES = ["django.contrib.sessions.middleware.SessionMiddleware",
              "django.contrib.auth.middleware.AuthenticationMiddleware",
              "django.contrib.messages.middleware.MessageMiddleware"]
MIDDLEWARE = list(MIDDLEWARES)
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates",
              "APP_DIRS": True, "OPTIONS": {"context_processors": [
                  "django.template.context_processors.request",
                  "django.contrib.auth.context_processors.auth",
                  "django.contrib.messages.context_processors.messages"]}}]
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3",
                         "TEST": {"NAME": "test.sqlite3"}},
             "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": "other.sqlite3",
                       "TEST": {"NAME": "test_other.sqlite3"}}}
CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "amqp://127.0.0.1:1//")
""",
    "shop/__init__.py": "",
    "shop/urls.py": """\
from django.contrib import admin
from django.urls import path
urlpatterns = [path("admin/", admin.site.urls)]
""",
    "shop/models.py": """\
from django.db import models
class Order(models.Model):
    number = models.CharField(max_length=40, unique=True)
    total = models.DecimalField(max_digits=12, decimal_places=2, default=0)
    note = models.TextField(default="")
    charged = models.BooleanField(default=False)
""",
    "shop/stages.py": "",
    "pytest.ini": """\
[pytest]
DJANGO_SETTINGS_MODULE = settings
pythonpath = .
filterwarnings = ignore::UserWarning:celery
""",
}
#: Behind all settings: what a page shows of a list does not take the rest away.
SETTINGS_END = """
def _whole(own, shown):
    return [*own, *(one for one in shown if one not in [*own, ...])]
INSTALLED_APPS = _whole(APPS, INSTALLED_APPS)
MIDDLEWARE = _whole(MIDDLEWARES, MIDDLEWARE)
"""
TEST_OF_LINES = """

@pytest.mark.django_db(transaction=True, databases="__all__")
def test_lines():
"""
#: What is a setting, of the names that pages assign.
SETTINGS = {"TXMSG", "TASKS", "LOGGING", "DATABASES", "INSTALLED_APPS", "MIDDLEWARE"}
#: Calls that declare.
DECLARING = {"every"}
_FILE = re.compile(r"# (\S+\.py)\n")


@dataclass
class Project:
    """The project that is written from a page, and commands to run it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    _imports: list[str] = field(default_factory=list)
    #: What `shop/stages.py` declares, by name: a later block edits an earlier one's.
    _declared: dict[str, str] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)

    def follow(self, page: Path) -> None:
        """Write the page's files."""
        for name, text in FILES.items():
            self._append(name, text)
        for block in blocks(page):
            if block.language == "python" and block.runs:
                self._write(block, f"{page.name}:{block.line}")
        self._append("settings.py", SETTINGS_END)
        declared = [*self._imports, *self._declared.values()]
        self._append("shop/stages.py", "\n\n".join(declared))
        body = "".join(f"    {line}\n" for line in self._lines) or "    pass\n"
        self._append("test_page.py", f"{TEST_OF_LINES}{body}")

    def run(self, *arguments: str) -> str:
        """Run Python with these arguments, and check that it succeeds."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environ(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}"
        return done.stdout

    def environ(self) -> dict[str, str]:
        """Return the environment variables that a user would have."""
        ours = ("DJANGO_", "TXMSG_", "PYTEST_", "COVERAGE_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return {
            **kept,
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
            **self.environment,
        }

    def _write(self, block: Block, where: str) -> None:
        code = block.code
        if django.VERSION < (6, 0):  # as the page says
            code = code.replace("from django.tasks import", "from django_tasks import")
        named = _FILE.match(code)
        tree = ast.parse(code, where)
        if named is not None:
            self._append(named[1], code[named.end() :])
        elif _is_settings(tree):
            self._append("settings.py", code)
        elif any("urlpatterns" in _targets(one) for one in tree.body):
            self._append("shop/urls.py", code)
        else:
            self._part(tree, code)

    def _part(self, tree: ast.Module, code: str) -> None:
        """Distribute a block's statements over the project's files."""
        executing = False
        for node in tree.body:
            kind, source = _kind(node), _source(node, code)
            executing = executing or kind == "executed"
            if kind == "tests":
                self._append("test_page.py", f"\n{source}\n")
            elif kind == "executed" or (executing and isinstance(node, ast.Assign)):
                self._lines += source.splitlines()
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._imports.append(source)
            else:
                name = getattr(node, "name", None) or ", ".join(_targets(node))
                named = name != "other"
                self._declared[name if named else f"line {len(self._declared)}"] = (
                    source
                )

    def _append(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "test_page.py" and not path.exists():
            path.write_text("import pytest\nfrom shop.stages import *\n")
        with path.open("a") as file:
            file.write(f"\n{text}")


def _is_settings(tree: ast.Module) -> bool:
    """Return whether a block contains only settings."""
    assigned = {name for one in tree.body for name in _targets(one)}
    return bool(assigned) and assigned <= SETTINGS


def _targets(node: ast.stmt) -> Iterator[str]:
    targets = {
        ast.Assign: lambda one: one.targets,
        ast.AugAssign: lambda one: [one.target],
    }.get(type(node), lambda one: [ast.Name("other")])(node)
    for target in targets:
        while isinstance(target, ast.Subscript):
            target = target.value
        yield target.id if isinstance(target, ast.Name) else "other"


def _kind(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        return (
            "tests" if any(base.endswith("TestCase") for base in bases) else "declared"
        )
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "tests" if node.name.startswith("test_") else "declared"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "declared" if ast.unparse(node.value.func) in DECLARING else "executed"
    declares = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    return "declared" if isinstance(node, declares) else "executed"


def _source(node: ast.stmt, code: str) -> str:
    """Return a statement with its decorators."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(code.splitlines()[first - 1 : node.end_lineno])
