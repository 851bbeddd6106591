"""The pipeline runs where there is no Django, by spark-submit, and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest

import django_txmsg
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from tests.faults import wait_until
from tests.services.server import free_port
from tests.spark.archives import assert_moved_once, delta_rows, hashes_in
from tests.spark.conftest import JAVA_OPTIONS, ROOT
from tests.spark.log import Log

PACKAGE = Path(django_txmsg.__file__).parent

BLOCKED = """
import importlib, pkgutil, sys

class NoDjango:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "django":
            raise ImportError(f"{name} is imported where there is no Django")

sys.meta_path.insert(0, NoDjango())
import django_txmsg.spark
for found in pkgutil.walk_packages(django_txmsg.spark.__path__, "django_txmsg.spark."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
ours = sorted(n for n in sys.modules if n.startswith("django_txmsg."))
print([n for n in ours if not n.startswith("django_txmsg.spark")])
"""


def test_every_module_imports_without_django_and_only_the_words_of_the_wire() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['django_txmsg.wire']"


def test_a_specification_travels_as_json_without_the_password(monkeypatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    source = SourceSpec("shop", "postgresql://u@h/db", "SHOP_PASSWORD").resolved()
    spec = JobSpec(services=(source,), lake=LakeSpec("/lake"), retention={"outbox": 7})

    text = spec.to_json()

    assert "secret" not in text + repr(spec)
    assert "password=secret" in source.conninfo()
    assert JobSpec.from_json(text).service("shop").password_env == "SHOP_PASSWORD"


def run(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "django_txmsg.spark", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_the_exit_code_says_what_went_wrong(tmp_path: Path, make_log) -> None:
    log: Log = make_log("sqlite")
    spec = tmp_path / "job.json"
    spec.write_text(JobSpec(services=(log.spec,)).to_json())
    log.send_many(3)

    cases: list[tuple[int, str, list[str]]] = [
        (2, "invalid choice", ["nothing"]),
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
        done = run(*given, directory=tmp_path)
        assert (done.returncode, says in done.stdout + done.stderr) == (code, True), (
            words,
            done.stdout,
            done.stderr,
        )
    assert log.count() == 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A standalone cluster of the installed PySpark: a master and two workers."""
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
            return (tmp_path / "master.log").read_text().count("Registering worker")

        wait_until(lambda: registered() == 2, deadline=120)
        yield master
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
        for log in logs:
            log.close()


@pytest.mark.timeout(600)
def test_a_real_cluster_archives_with_the_package_as_a_zip(
    cluster: str, make_log: Callable[..., Log], tmp_path: Path
) -> None:
    log = make_log("postgresql")
    log.send_many(450, every=900.0)
    before = hashes_in(log)
    lake = LakeSpec(f"file://{tmp_path}/lake")
    (tmp_path / "job.json").write_text(
        JobSpec(services=(log.spec,), lake=lake).to_json()
    )
    archive = tmp_path / "django_txmsg.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in PACKAGE.rglob("*.py"):
            packed.write(path, path.relative_to(PACKAGE.parent))
    # Outside the checkout and without it on any path: what works is in the zip.
    script = tmp_path / "submitted" / "pipeline.py"
    script.parent.mkdir()
    script.write_text((PACKAGE / "spark" / "__main__.py").read_text())

    def submit(*words: str) -> dict[str, object]:
        home = Path(pyspark.__file__).parent
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }
        given = [f"--conf={name}={value}" for name, value in settings.items()]
        done = subprocess.run(
            [str(home / "bin" / "spark-submit"), "--master", cluster, *given,
             "--py-files", str(archive), str(script), *words,
             "--spec", str(tmp_path / "job.json"), "--json"],
            cwd=tmp_path, capture_output=True, text=True,
            env={k: v for k, v in os.environ.items()
                 if k not in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")}
            | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        )  # fmt: skip
        assert done.stdout, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    facts = submit(
        "archive", "--table", "outbox", "--older-than", "1d", "--batch-rows", "100",
        "--no-vacuum",
    )  # fmt: skip

    assert (facts["state"], facts["rows"]) == ("clean", 450), facts
    assert_moved_once(before, log, lake, set(before))
    assert delta_rows(lake).num_rows == 450
    # Both workers have run tasks.
    assert all(list((tmp_path / name).glob("app-*")) for name in ("one", "two"))
    reconciled = submit("reconcile", "--grace", "0s")
    assert reconciled["counts"] == {"never_received": 450}
    assert reconciled["exit_code"] == 1
