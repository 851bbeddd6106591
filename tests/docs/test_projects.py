"""The blocks of each how-to page work as a project, in their order, with nothing
overridden.

So the tests combine features as a user does, and find faults between features.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import HOW_TO, ROOT
from tests.docs.throwaway import Project
from tests.faults import wait_until
from tests.services import RabbitMQ
from tests.services.keeper import KEEPER
from tests.services.stomp_server import PASSWORD, USER

#: As a user has it: the plugin is found by its entry point.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:django_txmsg",
          "-p", "django_txmsg.pytest_plugin")  # fmt: skip


#: What `make test` runs; `make docs` and the matrix run every page.
SAMPLE = {"celery", "django-tasks", "flows", "install", "several-databases"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(one, marks=() if one.stem in SAMPLE else pytest.mark.matrix)
        for one in HOW_TO
    ],
    ids=lambda page: page.stem,
)
def test_the_project_of_a_page_works(page: Path, tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.follow(page)

    project.run("manage.py", "check")
    assert " passed" in project.run(*PYTEST)


@pytest.mark.matrix
def test_the_page_on_async_projects_works_with_atomic_requests(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.follow(ROOT / "docs" / "how-to" / "async.md")
    with (tmp_path / "settings.py").open("a") as settings:
        settings.write('DATABASES["default"]["ATOMIC_REQUESTS"] = True\n')

    assert " passed" in project.run(*PYTEST)


BATCHED = """
from django.db import transaction
from django_txmsg.flows import batch
with transaction.atomic():
    stored = batch([{"destination": "mail", "body": {}}], then="newsletter.sent")
"""
PROGRESS = """
from django_txmsg.models import Batch
print(Batch.objects.get().progress)
"""


@pytest.mark.matrix
def test_the_page_on_flows_works_with_batches(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.follow(ROOT / "docs" / "how-to" / "flows.md")
    with (tmp_path / "settings.py").open("a") as settings:
        settings.write('TXMSG = {"FLOWS": {"BATCHES": True}}\n')
    with (tmp_path / "shop" / "stages.py").open("a") as declared:
        declared.write('\n\n@stage("mail")\ndef mail(message):\n    pass\n')
    project.run("manage.py", "migrate", "--run-syncdb", "--verbosity", "0")
    project.run("manage.py", "shell", "--command", BATCHED)
    for command in ("relay", "consume", "relay", "consume"):
        project.run("manage.py", command, "--once")

    assert "answered=1" in project.run("manage.py", "shell", "--command", PROGRESS)


ORDERED = """
from django.db import transaction
from shop.models import Order
from shop.tasks import charge
with transaction.atomic():
    charge.delay(Order.objects.create(number="A-1").pk)
"""
CHARGED = """
from shop.models import Order
print(Order.objects.get(number="A-1").charged)
"""


WITHOUT_SETTINGS = """
import os
del os.environ["DJANGO_SETTINGS_MODULE"]
from shop.celery import app
print(app.conf.task_default_queue)
"""


def test_the_app_of_the_page_on_celery_names_its_settings(tmp_path: Path) -> None:
    """`celery -A shop.celery` imports the app. Django is not configured then."""
    project = Project(tmp_path)
    project.follow(ROOT / "docs" / "how-to" / "celery-outbox.md")
    (tmp_path / "project").mkdir()
    settings = 'from settings import *\nCELERY_TASK_DEFAULT_QUEUE = "of-the-settings"\n'
    (tmp_path / "project" / "settings.py").write_text(settings)

    assert "of-the-settings" in project.run("-c", WITHOUT_SETTINGS)


@pytest.mark.matrix
def test_the_page_on_celery_works_with_a_broker_and_a_worker(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    url = f"amqp://{USER}:{PASSWORD}@127.0.0.1:{rabbitmq.amqp_port}//"
    project = Project(tmp_path, {"CELERY_BROKER_URL": url, "C_FORCE_ROOT": "1"})
    project.follow(ROOT / "docs" / "how-to" / "celery-outbox.md")
    project.run("manage.py", "migrate", "--run-syncdb", "--verbosity", "0")
    project.run("manage.py", "shell", "--command", ORDERED)
    project.run("manage.py", "relay", "--once")

    command = ("-m", "celery", "-A", "shop.celery", "worker", "--pool", "solo")
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=project.environ(),
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    KEEPER.watch(worker.pid, signal.SIGKILL)
    try:
        wait_until(
            lambda: "True" in project.run("manage.py", "shell", "--command", CHARGED),
            deadline=90,
            message=lambda: (tmp_path / "worker.log").read_text(),
        )
    finally:
        worker.kill()
        worker.wait(30)
        KEEPER.forget(worker.pid)
