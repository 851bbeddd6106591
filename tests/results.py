"""Writes a file with the results of a test run, and the versions that the run used.

    pytest -p tests.results --results build/results/unit tests/unit

At the end of CI, `scripts/what_ran.py` prints such files, and writes the tables of
tested versions from them.
"""

from __future__ import annotations

import json
import platform
import sqlite3
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import services

#: Markers that say which server a test used.
SERVERS = ("activemq", "rabbitmq")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the path of the result file, without its suffix."""
    parser.addoption("--results", type=Path, help="where to leave how each test ended")


def pytest_configure(config: pytest.Config) -> None:
    """Make the main process collect the results, and make each pytest-xdist worker
    report its servers to the main process."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Worker(config))
    elif config.option.results:
        config.pluginmanager.register(_Results(config))


class _Worker:
    """A pytest-xdist worker process, which starts servers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_sessionfinish(self) -> None:
        self._config.workeroutput["servers"] = _versions()  # type: ignore[attr-defined]


class _Results:
    """The result of each test, from all processes."""

    def __init__(self, config: pytest.Config) -> None:
        on_postgresql = config.pluginmanager.has_plugin("tests.on_postgresql")
        self._database = "postgresql" if on_postgresql else "sqlite"
        path: Path = config.option.results
        self._path = path.with_name(f"{path.name}-{self._database}.json")
        self._servers: dict[str, str] = {}
        self._outcomes: dict[str, str] = {}
        self._used: dict[str, list[str]] = {}
        self._failures: list[str] = []
        self._first_tries: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst result of a test's three phases."""
        if report.failed or report.when == "call" or report.skipped:
            if self._outcomes.get(report.nodeid) != "failed":
                self._outcomes[report.nodeid] = report.outcome
            used = [name for name in SERVERS if name in report.keywords]
            if "database" in report.keywords:
                used.append(self._database)
            self._used[report.nodeid] = used
        if report.failed:
            self._failures.append(_told(report))
        elif report.outcome == "rerun":  # pytest-rerunfailures, which runs it again
            self._first_tries[report.nodeid] = _told(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that cannot be imported as a failure."""
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
            self._failures.append(_told(report))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the servers that a pytest-xdist worker has reported at its end. A worker
        that crashed has reported no servers."""
        self._servers |= getattr(node, "workeroutput", {}).get("servers", {})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "python": platform.python_version(),
            "django": metadata.version("django"),
            "pyspark": _installed("pyspark"),
            "database": self._database,
            "servers": {"sqlite": sqlite3.sqlite_version} | self._servers | _versions(),
            "exit": int(exitstatus),
            "failures": self._failures,
            "failed_once": [
                told
                for test, told in self._first_tries.items()
                if self._outcomes[test] == "passed"
            ],
            "tests": {
                test: [outcome, *self._used.get(test, [])]
                for test, outcome in self._outcomes.items()
            },
        }
        self._path.write_text(json.dumps(results, indent=1))


def _told(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the test's id and the first line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    (line, *_) = text.strip().splitlines() or [""]
    return f"{report.nodeid}: {line[:200]}"


def _versions() -> dict[str, str]:
    """Return the versions of the servers that this process has started."""
    return {one.name: one.version for one in services.running_servers() if one.version}


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
