"""README and brokers.md show the versions of the recorded test runs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.faults import ROOT

MIXED = """
import pytest

def test_passes(): pass

def test_fails():
    assert 1 == 2, "a reason"

@pytest.mark.rabbitmq
def test_uses_a_broker(): pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the clean-up")

def test_fails_afterwards(broken): pass

tries = []

def test_passes_at_the_second_try():
    tries.append(1)
    assert len(tries) == 2, "too early"

def test_is_left_out():
    pytest.skip("not today")
"""


@pytest.fixture(scope="module")
def what_ran() -> Any:
    """`scripts/what_ran.py` as a module."""
    spec = spec_from_file_location("what_ran", ROOT / "scripts" / "what_ran.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(
    scope="module",
    params=["one process", pytest.param("two workers", marks=pytest.mark.matrix)],
)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Return the results of a pytest run in which some tests failed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "test_mixed.py").write_text(MIXED)
    (folder / "test_broken.py").write_text("import there_is_no_such_module\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = rabbitmq\n")
    workers = ["-n", "2"] if request.param == "two workers" else []
    command = [sys.executable, "-m", "pytest", "-p", "no:django", *workers]
    results = ["-p", "tests.results", "--results", "left/mixed", "--reruns", "1"]
    subprocess.run(
        [*command, *results, "--continue-on-collection-errors"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "tests.settings"},
        check=False,
        timeout=120,
    )
    return json.loads((folder / "left" / "mixed-sqlite.json").read_text())


def test_the_pages_show_the_table_of_what_ran(what_ran: Any) -> None:
    table = what_ran.table(json.loads(what_ran.TESTED.read_text()))

    assert [what_ran.TABLE.findall(page.read_text()) for page in what_ran.PAGES] == [
        [table],
        [table],
    ]


def test_a_run_ends_with_its_counts_and_its_failures(what_ran: Any, run: Any) -> None:
    first, *failures = what_ran.closing("sqlite", run).splitlines()

    assert first == "sqlite: 3 passed, 3 failed, 1 skipped; exit code 1"
    assert sorted(line.split(": ")[0] for line in failures) == [
        "  FAILED ONCE test_mixed.py::test_passes_at_the_second_try",
        "  FAILED test_broken.py",
        "  FAILED test_mixed.py::test_fails",
        "  FAILED test_mixed.py::test_fails_afterwards",
    ]
    assert "test_fails: AssertionError: a reason" in "".join(failures)


def test_version_is_listed_with_the_tests_that_used_it(what_ran: Any, run: Any) -> None:
    run["servers"]["rabbitmq"] = "4.9.1"

    tested = what_ran.merged({"RabbitMQ": {"3.1": {"passed": 7}}}, [run])

    (pair,) = tested["Python with Django"].values()
    assert (pair["passed"], pair["failed"]) == (3, 3)
    assert tested["RabbitMQ"]["3.1"] == {"passed": 7}
    assert tested["RabbitMQ"]["4.9.1"]["passed"] == 1


def test_the_later_run_of_a_test_counts(what_ran: Any, run: Any) -> None:
    mended = {**run, "tests": {"test_mixed.py::test_fails": ["passed"]}}

    tested = what_ran.merged({}, [run, mended])

    (pair,) = tested["Python with Django"].values()
    assert (pair["passed"], pair["failed"]) == (4, 2)


def test_a_test_that_was_renamed_counts_under_its_new_name_only(
    what_ran: Any, run: Any, tmp_path: Path
) -> None:
    renamed = MIXED.replace("test_fails()", "test_fails_no_more()")
    (tmp_path / "test_mixed.py").write_text(renamed)
    later = {**run, "tests": {"test_mixed.py::test_fails_no_more": ["passed"]}}

    known = [what_ran.present(one, tmp_path) for one in (run, later)]

    (pair,) = what_ran.merged({}, known)["Python with Django"].values()
    # Not test_fails, and not the file that could not be imported.
    assert (pair["passed"], pair["failed"]) == (4, 1)


def test_every_test_that_was_collected_is_found_in_its_file(
    what_ran: Any, request: pytest.FixtureRequest
) -> None:
    names = [item.nodeid for item in request.session.items]

    assert [name for name in names if not what_ran.there(name, ROOT)] == []
