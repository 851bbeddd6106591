"""`manage.py dead_letters` and `manage.py message_status`."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import re
import sqlite3
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_txmsg import wire
from django_txmsg.models import (
    AuditEntry,
    BulkOperation,
    DeadLetter,
    FailureNote,
    InboxMessage,
    OutboxMessage,
    Schedule,
    SessionRecord,
    StageState,
)
from django_txmsg.models.monitoring import Deed
from tests import factories
from tests.docs.pages import ROOT

pytestmark = pytest.mark.django_db


def run(name: str, *arguments: str) -> str:
    """Return the output of a command."""
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=out)
    return out.getvalue()


def as_json(name: str, *arguments: str) -> Any:
    """Return the --json output of a command."""
    out = io.StringIO()
    call_command(name, *arguments, "--json", stdout=out)
    return json.loads(out.getvalue())


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_bulk_command_shows_its_progress_in_a_terminal(
    stream: type[io.StringIO],
) -> None:
    factories.DeadLetterFactory.create_batch(101)
    err = stream()

    call_command("dead_letters", "discard", "--all", stdout=io.StringIO(), stderr=err)

    shown = err.getvalue()
    assert shown.startswith("\r100 of 101\r101 of 101") if err.isatty() else not shown


def test_lists_show_open_dead_letters_and_their_groups() -> None:
    letter = factories.DeadLetterFactory(deaths=2)
    factories.DeadLetterFactory(discarded=True)

    text = run("dead_letters", "list")
    assert str(letter.message_id) in text
    assert "died 2 times" in text
    assert "1 open dead letter." in text
    (listed,) = as_json("dead_letters", "list")
    assert (listed["id"], listed["deaths"]) == (letter.pk, 2)
    (group,) = as_json("dead_letters", "groups")
    assert (group["count"], group["exception"]) == (1, "ValueError: no stock")
    assert "feedfacefeedface" in run("dead_letters", "groups")


def test_the_documents_of_json_are_as_documented() -> None:
    letter = factories.DeadLetterFactory(correlation_id="flow-1")
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    (section,) = re.findall(r"^## JSON\n(.+?)^## ", page, re.DOTALL | re.MULTILINE)

    documents = {
        "`message_status`": as_json("message_status"),
        "`dead_letters list`": as_json("dead_letters", "list")[0],
        "`dead_letters groups`": as_json("dead_letters", "groups")[0],
        "`dead_letters show`": as_json("dead_letters", "show", str(letter.pk)),
        "`restore` with `--dry-run`": as_json(
            "dead_letters", "discard", "--all", "--dry-run"
        ),
        "`dead_letters discard`": as_json("dead_letters", "discard", "--all"),
    }
    for name, document in documents.items():
        (row,) = (line for line in section.splitlines() if name in line)
        told = set(re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[2]))
        if name == "`dead_letters show`":
            told |= documents["`dead_letters list`"].keys()
            assert told >= document.keys()
        else:
            assert told == document.keys(), name


def test_instants_of_json_are_in_iso_format() -> None:
    letter = factories.DeadLetterFactory()
    (listed,) = as_json("dead_letters", "list")
    (group,) = as_json("dead_letters", "groups")
    shown = as_json("dead_letters", "show", str(letter.pk))
    factories.BulkOperationFactory(created_at=letter.created_at)
    (operation,) = as_json("txmsg", "bulk", "list")["operations"]

    created = letter.created_at.isoformat()
    assert [listed["created_at"], group["last"], shown["created_at"]] == [created] * 3
    assert operation["created_at"] == created


def test_instants_are_in_the_projects_zone_with_its_name() -> None:
    factories.DeadLetterFactory()
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        text = run("dead_letters", "list") + run("dead_letters", "groups")

    assert text.count(" JST") == 3


def test_list_is_limited_and_says_so() -> None:
    factories.DeadLetterFactory.create_batch(3)
    factories.DeadLetterFactory.create_batch(4, fingerprint="b" * 16)
    (group,) = as_json("dead_letters", "groups", "--limit", "1")
    assert (group["fingerprint"], group["count"]) == ("b" * 16, 4)
    DeadLetter.objects.filter(fingerprint="b" * 16).delete()

    assert "3 open dead letters, 2 shown" in run("dead_letters", "list", "--limit", "2")


def test_show_by_id_or_message_id() -> None:
    letter = factories.DeadLetterFactory(body=b"\xff\x00", content_type="image/png")

    shown = as_json("dead_letters", "show", str(letter.pk))
    assert shown["body_base64"] == "/wA="
    assert "no stock" in run("dead_letters", "show", str(letter.message_id))


def test_body_with_very_many_levels_is_shown_as_bytes() -> None:
    body = b"[" * 600 + b"]" * 600
    letter = factories.DeadLetterFactory(body=body)

    shown = as_json("dead_letters", "show", str(letter.pk))

    assert base64.b64decode(shown["body_base64"]) == body


@pytest.mark.parametrize(
    ("action", "resolution", "word"),
    [
        ("redeliver", "redelivered", "Redelivered 2"),
        ("discard", "discarded", "Discarded 2"),
    ],
)
def test_matching_letters_are_changed_and_counted(
    action: str, resolution: str, word: str
) -> None:
    chosen = factories.DeadLetterFactory.create_batch(2, stage="mail.send")
    other = factories.DeadLetterFactory()

    assert word in run("dead_letters", action, "--stage", "mail.send")

    for letter in (*chosen, other):
        letter.refresh_from_db()
    assert {one.resolution for one in chosen} == {resolution}
    assert other.resolution == "open"
    operation = BulkOperation.objects.get()
    assert operation.by.startswith("command: ")
    assert operation.filter == {"stage": "mail.send", "service": "tests"}


def test_restore_reopens_discarded_letters() -> None:
    letter = factories.DeadLetterFactory(discarded=True)

    assert "Restored 1" in run("dead_letters", "restore", "--all")

    letter.refresh_from_db()
    assert letter.resolution == "open"


@pytest.mark.parametrize(
    ("action", "discarded", "why"),
    [
        ("redeliver", True, "discarded"),
        ("discard", True, "discarded"),
        ("restore", False, "open"),
    ],
)
def test_action_that_does_not_apply_to_the_chosen_letters_says_why(
    action: str, discarded: bool, why: str
) -> None:
    pk = factories.DeadLetterFactory(discarded=discarded).pk

    with pytest.raises(CommandError) as refused:
        run("dead_letters", action, str(pk))

    assert str(refused.value) == f"Nothing to {action}: {pk} is {why}."
    assert not BulkOperation.objects.exists()


def test_chosen_letters_that_are_left_are_named() -> None:
    mail, order = (factories.DeadLetterFactory(stage=one) for one in ("mail", "order"))
    gone = factories.DeadLetterFactory(stage="mail", discarded=True)
    chosen = [str(one.pk) for one in (mail, order, gone)]
    said = (
        f"Not redelivered: {order.pk} is open (other options exclude it), "
        f"{gone.pk} is discarded."
    )
    would = run("dead_letters", "redeliver", *chosen, "--stage", "mail", "--dry-run")
    assert said.replace("Not redelivered", "Would not redeliver") in would
    with pytest.raises(CommandError) as refused:
        run("dead_letters", "redeliver", *chosen, "--stage", "mail")
    assert str(refused.value) == said
    mail.refresh_from_db()
    assert mail.resolution == "redelivered"


def test_many_chosen_letters_that_are_left_are_counted() -> None:
    gone = factories.DeadLetterFactory.create_batch(12, discarded=True)
    chosen = [str(one.pk) for one in gone]
    with pytest.raises(CommandError, match=f"{chosen[9]} is discarded and 2 more[.]$"):
        run("dead_letters", "redeliver", *chosen)
    chosen.append(str(factories.DeadLetterFactory().pk))
    with pytest.raises(CommandError, match=f"{chosen[9]} is discarded and 2 more[.]$"):
        run("dead_letters", "redeliver", *chosen)


def test_a_message_s_resolved_letter_is_not_named_beside_its_open_one() -> None:
    letter = factories.DeadLetterFactory()
    factories.DeadLetterFactory(
        message_id=letter.message_id, stage="mail.send", discarded=True
    )
    run("dead_letters", "discard", str(letter.message_id))
    letter.refresh_from_db()
    assert letter.resolution == "discarded"


def test_audit_of_a_command_describes_its_filter_in_words() -> None:
    letter = factories.DeadLetterFactory()
    run("dead_letters", "discard", str(letter.pk), "--stage", letter.stage)
    [entry] = AuditEntry.objects.all()
    assert entry.text == (
        f"Discard 1 dead letter; filter: stage {letter.stage}, 1 selected."
    )


@pytest.mark.parametrize("action", ["list", "groups"])
def test_dry_run_of_a_list_prints_the_list(action: str) -> None:
    factories.DeadLetterFactory()

    assert run("dead_letters", action, "--dry-run") == run("dead_letters", action)


def test_a_dry_run_says_how_many_and_does_nothing() -> None:
    factories.DeadLetterFactory.create_batch(3, created_at=factories.ago(days=2))
    fresh = factories.DeadLetterFactory()

    text = run("dead_letters", "redeliver", "--older-than", "1d", "--dry-run")
    assert text.startswith("Would redeliver 3 dead letters.\n")
    text = run("dead_letters", "redeliver", str(fresh.pk), "--dry-run")
    assert text.startswith("Would redeliver 1 dead letter.\n")
    facts = as_json("dead_letters", "discard", "--all", "--dry-run")
    assert facts["matching"] == 4
    assert not OutboxMessage.objects.exists()
    assert not BulkOperation.objects.exists()
    done = as_json("dead_letters", "redeliver", "--older-than", "1d")
    assert (done["total"], done["done"]) == (3, 3)


def test_a_rate_is_kept() -> None:
    factories.DeadLetterFactory.create_batch(60)

    facts = as_json("dead_letters", "redeliver", "--all", "--rate", "40")

    assert (facts["state"], facts["done"]) == ("done", 60)
    stored = list(OutboxMessage.objects.order_by("pk"))
    pause = stored[40].created_at - stored[39].created_at
    # At least: a busy machine may make it longer.
    assert pause >= dt.timedelta(seconds=0.99)


def test_an_error_is_noted_on_muted_and_unmuted() -> None:
    factories.WorkerFactory(kind="relay", stages=[])
    letter = factories.DeadLetterFactory()
    chosen = ("--fingerprint", letter.fingerprint)

    run("dead_letters", "note", *chosen, "--text", "Ticket 7.")
    assert "(muted): Ticket 7." in run("dead_letters", "mute", *chosen)
    assert "(muted)" in run("dead_letters", "groups")
    assert "1 muted" in run("message_status")
    facts = as_json("message_status")
    assert (facts["dead"]["count"], facts["dead"]["muted"]) == (0, 1)
    assert facts["well"] is True

    run("dead_letters", "unmute", *chosen)
    (group,) = as_json("dead_letters", "groups")
    assert (group["note"], group["muted"]) == ("Ticket 7.", False)
    assert FailureNote.objects.get().noted_by.startswith("command: ")


@pytest.mark.parametrize("action", ["note", "mute", "unmute"])
@pytest.mark.parametrize(
    "more", [["1"], ["--dry-run"], ["--stage", ""], ["--all"], ["--operation", "0"]]
)
def test_a_note_takes_no_option_that_it_ignores(action: str, more: list[str]) -> None:
    letter = factories.DeadLetterFactory()
    chosen = ["--fingerprint", letter.fingerprint, "--text", "Ticket 7."]
    with pytest.raises(CommandError, match=f"unrecognized arguments: {more[0]}"):
        run("dead_letters", action, *more, *chosen)
    assert not FailureNote.objects.exists()


def test_skipped_letters_are_reported_and_force_includes_them() -> None:
    letter = factories.DeadLetterFactory()
    factories.InboxMessageFactory(message_id=letter.message_id)

    out = io.StringIO()
    with pytest.raises(CommandError, match=r"^Not redelivered: 1 skipped\.$"):
        call_command("dead_letters", "redeliver", str(letter.pk), stdout=out)
    assert "Redelivered 0 messages. 1 skipped:" in out.getvalue()
    assert "has processed message" in out.getvalue()
    assert "Redelivered 1 message." in run(
        "dead_letters", "redeliver", str(letter.pk), "--force"
    )
    assert [one.force for one in BulkOperation.objects.order_by("pk")] == [False, True]


def test_messages_older_than_the_inbox_are_warned_about() -> None:
    factories.DeadLetterFactory(created_at=factories.ago(days=30))

    text = run("dead_letters", "redeliver", "--all", "--dry-run")

    assert "1 of them are older than the inbox remembers (14 days)" in text


def test_an_undo_in_doubt_of_an_unknown_stage_is_discarded_with_force_only() -> None:
    undone = wire.Undone(uuid.uuid4(), factories.ago(), False)
    letter = factories.DeadLetterFactory(
        reason="undo_in_doubt", stage="gone", headers={wire.UNDOES: str(undone)}
    )

    out = io.StringIO()
    with pytest.raises(CommandError, match="Not discarded: 1 skipped"):
        call_command("dead_letters", "discard", str(letter.pk), stdout=out)
    said = "if the stage is gone, with `dead_letters discard --force`"
    assert said in out.getvalue()
    run("dead_letters", "discard", str(letter.pk), "--force")

    letter.refresh_from_db()
    assert letter.resolution == "discarded"
    said = AuditEntry.objects.order_by("-pk")[0].text
    assert said.startswith("Discard 1 dead letter, with force; filter: ")


def test_a_dry_run_names_undos_in_doubt_that_it_would_confirm() -> None:
    factories.DeadLetterFactory(reason="undo_in_doubt")

    text = run("dead_letters", "discard", "--all", "--dry-run")

    assert "1 of them are undos in doubt" in text


#: Options that select dead letters. Without a value, each would select more.
BLANK = ("--search", "--destination", "--fingerprint", "--reason")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["redeliver"], "say --all"),
        (["discard", "--all", "--stage", "x"], "--all cannot be combined with ids"),
        (["discard", "4711"], "No dead letter 4711"),
        (["discard", "abc"], "neither the number"),
        (["redeliver", "--all", "--older-than", "soon"], "30m, 12h or 7d"),
        (["redeliver", "--older-than", "9999999d"], "too long"),
        (["redeliver", "--all", "--rate", "0"], "greater than zero"),
        (["show"], "required: ID"),
        (["note", "--text", "x"], "required: --fingerprint"),
        (["note", "--fingerprint", "x"], "required: --text"),
        (["mute", "--fingerprint", "feedfacefeedface"], "why this error is muted"),
        *((["discard", name, " "], "is blank") for name in BLANK),
        (["discard", "--all", "--limit", "1"], "unrecognized"),
        (["note", "--fingerprint", "x", "--text", "t", "--for", "8h"], "unrecognized"),
        (["unmute", "--fingerprint", "x", "--above", "0"], "unrecognized"),
        (["discard", "--older-than", ""], "not a duration"),
        (["discard", "--all", "--shown", ""], "Not a token"),
        (["discard", "--all", "--database", ""], "No database ''"),
        (
            ["mute", "--fingerprint", "feedfacefeedface", "--text", "x", "--for", ""],
            "not a duration",
        ),
    ],
)
def test_ambiguous_selection_is_refused(arguments: list[str], word: str) -> None:
    letter = factories.DeadLetterFactory()

    with pytest.raises(CommandError, match=word):
        run("dead_letters", *arguments)

    letter.refresh_from_db()
    assert letter.resolution == "open"


def test_a_blank_search_selects_nothing() -> None:
    letter = factories.DeadLetterFactory()

    for text in ("", " "):
        with pytest.raises(CommandError, match="blank search"):
            call_command("dead_letters", "discard", search=text)

    letter.refresh_from_db()
    assert letter.resolution == "open"
    assert "1 open dead letter." not in run("dead_letters", "list", "--stage", "")


def test_status_of_an_idle_system_is_well() -> None:
    factories.WorkerFactory(kind="relay", stages=[])
    assert "All is well." in run("message_status")
    facts = as_json("message_status")
    assert facts["well"] is True
    assert facts["outbox"]["count"] == 0


def test_status_counts_every_state_and_exits_1_when_something_is_overdue() -> None:
    factories.OutboxMessageFactory()
    factories.OutboxMessageFactory(created_at=factories.ago(minutes=20))
    factories.InboxMessageFactory(parked=True)
    factories.InboxMessageFactory(parked=True, slot=3)
    factories.DeadLetterFactory()
    factories.WorkerFactory(heartbeat_at=factories.ago(minutes=2))
    factories.StageStateFactory(stage="payments.charge")
    out = io.StringIO()

    with pytest.raises(SystemExit) as exit_:
        call_command("message_status", "--json", stdout=out)

    assert exit_.value.code == 1
    facts = json.loads(out.getvalue())
    assert facts["overdue"] == 1
    assert facts["outbox"]["count"] == 2
    assert 1190 < facts["outbox"]["oldest_age"] < 1300
    waiting = facts["redelivering"]
    assert (waiting["count"], waiting["for_rate"]) == (2, 1)
    assert facts["dead"]["count"] == 1
    assert facts["stages"]["payments.charge"]["paused"] is True
    assert facts["workers"][0]["heartbeat_age"] > 100
    with pytest.raises(SystemExit):
        run("message_status")


def test_message_status_prints_places_and_alarms() -> None:
    factories.InboxMessageFactory(parked=True)
    factories.InboxMessageFactory(parked=True, slot=3)
    factories.DeadLetterFactory(created_at=factories.ago(hours=2))
    factories.StageStateFactory(stage="payments.charge")

    text = run("message_status")

    assert "an attempt:        2 waiting, 1 of them for a slot of the rate" in text
    assert "dead letters:                  1, oldest 2 h" in text
    assert "stage payments.charge: paused by somebody" in text


def test_status_counts_the_sessions_of_a_day_that_were_given_up() -> None:
    old, recent = uuid.uuid4(), uuid.uuid4()
    for session_id in (old, recent):
        assert SessionRecord.objects.give_up(session_id)
    assert SessionRecord.objects.commit(uuid.uuid4())
    SessionRecord.objects.filter(pk=old).update(created_at=factories.ago(hours=25))

    assert as_json("message_status")["sessions_given_up"] == 1
    assert "sessions given up in 24 h:     1" in run("message_status")


def test_a_misspelt_stage_is_no_stage_without_dead_letters() -> None:
    factories.DeadLetterFactory(stage="mail.send")
    factories.DeadLetterFactory(stage="long.gone", discarded=True)

    for action in ("list", "discard", "redeliver"):
        with pytest.raises(CommandError, match="There is no stage 'nope' here"):
            run("dead_letters", action, "--stage", "nope")
    assert "Restored 1" in run("dead_letters", "restore", "--stage", "long.gone")
    assert "0 open" in run("dead_letters", "list", "--stage", "")


def test_the_list_says_how_many_there_are() -> None:
    factories.DeadLetterFactory.create_batch(25)

    with CaptureQueriesContext(connection) as queries:
        text = run("dead_letters", "list", "--limit", "3")

    assert "25 open dead letters, 3 shown (--limit)." in text
    # It loads no row that it does not show, and no body.
    (read,) = (one["sql"] for one in queries if '"exception"' in one["sql"])
    assert read.endswith("LIMIT 3")
    assert '"body"' not in read


EVIL = "\x1b[2J\x1b[1;1H0 open dead letters.\r\x9b2K"


def test_control_characters_of_strangers_do_not_move_the_cursor() -> None:
    letter = factories.DeadLetterFactory(
        exception=f"ValueError: {EVIL}",
        body=json.dumps(EVIL).encode(),
        stage=f"orders{EVIL}",
        traceback=f"Traceback\n\tline {EVIL}",
    )
    letter.headers["evil"] = EVIL
    letter.save()
    AuditEntry.objects.record(f"grace{EVIL}", EVIL, deed=Deed.PAUSE)
    Schedule.objects.create(service="tests", name=EVIL)
    before = factories.InboxMessageFactory(processed_at=None).message_id
    row = factories.InboxMessageFactory(processed_at=None, headers={}, body=b"null")
    InboxMessage.objects.filter(pk=row.pk).update(
        due_at=timezone.now(), key=EVIL, waits_for=before, waits_since=timezone.now()
    )
    printed = [
        run("dead_letters", "list"),
        run("dead_letters", "groups"),
        run("dead_letters", "show", str(letter.pk)),
        run("txmsg", "audit"),
        run("message_status"),
        run("order", "list"),
        run("txmsg", "schedule", "list"),
    ]
    (recurring,) = as_json("txmsg", "schedule", "list")["recurring"]
    assert recurring["last"] is None
    for text in printed:
        assert not set(text) & set("\x1b\r\x9b")
    assert all(r"\x1b[2J" in printed[place] for place in (0, -2, -1))
    assert "\n\tline" in printed[2]


@pytest.mark.parametrize(
    "command",
    [
        "message_status --json",
        "dead_letters list",
        "order list",
        "subscriptions list",
        "prune_messages",
        "txmsg audit",
        "txmsg bulk list",
        "txmsg flows list",
        "txmsg stages list",
        "txmsg schedule list",
        f"txmsg cancel {uuid.UUID(int=7)}",
    ],
)
def test_a_database_that_is_away_is_one_sentence_and_exit_code_3(command: str) -> None:
    def refuse(*_: Any) -> Any:
        raise OperationalError("could not connect\nto 10.0.0.7")

    with (
        connection.execute_wrapper(refuse),
        pytest.raises(CommandError) as raised,
    ):
        call_command(*command.split())

    assert raised.value.returncode == 3
    assert "'default' does not answer: could not connect" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(CommandError, match="No database 'nope' in DATABASES"):
        call_command("dead_letters", "list", "--database", "nope")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "command", ["dead_letters discard --all", "txmsg stages pause orders.place"]
)
def test_a_database_that_takes_no_changes_is_an_error_in_a_sentence(
    command: str,
) -> None:
    factories.DeadLetterFactory()
    read_only = {
        "postgresql": ("SET default_transaction_read_only = {}", "on", "off"),
        "sqlite": ("PRAGMA query_only = {}", "1", "0"),
    }
    statement, on, off = read_only[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(statement.format(on))
        try:
            with pytest.raises(CommandError) as raised:
                call_command(*command.split())
        finally:
            cursor.execute(statement.format(off))
    assert raised.value.returncode == 3
    assert "has refused a statement" in str(raised.value)
    assert not DeadLetter.objects.exclude(resolution="open").exists()


def refused_by(cause: Exception) -> Callable[..., Any]:
    """Return a wrapper that refuses every change with the error of a driver."""

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith(("INSERT", "UPDATE")):
            raise OperationalError(*cause.args) from cause
        return execute(sql, *rest)

    return refuse


@pytest.mark.parametrize(
    "cause",
    [
        sqlite3.OperationalError("database is locked"),
        psycopg.errors.QueryCanceled("canceling statement due to statement timeout"),
    ],
)
def test_a_change_that_waited_too_long_is_an_error_in_a_sentence(
    cause: Exception,
) -> None:
    factories.DeadLetterFactory()
    with (
        connection.execute_wrapper(refused_by(cause)),
        pytest.raises(CommandError, match="Repeat the command") as raised,
    ):
        call_command("dead_letters", "discard", "--all")
    assert raised.value.returncode == 3


def test_a_missing_column_keeps_its_traceback() -> None:
    """Repeating the command would not help: a migration has not been run."""
    factories.DeadLetterFactory()
    table = AuditEntry._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME COLUMN deed TO former")
    with pytest.raises(DatabaseError, match="deed"):
        call_command("dead_letters", "discard", "--all")


def test_a_stage_is_paused_and_resumed_on_the_terminal() -> None:
    factories.InboxMessageFactory(parked=True, stage="mail.send")
    factories.DeadLetterFactory(stage=f"mail{EVIL}")

    assert run("txmsg", "stages", "pause", "mail.send", "--why", "gateway is down") == (
        "Paused mail.send.\n"
    )
    assert "is paused already" in run("txmsg", "stages", "pause", "mail.send")
    text = run("txmsg", "stages", "list")
    assert not set(text) & set("\x1b\r\x9b")
    assert "mail.send  1 waiting  0 dead" in text
    assert "gateway is down" in text
    rows = {one["name"]: one for one in as_json("txmsg", "stages", "list")["stages"]}
    paused = rows["mail.send"]
    assert (paused["waiting"], paused["paused_why"]) == (1, "gateway is down")
    assert paused["paused_by"].startswith("command: ")
    for verb in ("pause", "resume"):
        with pytest.raises(CommandError, match=r"no stage 'mail\.sned'"):
            run("txmsg", "stages", verb, "mail.sned")
    run("txmsg", "stages", "resume", "mail.send")
    assert not StageState.objects.paused()
    assert [one.text for one in AuditEntry.objects.order_by("pk")] == [
        "Paused stage mail.send: gateway is down",
        "Resumed stage mail.send.",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dead_letters groups", "0 open dead letters."),
        ("txmsg audit --by nobody", "There is no such entry."),
        ("txmsg bulk list", "There is no bulk operation."),
    ],
)
def test_an_empty_list_says_so(words: str, said: str) -> None:
    assert run(*words.split()) == f"{said}\n"


def test_alive_refuses_a_limit_that_is_no_number() -> None:
    for seconds in ("nan", "-1"):
        with pytest.raises(CommandError, match="0 or more"):
            run("txmsg", "alive", f"--within={seconds}")


def test_a_bulk_operation_is_paused_and_cancelled_on_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operation = factories.BulkOperationFactory(total=30, done=20, why=EVIL)
    pk = str(operation.pk)

    run("txmsg", "bulk", "pause", pk)
    operation.refresh_from_db()
    assert operation.state == "paused"
    run("txmsg", "bulk", "resume", pk)
    run("txmsg", "bulk", "cancel", pk)
    with pytest.raises(CommandError, match="has ended"):
        run("txmsg", "bulk", "resume", pk)

    text = run("txmsg", "bulk", "list")
    assert "cancelled  redeliver 20 of 30" in text
    assert not set(text) & set("\x1b\r\x9b")
    (row,) = as_json("txmsg", "bulk", "list")["operations"]
    assert (row["state"], row["done"], row["total"]) == ("cancelled", 20, 30)
    assert [one.text for one in AuditEntry.objects.order_by("pk")] == [
        f"{verb}: redeliver 30 dead letters." for verb in ("Pause", "Resume", "Cancel")
    ]


@pytest.mark.django_db(transaction=True)
def test_the_audit_is_logged_when_it_is_committed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "django_txmsg.audit")
    with suppress(ZeroDivisionError), transaction.atomic():
        AuditEntry.objects.record("grace", "Discarded everything.", deed=Deed.PAUSE)
        raise ZeroDivisionError
    assert caplog.messages == []

    AuditEntry.objects.record("grace", "Paused stage mail.send.", deed=Deed.PAUSE)

    assert caplog.messages == ["grace: Paused stage mail.send."]


def test_the_audit_is_listed() -> None:
    for number in range(3):
        AuditEntry.objects.record(
            f"user-{number}", f"Paused stage {number}.", deed=Deed.PAUSE
        )

    lines = run("txmsg", "audit", "--limit", "2").splitlines()

    assert [line.partition("  ")[2] for line in lines] == [
        "user-2: Paused stage 2.",
        "user-1: Paused stage 1.",
    ]
    assert run("txmsg", "audit", "--text", "stage 7") == "There is no such entry.\n"
    [entry] = as_json("txmsg", "audit", "--by", "user-0")["entries"]
    assert (entry["by"], entry["text"]) == ("user-0", "Paused stage 0.")


def test_a_command_runs_for_a_user_without_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may run under a user id without a name. The command succeeds, and the
    audit records "unknown"."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654)
    row = factories.OutboxMessageFactory()

    assert "Cancelled" in run("txmsg", "cancel", str(row.message_id))
    assert AuditEntry.objects.get().by == "command: unknown"
