"""The pytest plugin, in the tests of a separate project."""

from __future__ import annotations

import pytest

from tests.acceptance import plugged

# By its module: this suite itself does without.
PLUGIN = ("-p", "no:django_txmsg", "-p", "django_txmsg.pytest_plugin")
QUIETLY = ("-p", "no:randomly", "-p", "no:cacheprovider", "-q")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DJANGO_SETTINGS_MODULE", "TXMSG_TEST_DIR", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)


def test_a_project_tests_its_messages(pytester: pytest.Pytester) -> None:
    plugged.write(
        pytester.path, test_shop=plugged.TEST_SHOP, test_brokers=plugged.TEST_BROKERS
    )

    result = pytester.runpytest_subprocess(*PLUGIN, *QUIETLY)

    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    result.assert_outcomes(passed=14)


def test_a_project_that_is_set_up_late_reaches_no_broker_either(
    pytester: pytest.Pytester,
) -> None:
    plugged.write(
        pytester.path,
        conftest="""
            import os
            import django
            import pytest

            @pytest.fixture(scope="module")
            def project():
                os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
                django.setup()
        """,
        test_late="""
            import pytest

            def test_sets_up(project):
                pass

            def test_reaches_nobody(project):
                from django_txmsg import conf
                assert conf.get().BROKERS["default"]["URL"].startswith("database://")

            @pytest.mark.txmsg_real_broker
            def test_asks(project):
                from django_txmsg import conf
                assert ":1?" in conf.get().BROKERS["default"]["URL"]
        """,
    )

    result = pytester.runpytest_subprocess(
        *PLUGIN, *QUIETLY, "-p", "no:django", "-c", "/dev/null", "--rootdir", "."
    )

    result.assert_outcomes(passed=3)


def test_plugin_imports_nothing_unless_asked(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("""
        import sys

        def test_it():
            assert "django_txmsg.conf" not in sys.modules
            assert "django_txmsg.models" not in sys.modules
    """)

    result = pytester.runpytest_subprocess(*PLUGIN, *QUIETLY, "-p", "no:django")

    result.assert_outcomes(passed=1)


def test_a_run_of_only_this_fixture_uses_the_test_database(
    pytester: pytest.Pytester,
) -> None:
    plugged.write(
        pytester.path,
        test_only="""
            from django.db import connection

            def test_it(txmsg):
                assert connection.settings_dict["NAME"] == "test_shop.sqlite3"
                assert not txmsg.sent
        """,
    )
    (pytester.path / "shop.sqlite3").touch()

    result = pytester.runpytest_subprocess(*PLUGIN, *QUIETLY)

    result.assert_outcomes(passed=1)
    assert (pytester.path / "shop.sqlite3").stat().st_size == 0


@pytest.mark.parametrize("transaction", [False, True])
def test_the_fixture_uses_the_test_databases_of_the_mark(
    pytester: pytest.Pytester, transaction: bool
) -> None:
    plugged.write(
        pytester.path,
        test_only=f"""
            import pytest
            from django.db import connections

            @pytest.mark.django_db(
                transaction={transaction}, databases=["default", "other"]
            )
            def test_it(txmsg):
                for alias in ("default", "other"):
                    connection = connections[alias]
                    assert connection.settings_dict["NAME"].startswith("test_")
                    assert connection.in_atomic_block is not {transaction}
                assert not txmsg.sent
        """,
    )
    with (pytester.path / "shop" / "settings.py").open("a") as settings:
        settings.write(
            "\nDATABASES['other'] = {**DATABASES['default'], 'NAME': 'other.sqlite3',"
            " 'TEST': {'NAME': 'test_other.sqlite3'}}\n"
        )

    result = pytester.runpytest_subprocess(*PLUGIN, *QUIETLY)

    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    result.assert_outcomes(passed=1)


def test_the_markers_are_known_and_explained(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*PLUGIN, "--markers")

    result.stdout.fnmatch_lines(["*txmsg_real_broker:*", "*txmsg_on_commit(mode=*"])


def test_a_project_with_celery_calls_its_tasks_in_every_test(
    pytester: pytest.Pytester,
) -> None:
    """The project needs no settings for its tests, and nothing is sent to Celery's
    broker."""
    plugged.write(
        pytester.path,
        test_tasks="""
            import pytest
            from django.core.management import CommandError, call_command
            from django.db import transaction
            from django.test import TestCase

            from django_txmsg import send_message
            from django_txmsg.models import OutboxMessage
            from django_txmsg.testing import outbox_messages
            from shop.tasks import charge


            def only_rows():
                assert {row.state for row in OutboxMessage.objects.all()} == {"pending"}
                assert outbox_messages("shop.tasks.charge")


            def test_in_a_transaction(txmsg):
                result = charge.delay(1)
                assert [str(one.id) for one in txmsg.sent] == [result.id]
                only_rows()


            def test_by_a_stage(txmsg):
                send_message("orders.charge", {})
                drained = txmsg.drain()
                assert (drained.processed, drained.tasks) == (1, 1)


            @pytest.mark.django_db(transaction=True)
            @pytest.mark.parametrize(
                "mode",
                [
                    pytest.param(mode, marks=pytest.mark.txmsg_on_commit(mode))
                    for mode in ("off", "inline", "thread")
                ],
            )
            def test_a_commit_sends_nothing(mode):
                with transaction.atomic():
                    charge.delay(1)
                only_rows()


            @pytest.mark.django_db(transaction=True)
            def test_a_relay_sends_nothing():
                with transaction.atomic():
                    charge.delay(1)
                with pytest.raises(CommandError, match="In a test nothing is sent"):
                    call_command("relay", "--once", "--broker", "celery", verbosity=0)
                only_rows()


            class InATestCase(TestCase):
                def test_it_is_a_row(self):
                    with self.captureOnCommitCallbacks(execute=True):
                        charge.delay(1)
                    only_rows()
        """,
    )
    shop = pytester.path / "shop"
    (shop / "celery.py").write_text(
        "from django_txmsg.celery import Celery\n"
        "app = Celery('shop', broker='memory://', set_as_current=False)\n"
    )
    (shop / "tasks.py").write_text(
        "from shop.celery import app\n"
        "@app.task\n"
        "def charge(order): raise AssertionError('it runs')\n"
    )
    with (shop / "stages.py").open("a") as stages:
        stages.write(
            "\nfrom shop.tasks import charge\n"
            "@stage('orders.charge')\n"
            "def of_order(message):\n"
            "    charge.delay(1)\n"
        )
    with (shop / "settings.py").open("a") as settings:
        settings.write(
            "\nTXMSG['BROKERS']['celery'] = {'URL': 'celery://shop.celery'}\n"
        )

    result = pytester.runpytest_subprocess(*PLUGIN, *QUIETLY)

    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    result.assert_outcomes(passed=7)
