"""The documentation's links lead somewhere, and its lists are complete."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from django.core.management import get_commands, load_command_class
from django.dispatch import Signal

from django_txmsg import conf, errors, signals, wire
from tests.docs.pages import HOME, PAGES, ROOT, SITE, anchors, blocks, here, links
from tests.docs.test_commands import options

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, anchor = here(link).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in anchors(path)
        ):
            broken.append(link)

    assert broken == []


def test_the_projects_addresses_are_its_home() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    urls = project.partition("[project.urls]")[2].partition("\n\n")[0]

    assert urls.count(f'= "{HOME}') == urls.count(" = ") - 1 >= 3
    assert f'Documentation = "{SITE}"' in urls


def test_every_setting_is_described_with_its_default() -> None:
    page = (REFERENCE / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z0-9_.]+)` \| `([^`]+)` \|", page, re.MULTILINE))

    assert rows == dict(_defaults(conf.Settings(), ""))


def _defaults(settings: Any, prefix: str) -> list[tuple[str, str]]:
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found += _defaults(value, f"{field.name}.")
        else:
            shown = repr(value).replace("'", '"')
            found.append((f"{prefix}{field.name}", shown))
    return found


def test_every_command_and_option_is_described() -> None:
    page = (REFERENCE / "commands.md").read_text()
    ours = [name for name, app in get_commands().items() if app == "django_txmsg"]
    django = {"--help", "--version", "--verbosity", "--settings", "--pythonpath",
              "--traceback", "--no-color", "--force-color",
              "--skip-checks"}  # fmt: skip

    assert len(ours) >= 5
    for name in ours:
        _, _, section = page.partition(f"\n## `{name}")
        section = section.partition("\n## ")[0]
        assert section, name
        if name == "txmsg":
            section = page  # it runs the other commands, too
        if name == "pipeline":
            continue  # its jobs have a page of their own
        parser = load_command_class("django_txmsg", name).create_parser("", name)
        found = {one for one in options(parser) if one.startswith("--")} - django
        assert [one for one in found if f"`{one}" not in section] == [], name


def test_every_signal_is_described_with_its_arguments() -> None:
    page = (REFERENCE / "signals.md").read_text()
    source = Path(signals.__file__).read_text()
    for name, value in vars(signals).items():
        if not isinstance(value, Signal):
            continue
        assert f"`{name}`" in page, name
        docstring = re.search(
            rf'^{name} = _Signal\(\)\n"""(.*?)"""', source, re.S | re.M
        )
        assert docstring is not None
        row = next(row for row in page.splitlines() if row.startswith(f"| `{name}`"))
        said = docstring[1].partition("Arguments:")[2]
        for argument in re.findall(r"\b[a-z_]+\b(?=[,.\s(])", _without_asides(said)):
            assert f"`{argument}`" in row, (name, argument)


def _without_asides(text: str) -> str:
    return re.sub(r"\([^)]*\)", "", re.sub(r'"[^"]*"', "", text)).partition("(")[0]


def test_every_error_is_described() -> None:
    page = (REFERENCE / "errors.md").read_text()
    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    ]

    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_header_on_the_wire_is_described() -> None:
    page = (REFERENCE / "wire.md").read_text()
    headers = [
        value for value in vars(wire).values() if str(value).startswith("txmsg-")
    ]

    assert len(headers) >= 5
    assert [name for name in headers if f"`{name}`" not in page] == []


def test_the_public_names_are_in_the_api() -> None:
    import django_txmsg

    page = (REFERENCE / "api.md").read_text()

    assert [name for name in django_txmsg.__all__ if name not in page] == []
    assert get_type_hints(conf.Settings)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_first_example_has_a_consumer_for_its_message(name: str) -> None:
    """Each message that the page sends has a consumer. Otherwise the console would show
    the reader an alarm that never ends."""
    code = "\n".join(b.code for b in blocks(ROOT / name) if b.language == "python")
    sent = set(re.findall(r'send_message\(\s*"([^"]+)"', code))
    sent |= set(re.findall(r'"destination": "([^"]+)"', code))
    consumed = set(re.findall(r'@stage\(\s*"([^"]+)"', code))
    assert sent
    assert sent <= consumed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_row_belongs_to_a_table(page: Path) -> None:
    """No row of a table follows an empty line. Such a row would be shown as text."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.M)
    tables = re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE)

    headless = [one for one in tables if not re.match(r".*\n *\|[-:| ]+\|\n", one)]
    assert headless == []
