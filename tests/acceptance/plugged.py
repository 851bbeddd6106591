"""The files of a project that tests itself with the pytest plugin."""

from __future__ import annotations

import textwrap
from pathlib import Path

#: No server listens there, and nothing may connect to it.
NOBODY = "stomp://user:secret@127.0.0.1:1?connect_timeout=1"

FILES = {
    "shop/__init__.py": "",
    "shop/settings.py": f"""
        SECRET_KEY = "for tests only"
        USE_TZ = True
        INSTALLED_APPS = ["django.contrib.contenttypes", "django_txmsg", "shop"]
        MIDDLEWARE = ["django_txmsg.middleware.OutboxMiddleware"]
        ROOT_URLCONF = "shop.urls"
        DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
        # A file: Django leaves a relay's threads' connections to one in memory open,
        # and Python 3.13 warns of them.
        DATABASES = {{
            "default": {{
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": "shop.sqlite3",
                "TEST": {{"NAME": "test_shop.sqlite3"}},
            }}
        }}
        TXMSG = {{"SERVICE": "shop", "BROKERS": {{"default": {{"URL": "{NOBODY}"}}}}}}
    """,
    "shop/urls.py": """
        from django.http import HttpResponse
        from django.urls import path

        from django_txmsg import send_message


        def order(request):
            send_message("orders.place", {"number": "A-1"})
            return HttpResponse("ordered")


        urlpatterns = [path("order/", order)]
    """,
    "shop/stages.py": """
        from django_txmsg import send_message, stage

        handled = []


        @stage("orders.place")
        def place(message):
            handled.append(message.body)
            send_message("mails.confirm", message.body)
    """,
    "pytest.ini": """
        [pytest]
        DJANGO_SETTINGS_MODULE = shop.settings
        addopts = --strict-markers
        pythonpath = .
    """,
}


def write(where: Path, **tests: str) -> None:
    """Write the project's files and these test modules into `where`."""
    named = {f"{name}.py": text for name, text in tests.items()}
    for name, text in {**FILES, **named}.items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


#: What a user writes.
TEST_SHOP = """
    import pytest
    from django.conf import settings
    from django.db import transaction
    from django.test import TestCase, TransactionTestCase

    from django_txmsg import send_message
    from shop import stages


    def test_what_a_view_sends_is_seen(txmsg, client):
        assert client.get("/order/").content == b"ordered"
        assert [one.body for one in txmsg.sent] == [{"number": "A-1"}]
        assert txmsg.sent("mails.confirm") == []


    def test_messages_make_their_whole_way(txmsg):
        stages.handled.clear()
        send_message("orders.place", {"number": "A-2"})
        drained = txmsg.drain("orders.place")
        assert (drained.dispatched, drained.processed) == (2, 1)
        assert stages.handled == [{"number": "A-2"}]
        assert len(txmsg.sent("mails.confirm")) == 1


    @pytest.mark.django_db(transaction=True)
    def test_a_commit_reaches_nobody(txmsg):
        with transaction.atomic():
            send_message("orders.place", {})
        assert settings.TXMSG["BROKERS"]["default"]["URL"].startswith("database://")
        assert settings.TXMSG["DISPATCH_ON_COMMIT"] == "off"


    @pytest.mark.txmsg_on_commit("inline")
    @pytest.mark.django_db(transaction=True)
    def test_a_commit_dispatches_to_the_embedded_broker_where_that_is_asked(txmsg):
        from django_txmsg.models import OutboxMessage

        with transaction.atomic():
            send_message("orders.place", {})
        assert OutboxMessage.objects.get().state == "dispatched"


    class InATestCase(TestCase):
        def test_a_request_sends_its_control_message_to_nobody(self):
            assert self.client.get("/order/").content == b"ordered"

        def test_hooks_that_run_dispatch_to_nobody(self):
            with self.captureOnCommitCallbacks(execute=True):
                send_message("orders.place", {})


    class InACaseThatCommits(TransactionTestCase):
        def test_a_request_sends_its_control_message_to_nobody(self):
            assert self.client.get("/order/").content == b"ordered"
"""


TEST_BROKERS = """
    import pytest
    from django.conf import settings
    from django.core.management import call_command
    from django.db import transaction
    from django.test import SimpleTestCase, override_settings

    from django_txmsg import conf, jms, send_message
    from django_txmsg.testing import RABBITMQ


    @pytest.mark.txmsg_real_broker
    def test_marker_keeps_the_brokers_of_the_settings():
        assert ":1?" in conf.get().BROKERS["default"]["URL"]
        assert "DISPATCH_ON_COMMIT" not in settings.TXMSG


    @pytest.mark.txmsg_real_broker
    @pytest.mark.txmsg_on_commit(mode="inline")
    def test_markers_keep_brokers_and_dispatch_on_commit():
        assert ":1?" in conf.get().BROKERS["default"]["URL"]
        assert conf.get().DISPATCH_ON_COMMIT == "inline"


    @override_settings(TXMSG={"BROKERS": {"default": {"URL": "stomp://there:2"}}})
    class OverridesTheSettings(SimpleTestCase):
        def test_overridden_settings_reach_no_broker(self):
            assert conf.get().BROKERS["default"]["URL"].startswith("database://")

        @pytest.mark.txmsg_real_broker
        def test_overridden_settings_reach_their_broker_by_marker(self):
            assert conf.get().BROKERS["default"]["URL"] == "stomp://there:2"


    @override_settings(TXMSG={"BROKERS": 5})
    class SettingsThatAreWrong(SimpleTestCase):
        def test_they_stay_so(self):
            assert conf.problems()


    @pytest.mark.django_db(transaction=True)
    def test_scripted_broker_receives_what_the_relay_sends(txmsg, scripted_broker):
        with transaction.atomic():
            sent = send_message("orders.place", {"number": "A-3"})
        call_command("relay", "--once", verbosity=0)
        (frame,) = scripted_broker.wait_for("SEND")
        assert frame["txmsg-id"] == str(sent.id)


    @pytest.mark.parametrize("scripted_broker", [RABBITMQ], indirect=True)
    def test_scripted_broker_has_the_given_profile(scripted_broker):
        assert scripted_broker.profile is RABBITMQ
"""
