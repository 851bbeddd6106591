"""`manage.py pipeline JOB`: the data pipeline, configured by this project's settings.

The command converts the settings to a job specification. The job itself does not use
Django.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections, router

import django_txmsg

from ... import conf, stages
from ...django_internals import settings_of
from ...errors import ConfigurationError
from ...models import OutboxMessage
from ...monitoring.databases import brokers_by_database
from ...spark import cli
from ...spark.errors import PipelineError, UsageError
from ...spark.spec import (
    JobSpec,
    LakeSpec,
    SourceSpec,
    Subscription,
    hidden,
    password_variable,
)
from ..terminal import VerbParser


class Command(BaseCommand):
    """Runs a job in this process, or prints how to submit it to a cluster."""

    help = "Archives, reconciles, analyses and replays the message log on Spark."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options of all jobs, and of the database."""
        parser.add_argument("--database", metavar="ALIAS")
        parser.add_argument(
            "--print-submit",
            action="store_true",
            help="print what to give to spark-submit, and run nothing",
        )
        cli.add_jobs(parser, VerbParser)

    def handle(self, *arguments: Any, **options: Any) -> None:
        """Run the job and exit with its code."""
        given, alias = argparse.Namespace(**options), options["database"]
        if not (given.spec or apps.is_installed("django_txmsg.spark")):
            raise CommandError(
                "The pipeline's tables come with an app of its own: add "
                '"django_txmsg.spark" to INSTALLED_APPS and run manage.py migrate.',
                returncode=2,
            )
        try:
            if alias is None:
                alias = router.db_for_write(OutboxMessage)
            spec = JobSpec.load(given.spec) if given.spec else job_spec(alias)
            spec = cli.complete(spec, given)
        except PipelineError as error:
            raise CommandError(str(error), returncode=error.exit_code) from error
        except ConfigurationError as error:
            # With exit code 1, it would be taken for findings.
            raise CommandError(str(error), returncode=2) from error
        if options["print_submit"]:
            self.stdout.write(self._submission(spec, given))
            return
        code = cli.execute(spec, given)
        if code:
            sys.exit(code)

    def _submission(self, spec: JobSpec, given: argparse.Namespace) -> str:
        """Return a shell script that writes the specification and the package (as a
        zip) to files, and submits the job."""
        package = Path(django_txmsg.__file__).parent
        words = [given.job]
        if given.job in sys.argv:
            words = sys.argv[sys.argv.index(given.job) :]
        words = [hidden(word) for word in words if word != "--print-submit"]
        spec = spec.public()
        lines = ["cat > job.json <<'SPECIFICATION'", spec.to_json(), "SPECIFICATION"]
        for source in (*spec.services, *spec.queues):
            for name in (source.password_env, source.reader_password_env):
                if name:
                    lines.append(f': "${{{name}:?holds the password}}"')
        home, name = shlex.quote(str(package.parent)), package.name
        script = shlex.quote(str(package / "spark" / "__main__.py"))
        lines += [
            f'(cd {home} && python -m zipfile -c "$OLDPWD/{name}.zip" {name})',
            'spark-submit --master "${SPARK_MASTER:?spark://host:7077}" \\',
            f"  --py-files {name}.zip {script} \\",
            f"  {shlex.join(words)} --spec job.json",
        ]
        return "\n".join(lines)


#: Stages of these modes record only redeliveries in the inbox, and send messages that
#: the outbox does not contain.
_UNLOGGED = ("best_effort_1pc", "broker_only")


def job_spec(alias: str) -> JobSpec:
    """Build the job specification from Django's settings and TXMSG.

    The database's password is put into an environment variable of this process. The
    specification contains only the name of the variable.
    """
    txmsg = conf.get()
    retention, given, pipeline = txmsg.RETENTION, txmsg.LAKE, txmsg.PIPELINE
    source, lake = source_spec(alias, txmsg.SERVICE), None
    outbox = router.db_for_write(OutboxMessage)
    # LISTEN_DATABASE is another route to the outbox's database.
    routes = (alias, outbox) if alias == txmsg.LISTEN_DATABASE else (alias,)
    declared = stages.all_stages()
    unlogged = [one for one in declared if one.transaction in _UNLOGGED]
    if given is not None:
        former = dict.fromkeys(txmsg.FORMER_SERVICES, txmsg.SERVICE)
        lake = LakeSpec(given.URI, given.KEEP_BODIES, given.STORAGE_OPTIONS, former)
        if given.READER and outbox in routes:
            source = _read_by(source, str(given.READER))
    return JobSpec(
        services=(
            source,
            *(
                source_spec(one, txmsg.SERVICE)
                for one in pipeline.DATABASES
                if one not in routes
            ),
        ),
        lake=lake,
        retention={
            "outbox": retention.OUTBOX,
            "inbox": retention.INBOX,
            "attempts": retention.INBOX,
            "dead_letters": retention.DEAD_LETTERS,
            "flow_steps": retention.FLOWS,
            "flow_undos": retention.FLOWS,
            "flow_runs": retention.FLOWS,
        },
        subscriptions=tuple(
            Subscription(one.destination, txmsg.SERVICE, one.name)
            for one in declared
            if one not in unlogged
        ),
        external=(
            *pipeline.EXTERNAL,
            *(
                f"{txmsg.SERVICE}/{one.name}" if one.subscriber else one.destination
                for one in unlogged
            ),
        ),
        external_senders=(
            *pipeline.EXTERNAL_SENDERS,
            *((txmsg.SERVICE,) if unlogged else ()),
        ),
        late_after=pipeline.LATE_AFTER,
        stuck_after=pipeline.STUCK_AFTER,
        task_brokers=tuple(
            (txmsg.SERVICE, alias)
            for alias, one in txmsg.BROKERS.items()
            if str(one["URL"]).startswith("celery:")
        ),
        queues=tuple(
            source_spec(one, txmsg.SERVICE)
            for one in brokers_by_database()
            if one not in (*routes, *pipeline.DATABASES)
        ),
    )


def _read_by(source: SourceSpec, reader: str) -> SourceSpec:
    """Return the specification of a service's database, with a replica added to it.
    Jobs read the rows from this replica. `reader` is the replica's URL or its alias in
    the settings."""
    if "://" in reader:
        return replace(source, reader_url=reader)
    there = source_spec(reader, f"{source.service}_reader")
    return replace(source, reader_url=there.url, reader_password_env=there.password_env)


def source_spec(alias: str, service: str) -> SourceSpec:
    """Return the specification of a database in Django's settings."""
    if alias not in connections:
        raise UsageError(f"There is no database {alias!r} in the settings.")
    connection, database = connections[alias], settings_of(connections[alias])
    if connection.vendor == "sqlite":
        path = Path(database["NAME"]).absolute()
        return SourceSpec(service, f"sqlite:///{quote(str(path))}")
    if connection.vendor != "postgresql":
        raise UsageError(
            f"The pipeline reads PostgreSQL and SQLite; {alias!r} is on "
            f"{connection.vendor}."
        )
    user = quote(database["USER"] or "", safe="")
    port = f":{database['PORT']}" if database["PORT"] else ""
    host = quote(database["HOST"] or "", safe=".")
    at = f"{user}@" if user else ""
    url = f"postgresql://{at}{host}{port}/{quote(database['NAME'])}"
    if query := urlencode(_libpq(database["OPTIONS"]), quote_via=quote):
        url += f"?{query}"
    variable = ""
    if database["PASSWORD"]:
        # Another database of the service may have another password.
        name = service if alias == DEFAULT_DB_ALIAS else f"{service}_{alias}"
        variable = password_variable(name)
        os.environ[variable] = database["PASSWORD"]
    return SourceSpec(service, url, variable)


def _libpq(options: Mapping[str, Any]) -> dict[str, str]:
    """Return those libpq parameters in a database's OPTIONS that are not secret: TLS,
    the schema, the role. Secrets are left out because a specification is written to
    files."""
    from psycopg.pq import Conninfo

    known = {one.keyword.decode() for one in Conninfo.get_defaults()}
    given = {name: str(options[name]) for name in sorted(known & options.keys())}
    given.pop("sslpassword", None)
    if role := options.get("assume_role"):
        name = re.sub(r"([\\\s])", r"\\\1", role)
        given["options"] = f"{given.get('options', '')} -c role={name}".strip()
    return given
