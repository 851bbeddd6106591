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


def run(page: Path) -> Iterator[list[str]]:
    """Return the words of each command in a block of a page."""
    for block in blocks(page):
        if block.language in ("console", ""):
            for line in block.code.replace("\\\n", "").splitlines():
                found = SHOWN.match(line.removeprefix("$ "))
                if found and (line.startswith("$ ") or not block.language):
                    yield shlex.split(found[1], comments=True)


def named(page: Path) -> Iterator[list[str]]:
    """Return the words of each command in the text of a page, which may be a part of a
    command only."""
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
    for name, *words in [*run(page), *named(page)]:
        if name not in known:
            wrong.append(name)
            continue
        app = known[name]
        command = app if isinstance(app, BaseCommand) else load_command_class(app, name)
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown = given - options(command.create_parser("manage.py", name))
        wrong += [f"{name} {option}" for option in unknown]

    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_our_commands_accept_the_words_of_a_block(page: Path) -> None:
    for name, *words in run(page):
        app = get_commands()[name]
        cut = any("…" in word for word in words)
        if isinstance(app, str) and app.startswith("django_txmsg") and not cut:
            command = load_command_class(app, name)
            command._called_from_command_line = False  # raises CommandError
            command.create_parser("manage.py", name).parse_args(words)


def test_commands_are_found_on_the_pages() -> None:
    assert sum(len(list(run(page))) for page in PAGES) > 60
