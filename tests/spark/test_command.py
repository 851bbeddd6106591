"""`manage.py pipeline` creates a job specification from the settings. The admin lists
the command's runs."""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.models import Model
from django.test import Client, override_settings
from psycopg.conninfo import conninfo_to_dict

from django_txmsg.management.commands.pipeline import job_spec, source_spec
from django_txmsg.spark.alerts import count_lost
from django_txmsg.spark.cli import instant, main
from django_txmsg.spark.errors import EnvironmentFault, UsageError
from django_txmsg.spark.models import ArchiveMark, PipelineRun
from django_txmsg.spark.runs import recorded
from django_txmsg.spark.schemas import TABLES
from django_txmsg.spark.source.datasource import OutboxWriter
from django_txmsg.spark.spec import SESSION, JobSpec, LakeSpec, SourceSpec
from django_txmsg.spark.transforms.reconcile import LOST
from tests import factories
from tests.faults import wait_until
from tests.spark.conftest import ROOT
from tests.spark.log import Log


class Elsewhere:
    """A database router that puts all tables in another database than "default"."""

    def db_for_write(self, model: type[Model], **hints: object) -> str:
        return "other"

    db_for_read = db_for_write


@pytest.mark.django_db(transaction=True)
def test_a_dry_run_reads_the_settings_and_leaves_a_record(
    tmp_path: Path, capsys
) -> None:
    txmsg = {"SERVICE": "shop", "LAKE": f"file://{tmp_path}/lake"}
    with override_settings(TXMSG=txmsg):
        call_command("pipeline", "archive", "--dry-run", "--json")

    facts = json.loads(capsys.readouterr().out)
    # Dead letters are kept for ever unless the settings say otherwise.
    tables = TABLES.keys() - {"dead_letters"}
    assert facts["counts"] == dict.fromkeys(tables, 0)
    run = PipelineRun.objects.get()
    assert (run.job, run.service, run.state) == ("archive", "shop", "clean")
    assert run.finished_at >= run.started_at
    assert str(run.id) == facts["run"]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_job_reads_the_database_that_the_routers_choose(
    tmp_path: Path, capsys
) -> None:
    lake = {"URI": f"file://{tmp_path}/lake", "READER": "default"}
    with override_settings(
        TXMSG={"SERVICE": "shop", "LAKE": lake},
        DATABASE_ROUTERS=[f"{__name__}.Elsewhere"],
    ):
        factories.OutboxMessageFactory(
            dispatched=True, created_at=factories.ago(days=99)
        )
        call_command("pipeline", "archive", "--dry-run", "--json")
        read = job_spec("other").service().reading()

    assert json.loads(capsys.readouterr().out)["counts"]["outbox"] == 1
    assert PipelineRun.objects.using("other").exists()
    assert not PipelineRun.objects.exists()
    assert read.url == source_spec("default", "shop").url


@pytest.mark.django_db(transaction=True)
def test_a_job_for_a_cluster_is_printed_without_the_password(tmp_path: Path) -> None:
    out = StringIO()
    with override_settings(
        TXMSG={"SERVICE": "shop", "LAKE": f"file://{tmp_path}/lake"}
    ):
        call_command("pipeline", "--print-submit", "archive", stdout=out)

    printed = out.getvalue()
    assert "spark-submit" in printed
    assert '"service": "shop"' in printed
    assert "txmsg-secret" not in printed
    assert PipelineRun.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_missing_lake_is_reported_with_its_exit_code() -> None:
    with (
        override_settings(TXMSG={"SERVICE": "shop"}),
        pytest.raises(SystemExit) as ended,
    ):
        call_command("pipeline", "archive")

    assert ended.value.code == 2
    assert PipelineRun.objects.get().state == "failed"


@pytest.mark.parametrize(
    "words",
    [("archive", "--batch-rows", "0"), ("archive", "--batch-rows", "-1"),
     ("archive", "--batch-rows", "9" * 30), ("archive", "--tasks", "-1"),
     ("archive", "--purges", "0"), ("archive", "--older-than", "999999d"),
     ("archive", "--older-than", "9" * 20 + "d"), ("follow", "--batch-rows", "0"),
     ("follow", "--every", "0s"), ("reconcile", "--since", "999999d"),
     ("reconcile", "--since", "0001-01-01T00:00+14:00"), ("replay", "--limit", "-1"),
     ("replay", "--rate", "nan"), ("replay", "--rate", "-1"),
     ("replay", "--rate", "1e-9"), ("send", "--rate", "inf")],
)  # fmt: skip
def test_a_number_that_no_job_can_use_is_refused(
    words: tuple[str, ...], capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert f"{words[1]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["2026-01-31T13:00+01:00", "2026-01-31T12:00Z", "2026-01-31T12:00"]
)
def test_an_instant_is_read_with_a_zone_or_as_utc(text: str) -> None:
    assert instant(text) == dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)


@pytest.mark.parametrize(
    "words",
    [("show", "\udcff"), ("erase", "--key", "\udcff"),
     ("findings", "--acknowledge", "\udcff", "--all")],
)  # fmt: skip
def test_an_option_that_is_not_utf8_is_named(words: tuple[str, ...], capsys) -> None:
    """A shell passes the options as bytes. If bytes are not UTF-8, Python represents
    them as surrogates. The error message names the option with such a value."""
    assert main(words) == 2

    name = words[1].removeprefix("--") if len(words) > 2 else "term"
    assert f"The value of '{name}' is not UTF-8." in capsys.readouterr().err


def test_brokers_of_celery_are_named_to_reconcile() -> None:
    """Plain Celery tasks leave no inbox row. They get the verdict `external`. If they
    got the verdict `lost`, a replay would send them again."""
    brokers = {
        "default": {"URL": "database://"},
        "tasks": {"URL": "celery://shop.celery:app"},
    }
    with override_settings(
        TXMSG={"SERVICE": "shop", "LAKE": {"URI": "s3://b/l"}, "BROKERS": brokers}
    ):
        spec = job_spec("default")

    assert JobSpec.from_json(spec.to_json()).task_brokers == (("shop", "tasks"),)


def test_broker_s_own_database_is_named_to_erase() -> None:
    """All databases of the service are searched anyway."""
    brokers = {
        "default": {"URL": "database://"},
        "far": {"URL": "database://other"},
    }
    txmsg = {"SERVICE": "shop", "BROKERS": brokers}
    with override_settings(TXMSG=txmsg):
        alone = JobSpec.from_json(job_spec("default").to_json())
    with override_settings(TXMSG=txmsg | {"PIPELINE": {"DATABASES": ["other"]}}):
        both = job_spec("default")

    assert [one.url for one in alone.queues] == [source_spec("other", "shop").url]
    assert both.queues == ()


def test_listen_database_is_a_route_to_the_outbox_s_database() -> None:
    """Behind a pooler, only this alias is a direct connection: a job that gets it uses
    the replica, and connects to the same database only once."""
    txmsg = {
        "SERVICE": "shop",
        "LISTEN_DATABASE": "other",
        "LAKE": {"URI": "s3://b/l", "READER": "postgresql://replica/shop"},
    }
    for pipeline in ({}, {"DATABASES": ["default"]}):
        with override_settings(TXMSG={**txmsg, "PIPELINE": pipeline}):
            spec = job_spec("other")

        assert [one.url for one in spec.services] == [source_spec("other", "shop").url]
        assert spec.service().reading().url == "postgresql://replica/shop"
        assert spec.queues == ()


def test_former_names_of_the_service_are_names_in_its_lake() -> None:
    renamed = {"SERVICE": "delivery", "FORMER_SERVICES": ("shipping",)}
    with override_settings(TXMSG={**renamed, "LAKE": "s3://b/l"}):
        lake = JobSpec.from_json(job_spec("default").to_json()).lake_spec()

    assert lake.former == {"shipping": "delivery"}


def test_settings_describe_the_lake(monkeypatch) -> None:
    options = {"AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "here"}
    lake = {"URI": "s3://b/l", "STORAGE_OPTIONS": options, "KEEP_BODIES": False}
    reader = "postgresql://u:hidden@replica/shop"
    with override_settings(
        TXMSG={"SERVICE": "shop", "LAKE": lake | {"READER": reader}}
    ):
        spec = job_spec("default")
        out = StringIO()
        call_command("pipeline", "--print-submit", "archive", stdout=out)
    with override_settings(TXMSG={"LAKE": lake | {"READER": "other"}}):
        aliased = job_spec("default").service()

    assert spec.lake == LakeSpec("s3://b/l", False, options)
    assert spec.service().reading().url == reader
    assert aliased.reading().url == source_spec("other", "service").url
    assert "hidden" not in out.getvalue() + repr(spec)
    assert "TXMSG_PASSWORD_SHOP_READER" in out.getvalue()


def test_a_job_connects_as_the_alias_does(monkeypatch) -> None:
    """A job connects with the options of its database alias. Without these options, the
    job could read another schema, as another user, or over an unencrypted
    connection."""
    given = {
        "ENGINE": "shop.database",  # a project's own, made of Django's
        "OPTIONS": {
            "sslmode": "verify-full",
            "sslpassword": "hidden",
            "keepalives_idle": 5,
            "options": "-c search_path=tenant -c statement_timeout=5s",
            "assume_role": "the owner",
            "pool": True,
            "server_side_binding": True,
        },
        "HOST": "h",
        "NAME": "shop",
    }
    for name, value in given.items():
        monkeypatch.setitem(connections["other"].settings_dict, name, value)
    monkeypatch.setattr(connections["other"], "vendor", "postgresql")

    spec = source_spec("other", "shop")

    assert "hidden" not in spec.url
    info = conninfo_to_dict(spec.conninfo())
    assert (info["host"], info["dbname"]) == ("h", "shop")
    assert info["sslmode"] == "verify-full"
    assert (info["keepalives_idle"], info["tcp_user_timeout"]) == ("5", "60000")
    assert "pool" not in info
    theirs = "-c search_path=tenant -c statement_timeout=5s -c role=the\\ owner "
    assert info["options"] == f"{theirs}{SESSION}"


def test_sqlite_by_another_name_is_read(monkeypatch) -> None:
    engine = "django.contrib.gis.db.backends.spatialite"
    monkeypatch.setitem(connections["other"].settings_dict, "ENGINE", engine)

    assert source_spec("other", "shop").vendor == "sqlite"


def test_unsupported_database_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(connections["other"], "vendor", "mysql")
    with pytest.raises(UsageError, match="'other' is on mysql"):
        source_spec("other", "shop")


def test_project_without_the_app_gets_an_error() -> None:
    apps = [one for one in settings.INSTALLED_APPS if one != "django_txmsg.spark"]
    with (
        override_settings(INSTALLED_APPS=apps),
        pytest.raises(CommandError, match="app of its own") as refused,
    ):
        call_command("pipeline", "archive")

    assert refused.value.returncode == 2


def test_service_without_the_app_gets_an_error(make_log) -> None:
    log = make_log("sqlite")
    log.execute("DROP TABLE django_txmsg_pipelinerun")

    with (
        pytest.raises(EnvironmentFault, match=r'With "django_txmsg\.spark" in'),
        recorded(JobSpec(services=(log.spec,)), "archive", {}),
    ):
        pass


def test_a_column_of_a_newer_release_is_reported(make_log) -> None:
    log = make_log("sqlite")
    log.execute("ALTER TABLE django_txmsg_finding DROP COLUMN counted")

    with (
        log.connected() as connection,
        pytest.raises(EnvironmentFault, match=r"run `manage\.py migrate`"),
    ):
        count_lost(connection, log.spec, LOST)


@pytest.mark.parametrize(
    ("txmsg", "options", "match"),
    [
        ({}, ["--database", "nowhere"], "no database 'nowhere'"),
        ({"PIPELINE": {"DATABASES": ["nowhere"]}}, [], "no database 'nowhere'"),
        ({"PIPELINE": {"EXTERNALS": []}}, [], 'Did you mean "EXTERNAL"'),
    ],
)
def test_a_wrong_setting_is_reported_and_is_no_finding(
    txmsg: dict[str, Any], options: list[str], match: str
) -> None:
    with (
        override_settings(TXMSG=txmsg),
        pytest.raises(CommandError, match=match) as refused,
    ):
        call_command("pipeline", *options, "archive")

    assert refused.value.returncode == 2


HANGING = """
import sys
from django_txmsg.spark.runs import recorded
from django_txmsg.spark.spec import SESSION, JobSpec, LakeSpec

with recorded(JobSpec.from_json(sys.argv[1]), "reconcile", {}):
    print("under way", flush=True)
    sys.stdin.read()
"""


@pytest.mark.django_db(transaction=True)
def test_a_run_is_running_for_as_long_as_its_process_lives(
    admin_client: Client,
) -> None:
    with override_settings(TXMSG={"SERVICE": "shop"}):
        spec = job_spec("default")
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, spec.to_json()], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    run = PipelineRun.objects.get()

    def outcome() -> str:
        page = admin_client.get("/admin/txmsg_spark/pipelinerun/").content.decode()
        found = re.search(r"field-outcome[^>]*>([^<]*)<", page)
        assert found
        return found[1]

    assert (run.interrupted, outcome()) == (False, "running")
    process.kill()
    process.communicate()
    # PostgreSQL has yet to notice.
    wait_until(lambda: run.interrupted, deadline=30)
    assert (run.state, outcome()) == ("running", "interrupted")


@pytest.mark.django_db
def test_runs_and_batches_are_shown_and_cannot_be_changed(
    admin_client: Client,
) -> None:
    run = PipelineRun.objects.create(
        id="6f0d4a3e-5b0b-5d5c-9a58-3d8e5a1f7c42", job="archive", service="shop",
        state="refused", rows=1200, error="<b>id 7</b>", counts={"outbox": 1200},
    )  # fmt: skip
    mark = ArchiveMark.objects.create(
        source="outbox", lake="/lake", lake_id=run.pk, purged_through=17, rows=9_000
    )

    listing = admin_client.get("/admin/txmsg_spark/pipelinerun/").content.decode()
    page = admin_client.get(f"/admin/txmsg_spark/pipelinerun/{run.pk}/change/")
    marks = admin_client.get("/admin/txmsg_spark/archivemark/").content.decode()
    moved = admin_client.get(f"/admin/txmsg_spark/archivemark/{mark.pk}/change/")

    assert "verification refused" in listing
    assert "&lt;b&gt;id 7" in page.content.decode()
    assert "9,000" in marks
    assert ">17<" in moved.content.decode()
    assert admin_client.get("/admin/txmsg_spark/pipelinerun/add/").status_code == 403
    deleted = admin_client.post(f"/admin/txmsg_spark/pipelinerun/{run.pk}/delete/")
    assert deleted.status_code == 403


@pytest.mark.parametrize(
    ("own", "level"),
    [("", 1), pytest.param("-XX:TieredStopAtLevel=2", 2, marks=pytest.mark.matrix)],
    ids=["default", "own"],
)
def test_a_run_since_an_instant_starts_a_jvm_for_short_work(
    own: str, level: int, make_log: Callable[..., Log]
) -> None:
    spec = json.dumps(asdict(JobSpec((make_log("sqlite").spec,))))
    options = f"spark.driver.extraJavaOptions=-XX:+PrintCommandLineFlags {own}"
    ran = subprocess.run(
        [sys.executable, "-m", "django_txmsg.spark", "reconcile", "--since", "24h",
         "--spec", spec, "--conf", options],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=280,
    )  # fmt: skip
    assert f"-XX:TieredStopAtLevel={level} " in ran.stdout


@pytest.mark.parametrize("name", ["", "n" * 65, "new/march"])
def test_a_name_that_no_run_can_have_is_refused(name: str, capsys) -> None:
    """The mark `new/` belongs to messages with new ids."""
    with pytest.raises(SystemExit):
        main(["replay", "--where", "true", "--name", name])
    assert "--name: a name " in capsys.readouterr().err

    spec = SourceSpec("shop", "sqlite:////nowhere")
    with pytest.raises(UsageError, match='option "run"'):
        OutboxWriter(spec, {"run": name})


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "--where", "", "--verdict", "lost"),
        ("replay", "--where", "true", "--verdict", " "),
        ("replay", "--verdict", "lost", "--run", ""),
        ("findings", "--verdict", "", "--destination", "orders", "--acknowledge", "x"),
        ("findings", "--verdict", "lost", "--destination", "", "--reopen"),
        ("show", ""),
    ],
)
def test_a_blank_selection_is_refused(words: tuple[str, ...], capsys) -> None:
    """The value may be an unset variable of a shell. Without it, the job would select
    more."""
    with pytest.raises(SystemExit):
        main(words)
    assert "is blank" in capsys.readouterr().err
