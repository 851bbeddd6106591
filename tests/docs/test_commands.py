"""Each command on a page exists, and has the options that the page shows."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand

from tests.docs.pages import PAGES, ROOT, blocks

SHOWN = re.compile(r"(?:python )?manage\.py ([a-z_]+ ?.*)")


def shown(page: Path) -> Iterator[list[str]]:
    """Return the words of each command on a page."""
    for block in blocks(page):
        if block.language == "console":
            for line in block.code.splitlines():
                found = SHOWN.match(line.removeprefix("$ "))
                if line.startswith("$ ") and found:
                    yield shlex.split(found[1], comments=True)
    for inline in re.findall(r"`manage\.py ([^`]+)`", page.read_text()):
        yield shlex.split(re.sub(r"\[[^]]*\]|…|\\\|\w+", "", inline))


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a command, and of its subcommands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(options, action.choices.values()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist_with_their_options(page: Path) -> None:
    known = get_commands()
    wrong = []
    for name, *words in shown(page):
        if name not in known:
            wrong.append(name)
            continue
        app = known[name]
        command = app if isinstance(app, BaseCommand) else load_command_class(app, name)
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown = given - options(command.create_parser("manage.py", name))
        wrong += [f"{name} {option}" for option in unknown]

    assert wrong == []


def test_commands_are_found_on_the_pages() -> None:
    assert sum(len(list(shown(page))) for page in PAGES) > 60
