"""Settings of the test suite, and of the processes that it starts.

The databases are SQLite files, or on the PostgreSQL server that
`TXMSG_TEST_DATABASE_URL` names. A database has the same name in the test process and in
the processes that it starts, so that a test and its workers use the same rows.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path

import environ


def state_directory() -> Path:
    """Return the directory of this test run.

    The process that creates the directory also removes it. Each worker of pytest-xdist
    has its own directory, and a suffix in the name of its database. Processes that a
    worker starts use the worker's directory.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    inherited = os.environ.get("TXMSG_TEST_DIR")
    if inherited and os.environ.get("TXMSG_TEST_WORKER", "") == worker:
        return Path(inherited)
    made = Path(tempfile.mkdtemp(prefix=f"txmsg-tests-{worker}"))
    os.environ["TXMSG_TEST_DIR"] = str(made)
    os.environ["TXMSG_TEST_WORKER"] = worker
    if worker and os.environ.get("TXMSG_TEST_DATABASE_URL"):
        name, *query = os.environ["TXMSG_TEST_DATABASE_URL"].split("?")
        os.environ["TXMSG_TEST_DATABASE_URL"] = "?".join([f"{name}_{worker}", *query])
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


#: Whether the databases wait for the disk. A test that ends a process needs it not:
#: what was written is the operating system's. It is on unless tox.ini says `off`.
FSYNC = os.environ.get("TXMSG_TEST_FSYNC", "on") == "on"


def sqlite(name: str) -> dict[str, object]:
    """Return the settings of an SQLite file to which several processes write."""
    path = str(STATE_DIR / f"{name}.sqlite3")
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "" if FSYNC else "PRAGMA synchronous=OFF",
        },
        "TEST": {"NAME": path},
    }


def server(url: str) -> dict[str, object]:
    """Return the settings of a database on the server of `url`.

    The name gets the prefix `test_`, because the suite creates and drops the database.
    """
    config: dict[str, object] = environ.Env.db_url_config(url)
    config["NAME"] = f"test_{config['NAME']}"
    config["TEST"] = {"NAME": config["NAME"]}
    # What a test says for a process it starts.
    config["OPTIONS"] = json.loads(os.environ.get("TXMSG_TEST_DATABASE_OPTIONS", "{}"))
    return config


STATE_DIR = state_directory()
DATABASE_URL = os.environ.get("TXMSG_TEST_DATABASE_URL", "")

DATABASES = {
    "default": server(DATABASE_URL) if DATABASE_URL else sqlite("default"),
    "other": sqlite("other"),
}

SECRET_KEY = "for tests only"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
# Django 6.1 warns of a mail without it.
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.smtp.EmailBackend"}}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_txmsg",
    "tests.app",
]
# What a test says for a process it starts: a project that runs no pipeline.
if os.environ.get("TXMSG_TEST_PIPELINE") != "off":
    INSTALLED_APPS.append("django_txmsg.spark")

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

# Cheap passwords: the suite logs in often and guards nothing.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

TXMSG = {
    "SERVICE": "tests",
    "BROKERS": {
        "default": {"URL": os.environ.get("TXMSG_TEST_BROKER_URL", "database://")},
    },
    # What a test says for a process it starts (`tests.faults.ManageProcess`).
    **json.loads(os.environ.get("TXMSG_TEST_SETTINGS") or "{}"),
}

# What a test says for a process it starts that works tasks.
if "TXMSG_TEST_TASKS" in os.environ:
    TASKS = json.loads(os.environ["TXMSG_TEST_TASKS"])
