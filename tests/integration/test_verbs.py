"""`manage.py txmsg VERB` also accepts Django's own options after the verb."""

from __future__ import annotations

import argparse
import datetime as dt
import io
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from django.core.management import (
    CommandError,
    CommandParser,
    call_command,
    load_command_class,
)

from tests import factories
from tests.sampling import sample

#: What Django's own options are read as.
OPTIONS = [
    (["--verbosity", "0"], {"verbosity": 0}),
    (["-v", "3"], {"verbosity": 3}),
    (["-v0"], {"verbosity": 0}),
    (["--settings", "shop.settings"], {"settings": "shop.settings"}),
    (["--settings=shop.settings"], {"settings": "shop.settings"}),
    (["--pythonpath", "/srv"], {"pythonpath": "/srv"}),
    (["--traceback"], {"traceback": True}),
    (["--no-color"], {"no_color": True}),
    (["--force-color"], {"force_color": True}),
    (["--skip-checks"], {"skip_checks": True}),
]
ALL = {name for _, read in OPTIONS for name in read}
ID = "86f79ce9-ac6e-4a7d-ade4-44f29f8b6b22"
#: What a verb cannot do without, beside what its parser says.
NEEDED = {"reschedule": [ID, "--delay", "1m"]}


def leaves(parser: argparse.ArgumentParser, *before: str) -> Iterator[list[str]]:
    """Return the path to each parser that has no subcommands."""
    found = [
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    if not found:
        yield list(before)
    for action in found:
        for name, below in action.choices.items():
            yield from leaves(below, *before, name)


def parser_of(command: str) -> CommandParser:
    loaded = load_command_class("django_txmsg", command)
    return loaded.create_parser("manage.py", command)


WAYS = [
    ("txmsg", way, *option) for way in leaves(parser_of("txmsg")) for option in OPTIONS
] + [
    (command, way, *option)
    for command in ("dead_letters", "subscriptions", "pipeline")
    for way in leaves(parser_of(command))
    for option in OPTIONS
    if option[0] != ["--skip-checks"]
]


def needed(parser: CommandParser, way: list[str]) -> list[str]:
    """Return a path of subcommands, with the arguments that its last parser
    requires."""
    below: argparse.ArgumentParser = parser
    for name in way:
        (verbs,) = (
            action
            for action in below._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        below = verbs.choices[name]
    given = NEEDED.get(way[0])
    if given is not None:
        return given
    found: list[str] = []
    for action in below._actions:
        choices = list(action.choices or ["1"])
        if not action.option_strings and action.nargs in (None, "+"):
            found.append(str(choices[0]))
        elif action.option_strings and action.required:
            found += [action.option_strings[0], str(choices[0])]
    return found


@pytest.mark.parametrize(
    ("command", "way", "option", "read"),
    # So that each way and each option has its turn.
    list(sample(WAYS, every=7)),
    ids=[" ".join([command, *way, *option]) for command, way, option, _ in WAYS],
)
def test_django_s_own_options_stand_before_and_behind_a_verb(
    command: str, way: list[str], option: list[str], read: dict[str, object]
) -> None:
    parser = parser_of(command)
    line = [*way, *needed(parser, way)]

    def parsed(*arguments: str) -> dict[str, object]:
        found = vars(parser.parse_args(list(arguments)))
        return {name: found.get(name) for name in ALL}

    assert parsed(*line, *option) == {**parsed(*line), **read}
    assert parsed(*option, *line) == parsed(*line, *option)


@pytest.mark.django_db
@pytest.mark.parametrize("given", [["--verbosity", "0"], ["--settings", "x", "-v3"]])
def test_a_verb_runs_with_djangos_own_options(given: list[str]) -> None:
    out = io.StringIO()
    call_command("txmsg", "message_status", *given, stdout=out)
    assert "outbox" in out.getvalue()


def test_the_help_of_a_verb_says_what_the_verb_does() -> None:
    (verbs,) = (
        action
        for action in parser_of("txmsg")._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for listed in verbs._choices_actions:
        shown = verbs.choices[listed.dest].format_help()
        assert listed.help is not None
        assert re.sub(r"\s+", "", listed.help) in re.sub(r"\s+", "", shown)
    shown = verbs.choices["relay"].format_help()
    assert shown.index("--once ") < shown.rindex("--settings ")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("txmsg reschedule {id} --delay nan", "'nan' is not a duration"),
        ("txmsg reschedule {id} --delay 1e99", "'1e99' is not a duration"),
        ("txmsg reschedule {id} --delay=-5s", "'-5s' is not a duration"),
        ("txmsg reschedule {id} --at tomorrow", "'tomorrow' is not an instant"),
        ("txmsg reschedule {id} --at 2026-11-22", "is not an instant with a time zone"),
        ("txmsg audit --deed nope", "'redeliver'"),
        ("txmsg contracts export /nowhere/a.json", "The contract was not written: "),
        ("txmsg bulk pause 7", "7 has ended or is not running, or does not exist."),
        ("txmsg bulk cancel 7", "7 has ended, or does not exist."),
        ("dead_letters mute --above -1", "'-1' is not a whole number"),
        ("txmsg audit --limit -1", "'-1' is not a whole number"),
        ("txmsg bulk list --limit -1", "'-1' is not a whole number"),
        ("txmsg flows list --limit -1", "'-1' is not a whole number"),
        ("dead_letters discard --all --one-first", "unrecognized arguments: --one"),
        ("dead_letters", "required: ACTION"),
        ("txmsg flows cancel --limit 1", "unrecognized arguments: --limit"),
        ("txmsg flows cancel A-1", "'A-1' is not an id."),
        ("txmsg cancel {id} A-1", "'A-1' is not an id."),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(line: str, error: str) -> None:
    with pytest.raises(CommandError, match=re.escape(error)) as refused:
        call_command(*line.format(id=ID).split())
    assert "Deed." not in str(refused.value)
    assert "ACTION, ID" not in str(refused.value)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("words", "options", "problem"),
    [
        ("dead_letters list", {"older_than": "7d"}, ""),
        ("dead_letters list", {"older_than": dt.timedelta(days=7)}, ""),
        ("dead_letters list", {"older_than": "soon"}, "older_than: 'soon' is not"),
        ("dead_letters mute --fingerprint feed --text x", {"duration": "8h"}, ""),
        ("txmsg flows list", {"older_than": "7d"}, ""),
        ("prune_messages", {"batch_size": 0}, "batch_size: must be 1 or more"),
        ("take_over_outbox_pattern", {"batch_size": 0}, "batch_size: must be 1 or mo"),
        ("message_status", {"fail_on": "dead,typo"}, "fail_on: 'typo' is not a kind"),
        ("relay", {"once": True, "batch_size": 0}, "batch_size: must be 1 or more"),
        ("consume", {"once": True, "concurrency": 0}, "concurrency: must be 1 or more"),
        ("dead_letters list", {"limit": "1"}, ""),
        ("dead_letters groups", {"limit": "few"}, "limit: 'few' is not"),
        ("dead_letters list", {"operation": "1"}, ""),
        ("txmsg dead_letters list", {"stage": "", "destination": "orders"}, ""),
        ("dead_letters redeliver --all", {"tolerate": "few"}, "tolerate: 'few' is not"),
        ("dead_letters mute --fingerprint feed --text x", {"above": "3"}, ""),
        ("dead_letters redeliver --all", {"rate": "fast"}, "rate: could not convert"),
        ("txmsg flows cancel --all", {"rate": "fast"}, "rate: could not convert"),
        ("txmsg alive", {"within": "soon"}, "within: could not convert"),
        ("txmsg audit", {"limit": "1"}, ""),
        ("txmsg bulk list", {"limit": "1"}, ""),
        ("txmsg flows list", {"limit": "1"}, ""),
    ],
)
def test_options_given_by_keyword_are_read(
    words: str, options: dict[str, Any], problem: str
) -> None:
    factories.DeadLetterFactory(fingerprint="feed")
    refused = pytest.raises(CommandError, match=problem) if problem else nullcontext()
    with refused:
        call_command(*words.split(), stdout=io.StringIO(), **options)
