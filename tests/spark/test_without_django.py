"""The pipeline does not need Django. It also runs on a Spark Connect server, and
spark-submit can run it on a cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyspark
import pytest

import django_txmsg
from django_txmsg.spark.cli import main
from django_txmsg.spark.errors import (
    EnvironmentFault,
    UsageError,
    VerificationRefused,
    from_spark,
)
from django_txmsg.spark.session import build
from django_txmsg.spark.spec import (
    JobSpec,
    LakeSpec,
    SourceSpec,
    digest,
    hidden,
    recordable,
)
from tests.acceptance.shop import PROJECT, environment
from tests.faults import wait_until
from tests.services.server import free_port
from tests.spark.archives import (
    assert_moved_once,
    delta_rows,
    hashes_in,
    hashes_of_lake,
)
from tests.spark.conftest import CONF, ROOT
from tests.spark.log import Log

PACKAGE = Path(django_txmsg.__file__).parent

BLOCKED = """
import importlib, pkgutil, sys

APP = {"__main__", "apps", "migrations", "models"}  # what Django alone imports

class NoDjango:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "django":
            raise ImportError(f"{name} is imported where there is no Django")

sys.meta_path.insert(0, NoDjango())
import django_txmsg.spark
def walk(path, prefix):
    for found in pkgutil.iter_modules(path, prefix):
        if found.name.rpartition(".")[2] in APP:
            continue
        module = importlib.import_module(found.name)
        walk(getattr(module, "__path__", ()), f"{found.name}.")
walk(django_txmsg.spark.__path__, "django_txmsg.spark.")
ours = {n.partition(".")[2] for n in sys.modules if n.startswith("django_txmsg.")}
print(*sorted(n for n in ours if n.partition(".")[0] not in ("spark", "rules", "wire")))
"""


def test_every_module_imports_without_django_and_only_pure_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    # The package's own `__init__` imports `lazy_imports`.
    assert done.stdout.split() == [
        "lazy_imports",
        "monitoring",
        "monitoring.lengths",
        "webhook",
    ]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_where_the_driver_has_no_such_file_the_specification_comes_itself() -> None:
    spec = JobSpec(services=(SourceSpec("shop", "sqlite:////db"),))

    assert JobSpec.load(spec.to_json()) == spec
    with pytest.raises(UsageError, match=r"bring it there: --files job\.json"):
        JobSpec.load("/not/here/job.json")


def test_missing_spark_connect_server_is_reported() -> None:
    remote = f"sc://127.0.0.1:{free_port()}/;token=hidden-token"

    with pytest.raises(EnvironmentFault, match="Spark Connect server at sc") as refused:
        build("nowhere", {"spark.remote": remote})

    assert "refused" in str(refused.value)
    assert "hidden-token" not in str(refused.value)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_jobs_run_on_a_spark_connect_server(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    pytest.importorskip("grpc", reason="needs pyspark[connect]")
    log, port = make_log("sqlite"), free_port()
    ids = [uuid.uuid4() for _ in range(250)]
    log.send([{"message_id": one} for one in ids])
    log.receive([{"message_id": one} for one in ids[5:]])
    before = hashes_in(log)
    (tmp_path / "job.json").write_text(JobSpec((log.spec,), lake).to_json())
    home = Path(pyspark.__file__).parent
    # What the workers import has to be where the server runs.
    paths = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    server = subprocess.Popen(
        [home / "bin" / "spark-submit", "--class",
         "org.apache.spark.sql.connect.service.SparkConnectServer", "--master",
         "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}", "--conf",
         "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.driver.host=127.0.0.1",
         "--conf", "spark.ui.enabled=false",
         "spark-internal"],
        env=paths | {"SPARK_HOME": str(home)}, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "django_txmsg.spark", *words, "--spec",
             tmp_path / "job.json", "--json"],
            env=paths | {"SPARK_REMOTE": f"sc://127.0.0.1:{port}"}, cwd=ROOT,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert "error" not in facts, facts
        return facts

    try:
        wait_until(lambda: listens(port), deadline=120)
        archived = run("archive", "--older-than", "1d", "--no-vacuum")
        replayed = run("replay", "--where", f"message_id = '{ids[0]}'", "--name", "r")
        verified = run("verify")
    finally:
        server.terminate()
        server.wait(60)

    assert (archived["engine"], archived["rows"]) == ("spark", 495)
    assert sorted(hashes_of_lake(lake)) == sorted(before.items())
    assert replayed["rows"] == 1
    assert verified["problems"] == []


def test_a_specification_travels_as_json_without_the_password(monkeypatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    source = SourceSpec("shop", "postgresql://u@h/db", "SHOP_PASSWORD").resolved()
    spec = JobSpec(services=(source,), lake=LakeSpec("/lake"), retention={"outbox": 7})

    text = spec.to_json()

    assert "secret" not in text + repr(spec)
    assert "password=secret" in source.conninfo()
    assert JobSpec.from_json(text).service().password_env == "SHOP_PASSWORD"


def test_a_condition_is_recorded_without_texts_that_may_name_a_person() -> None:
    harmless = "destination = 'orders.place' AND day >= '2026-01-01'"
    assert recordable(harmless) == harmless
    for condition in (
        "key = 'customer-4711'", 'correlation_id LIKE "customer-4711%"',
        r"destination = 'a' and KEY in ('it\'s customer-4711', '')",
        "headers['of'] = 'customer-4711'",
    ):  # fmt: skip
        told = recordable(condition)
        assert "4711" not in told
        assert "sha256:" in told
    assert recordable("key = 'a' OR key = 'a'").count(digest("a")) == 2


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:pass@word@h:5432/db",
        "postgresql://u@h:5432/db?sslmode=require&password=pass@word",
        "postgresql://u:a/pass@word@h:5432/db",
        "postgresql://u:an's pass word@h:5432/db",
        "postgresql://u@h:5432/db?password=an's pass word",
    ],
)
def test_no_secret_is_written_down(address: str) -> None:
    source = SourceSpec("shop", address)
    options = {"AWS_SECRET_ACCESS_KEY": "pass", "aws_region": "here", "sas_key": "pass"}
    lake = LakeSpec("s3://KEY:pass@bucket", storage_options=options)
    spec = JobSpec(services=(source,), lake=lake)

    told = [source.shown, repr(spec), spec.to_json(), hidden(f"no: {address}, sorry")]

    assert not [one for one in told if "pass@" in one or '"pass"' in one]
    assert "word" not in "".join([source.shown, spec.to_json()]).replace("password", "")
    assert "@h" in source.shown
    again = JobSpec.from_json(spec.to_json())
    assert again.service().password_env == "TXMSG_PASSWORD_SHOP"
    assert dict(again.lake_spec().storage_options) == {"aws_region": "here"}


def run(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "django_txmsg.spark", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_the_exit_code_says_what_went_wrong(tmp_path: Path, make_log, capsys) -> None:
    log: Log = make_log("sqlite")
    spec = tmp_path / "job.json"
    spec.write_text(JobSpec(services=(log.spec,)).to_json())
    log.send_many(3)

    cases: list[tuple[int, str, list[str]]] = [
        (2, "No lake is specified", ["archive", "--older-than", "1d"]),
        (2, "does not parse", ["archive", "--spec", str(PACKAGE / "py.typed")]),
        (2, "No service", ["sweep", "--lake", "/x"]),
        (3, "There is no SQLite database", [
            "archive", "--service", "x=sqlite:////nowhere/db", "--older-than", "1d"]),
        (0, "3 rows would move", [
            "archive", "--older-than", "1d", "--lake", f"{tmp_path}/lake", "--table",
            "outbox", "--dry-run"]),
    ]  # fmt: skip
    for code, says, words in cases:
        given = words
        if code == 0 or "No lake" in says:
            given = [*words, "--spec", str(spec)]
        assert main(given) == code, words
        assert says in "".join(capsys.readouterr())
    with pytest.raises(SystemExit, match="2"):
        main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err
    # A process ends with what `main` returns.
    done = run("sweep", "--lake", "/x", directory=tmp_path)
    assert (done.returncode, "No service" in done.stderr) == (2, True)
    assert log.count() == 3


# Reading for `reconcile` starts Spark.
@pytest.mark.parametrize(
    "words",
    [
        ("archive", "--older-than", "1d"),
        pytest.param(("reconcile",), marks=pytest.mark.matrix),
    ],
)
def test_error_of_a_database_is_one_line_and_no_finding(
    tmp_path: Path, make_log, words: tuple[str, ...]
) -> None:
    log: Log = make_log("sqlite")
    spec = tmp_path / "job.json"
    spec.write_text(JobSpec((log.spec,), LakeSpec(f"file://{tmp_path}/lake")).to_json())
    log.receive([{"message_id": uuid.uuid4()}])
    log.execute("ALTER TABLE django_txmsg_inboxmessage RENAME COLUMN stage TO step")

    done = run(*words, "--spec", str(spec), directory=tmp_path)

    assert done.returncode == 3, done.stderr
    [*_, told] = done.stderr.splitlines()
    assert told.startswith(f"{words[0]}: ")
    assert "no such column: t.stage" in told
    assert "Traceback" not in done.stderr
    [state] = log.rows("SELECT state FROM django_txmsg_pipelinerun")
    assert state[0] == "failed"


@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        ("django_txmsg.spark.errors.VerificationRefused: Batch 7: 3 rows read, 2"
         " written.\n\n\tat org.apache", VerificationRefused, "Batch 7: 3 rows read"),
        ("An error occurred while calling o1.collect.\n: java.lang.OutOfMemoryError:"
         " heap\n\tat x", EnvironmentFault, "java.lang.OutOfMemoryError: heap"),
        ("", EnvironmentFault, "Spark gave up: Exception"),
    ],
)  # fmt: skip
def test_errors_of_spark_become_errors_of_the_pipeline(raised, kind, told) -> None:
    fault = from_spark(Exception(raised))

    assert type(fault) is kind
    assert told in str(fault)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a standalone Spark cluster: a master and two workers of the
    installed PySpark."""
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    environment.pop("PYTHONPATH", None)
    port, ui = free_port(), free_port()
    master = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    logs = [(tmp_path / f"{name}.log").open("w") for name in ("master", "one", "two")]
    commands = [
        [f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port),
         "--webui-port", str(ui)],
        *[[f"{deploy}.worker.Worker", master, "--cores", "1", "--memory", "1g",
           "--host", "127.0.0.1", "--webui-port", str(free_port()),
           "--work-dir", str(tmp_path / name)] for name in ("one", "two")],
    ]  # fmt: skip
    processes = []
    try:
        for words, log in zip(commands, logs, strict=True):
            processes.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), *words],
                    env=environment, stdout=log, stderr=log,
                )
            )  # fmt: skip

        def registered() -> int:
            # One that had to wait for its answer asks again.
            log = (tmp_path / "master.log").read_text()
            return len(set(re.findall(r"Registering worker (\S+)", log)))

        wait_until(lambda: registered() == 2, deadline=120)
        yield master
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
        for log in logs:
            log.close()


SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    # What the user interface shows is what is written here.
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
}


def submitting(**more: str) -> dict[str, str]:
    """Return an environment for `spark-submit` that contains no path of this
    checkout."""
    hidden_from_it = ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")
    return {
        **{k: v for k, v in os.environ.items() if k not in hidden_from_it},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **more,
    }


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_driver_that_runs_in_the_cluster_gets_its_specification_as_text(
    cluster: str, make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    # Without a password: the driver gets the environment of its worker, not ours.
    log = make_log("sqlite")
    log.send_many(150)
    before = hashes_in(log)
    elsewhere = tmp_path / "submitted"
    elsewhere.mkdir()
    script = elsewhere / "pipeline.py"
    script.write_text((PACKAGE / "spark" / "__main__.py").read_text())
    package = shutil.make_archive(
        str(elsewhere / "django_txmsg"), "zip", PACKAGE.parent, PACKAGE.name
    )
    [core] = (Path(pyspark.__file__).parent / "jars").glob("spark-core_*.jar")
    settings = SETTINGS | {
        "spark.driver.memory": "512m",
        "spark.eventLog.enabled": "false",
        "spark.standalone.submit.waitAppCompletion": "true",
        "spark.submit.pyFiles": package,
    }
    del settings["spark.driver.host"]
    # In cluster mode, Spark's standalone master does not start Python drivers.
    subprocess.run(
        ["spark-submit", "--master", cluster, "--deploy-mode", "cluster",
         *[word for item in settings.items() for word in ("--conf", "=".join(item))],
         "--class", "org.apache.spark.deploy.PythonRunner", f"file:{core}",
         str(script), package, "archive", "--older-than", "1d", "--table", "outbox",
         "--batch-rows", "100", "--no-vacuum", "--spec",
         JobSpec(services=(log.spec,), lake=lake).to_json()],
        env=submitting(), cwd=elsewhere, check=True,
        timeout=600,
    )  # fmt: skip

    told = [path.read_text() for path in tmp_path.rglob("driver-*/std*")]
    assert log.count() == 0, told
    assert_moved_once(before, log, lake, set(before))


@pytest.mark.timeout(600)
@pytest.mark.matrix
def test_a_real_cluster_runs_what_is_printed_with_the_package_as_a_zip(
    cluster: str, make_log: Callable[..., Log], tmp_path: Path
) -> None:
    log = make_log("postgresql")
    log.send_many(450, every=900.0)
    before = hashes_in(log)
    lake = LakeSpec(f"file://{tmp_path}/lake")
    events = tmp_path / "events"
    events.mkdir()
    lines = (CONF / "spark-defaults.conf").read_text().splitlines()
    lines += [f"{name} {value}" for name, value in SETTINGS.items()]
    lines.append(f"spark.eventLog.dir file://{events}")
    # No task before both are there: on a busy machine the first could do all of it.
    lines += ["spark.cores.max 2", "spark.scheduler.minRegisteredResourcesRatio 1.0",
              "spark.scheduler.maxRegisteredResourcesWaitingTime 120s"]  # fmt: skip
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    password = urlsplit(log.spec.url).password
    assert password
    printed = subprocess.run(
        [sys.executable, str(PROJECT / "manage.py"), "pipeline", "--print-submit",
         "archive", "--lake", lake.uri, "--table", "outbox", "--older-than", "1d",
         "--batch-rows", "100", "--no-vacuum", "--json"],
        env=environment(
            DATABASE_URL=log.spec.url, BROKER_DATABASE_URL=log.spec.url, SERVICE="shop",
            DJANGO_SETTINGS_MODULE="tests.spark.one_service", PYTHONPATH=str(ROOT),
        ), check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert password not in printed

    def surroundings() -> dict[str, str]:
        return submitting(
            SPARK_CONF_DIR=str(tmp_path), SPARK_MASTER=cluster,
            TXMSG_PASSWORD_SHOP=password,
        )  # fmt: skip

    def submit(script: str) -> dict[str, object]:
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=tmp_path, capture_output=True, text=True, env=surroundings(),
        )  # fmt: skip
        assert done.stdout, done.stderr[-4000:]
        assert password not in done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    facts = submit(printed)

    assert (facts["state"], facts["rows"]) == ("clean", 450), facts
    assert_moved_once(before, log, lake, set(before))
    assert delta_rows(lake).num_rows == 450
    # Both workers have run tasks.
    assert all(list((tmp_path / name).glob("app-*")) for name in ("one", "two"))

    # The script lies outside the checkout, so that only the zip has the package.
    script = tmp_path / "submitted" / "pipeline.py"
    script.parent.mkdir()
    script.write_text((PACKAGE / "spark" / "__main__.py").read_text())
    (tmp_path / "other.json").write_text(
        JobSpec(services=(log.spec,), lake=lake).to_json()
    )
    reconciled = submit(
        'spark-submit --master "$SPARK_MASTER" --py-files django_txmsg.zip'
        f" {script} reconcile --grace 0s --json --spec other.json"
    )
    assert reconciled["counts"] == {"never_received": 450}
    assert reconciled["exit_code"] == 1

    # Spark itself refuses a Python driver in this mode.
    refused = subprocess.run(
        ["spark-submit", "--master", cluster, "--deploy-mode", "cluster", script,
         "verify", "--spec", "other.json"],
        env=surroundings(), cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "not supported for python applications on standalone" in refused.stderr

    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if password.encode() in path.read_bytes()]
    assert len([path for path in written if events in path.parents]) >= 2
