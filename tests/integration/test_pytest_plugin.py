"""The pytest plugin, in the tests of a project of its own."""

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


def test_where_nobody_asks_for_messages_nothing_is_imported(
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


def test_without_pytest_django_the_fixture_says_what_to_install(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("def test_it(txmsg): pass")

    result = pytester.runpytest_subprocess(*PLUGIN, *QUIETLY, "-p", "no:django")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*pip install pytest-django*"])


def test_the_markers_are_known_and_explained(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*PLUGIN, "--markers")

    result.stdout.fnmatch_lines(["*txmsg_real_broker:*", "*txmsg_on_commit(mode=*"])
