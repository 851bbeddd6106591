"""tox tests every Python, Django and PySpark version that the docs promise. CI pins all
its downloads."""

from __future__ import annotations

import configparser
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TURNS, has_its_turn
from tests.faults import ROOT

PROMISED = (ROOT / "pyproject.toml").read_text()


def tox() -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None)
    read.read(ROOT / "tox.ini")
    return read


def environments() -> str:
    """Return the names of the environments that `make test-matrix` runs."""
    return tox()["tox"]["env_list"]


def test_the_matrix_leaves_out_nothing_that_make_test_does() -> None:
    """The matrix runs every test that `make test` runs."""
    lines = (
        tox()["testenv"]["commands"]
        + tox()["testenv:spark{40,41,42,43}{,-sample}"]["commands"]
    )
    commands = [line for line in lines.splitlines() if line.startswith("!s")]

    assert len(commands) == 3
    assert [line for line in commands if "sample}" in line or "matrix" in line] == []


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize(
    ("folder", "markers", "sqlite", "postgresql"),
    [
        ("integration", {"database"}, 2, 2),
        ("acceptance", {"database"}, 0, 4),
        ("acceptance", {"database", "sqlite"}, 2, 2),
        ("acceptance", set(), 8, 8),
        ("spark", {"database"}, 1, 1),
        ("unit", {"database"}, 8, 8),
    ],
)
def test_every_test_has_its_turn_on_its_databases(
    folder: str, markers: set[str], sqlite: int, postgresql: int, number: int
) -> None:
    name = f"tests/{folder}/test_store.py::test_rows[{number}]"
    item: Any = SimpleNamespace(
        nodeid=name,
        path=ROOT / name.partition("::")[0],
        get_closest_marker=markers.__contains__,
    )

    turns = [str(turn) for turn in range(TURNS)]
    on_sqlite = [one for one in turns if has_its_turn(item, "postgresql", one)]
    on_postgresql = [one for one in turns if has_its_turn(item, "sqlite", one)]

    assert (len(on_sqlite), len(on_postgresql)) == (sqlite, postgresql)
    if folder == "integration":
        assert on_sqlite != on_postgresql


def test_every_classifier_is_run() -> None:
    pairs = re.findall(r"\bpy(\d)(\d+)-django(\d)(\d)\b", environments())

    pythons = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', PROMISED)
    djangos = re.findall(r'"Framework :: Django :: (\d\.\d+)"', PROMISED)
    assert set(pythons) == {f"{pair[0]}.{pair[1]}" for pair in pairs}
    assert set(djangos) == {f"{pair[2]}.{pair[3]}" for pair in pairs}


def test_every_pyspark_of_the_extra_is_run() -> None:
    promised = re.search(r'"pyspark\[sql\]>=4\.(\d+),<4\.(\d+)"', PROMISED)
    run = re.search(r"\bspark\{([\d,]+)\}", environments())

    assert promised
    assert run
    minors = range(int(promised[1]), int(promised[2]))
    assert run[1].split(",") == [f"4{minor}" for minor in minors]


def test_every_action_is_pinned_by_a_digest_with_its_version() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    used = re.findall(
        r"uses: (.*)", "".join(workflow.read_text() for workflow in workflows)
    )

    assert len(used) > 10
    assert [
        action
        for action in used
        if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action)
    ] == []
