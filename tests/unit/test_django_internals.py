"""Django has all undocumented names that the package uses, and only two modules use
them.

If a Django release lacks one of these names, a test here fails and names it. Without
the test, a stage's transaction might fail.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.base import BaseHandler
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpResponse

import django_txmsg
from django_txmsg import django_internals, middleware

#: Attributes of a connection, in the state in which a new one has them.
STATE = {
    "atomic_blocks": [],
    "autocommit": False,
    "close_at": None,
    "closed_in_transaction": False,
    "commit_on_exit": True,
    "connection": None,
    "errors_occurred": False,
    "execute_wrappers": [],
    "force_debug_cursor": False,
    "health_check_done": False,
    "in_atomic_block": False,
    "needs_rollback": False,
    "queries_log": deque(),
    "rollback_exc": None,
    "run_on_commit": [],
    "savepoint_ids": [],
}
#: Methods of a connection, with the parameters that are passed.
METHODS = {
    "close": (),
    "close_if_health_check_failed": (),
    "create_cursor": ("name",),
    "ensure_connection": (),
    "is_usable": (),
    "rollback": (),
    "run_and_clear_commit_hooks": (),
    "set_autocommit": (
        "autocommit",
        "force_begin_transaction_with_broken_autocommit",
    ),
    "set_rollback": ("rollback",),
}
#: What else a connection has.
OTHERS = ("features", "settings_dict", "timezone", "wrap_database_errors")
#: Of SQLite's connections, once they know their parameters.
SQLITE = ("transaction_mode", "is_in_memory_db")
#: Of features, of `transaction.Atomic`, of request handlers, and of views.
FEATURES = ("uses_server_side_binding",)
ATOMIC = ("_from_testcase",)
HANDLER = {
    "make_view_atomic": ("view",),
    "process_exception_by_middleware": ("exception", "request"),
}
VIEW = ("_non_atomic_requests",)
#: Methods of a queryset, with the parameters that are passed.
QUERYSET = {"_raw_delete": ("using",)}

#: Undocumented names that modules import only when they need them. This test fails
#: before a user's process would.
IMPORTED = [
    ("django.contrib.admin.views.main", "ChangeList"),
    ("django.contrib.admin.views.main", "SEARCH_VAR"),
    ("django.core.management", "get_commands"),
    ("django.core.management", "load_command_class"),
    ("django.db.backends.postgresql.base", "ServerSideCursor"),
    ("django.db.backends.postgresql.psycopg_any", "register_tzloader"),
    ("django.http.request", "RawPostDataException"),
    ("django.utils.module_loading", "autodiscover_modules"),
    ("django.utils.module_loading", "module_has_submodule"),
]

#: Names that mean nothing else anywhere: found in another file, they are a use of
#: Django's own that belongs into one of the two modules. (`connection`, `rollback`,
#: `features` and `autocommit` are common words, and so are `close` and `is_usable`.)
TELLING = {
    *(STATE.keys() - {"connection", "autocommit"}),
    *(METHODS.keys() - {"close", "rollback", "is_usable", "set_rollback"}),
    *("features", "settings_dict", "wrap_database_errors"),
    *FEATURES,
    *ATOMIC,
    *HANDLER,
    *VIEW,
    *QUERYSET,
    "Atomic",
}
#: kombu's connection has a method of that name; the STOMP client knows no Django, and
#: looks whether one is loaded.
ELSEWHERE = {"brokers/celery.py", "jms/options.py"}


def new(vendor: str) -> object:
    """Return a connection that was never opened."""
    module = __import__(f"django.db.backends.{vendor}.base", fromlist=["base"])
    settings = {**connections["default"].settings_dict, "OPTIONS": {}}
    wrapper: object = module.DatabaseWrapper(settings, "contract")
    return wrapper


VENDORS = pytest.mark.parametrize("vendor", ["sqlite3", "postgresql"])


@VENDORS
@pytest.mark.parametrize("name", STATE)
def test_used_state_of_a_connection_exists(vendor: str, name: str) -> None:
    assert vars(new(vendor))[name] == STATE[name]


@VENDORS
@pytest.mark.parametrize("name", METHODS)
def test_used_methods_of_a_connection_have_their_parameters(
    vendor: str, name: str, django_db_blocker: Any
) -> None:
    with django_db_blocker.unblock():
        parameters = inspect.signature(getattr(new(vendor), name)).parameters
    assert tuple(parameters) == METHODS[name]


@VENDORS
@pytest.mark.parametrize("name", OTHERS)
def test_other_used_attributes_of_a_connection_exist(vendor: str, name: str) -> None:
    assert hasattr(new(vendor), name)


def test_a_connection_forgets_its_block_when_it_connects() -> None:
    """When Django connects, it resets attributes of the connection. So a transaction
    that begins late saves these attributes before it connects. To notice the first use
    of the database, such a transaction replaces two methods of the connection. Django
    calls both methods, in the expected order, before it opens a cursor or sets
    autocommit."""
    wrapper = type(new("sqlite3"))
    source = inspect.getsource(wrapper.connect)  # type: ignore[attr-defined]
    forgotten = {name for name in STATE if f"self.{name} =" in source}
    assert forgotten - {"close_at", "connection", "health_check_done"} <= {
        *django_internals._BLOCK,
        "closed_in_transaction",
        "errors_occurred",
    }
    for method in ("_cursor", "set_autocommit"):
        way = inspect.getsource(getattr(wrapper, method))
        found = [way.index(f"self.{name}(") for name in django_internals._FIRST]
        assert found == sorted(found)


def test_sqlite_has_the_attributes_of_its_modes() -> None:
    wrapper: Any = new("sqlite3")
    wrapper.get_connection_params()
    assert not [name for name in SQLITE if not hasattr(wrapper, name)]


def test_features_have_the_attributes_that_we_read() -> None:
    features = new("postgresql").features  # type: ignore[attr-defined]
    assert not [name for name in FEATURES if not hasattr(features, name)]


def test_atomic_has_the_attributes_that_we_read() -> None:
    atomic = transaction.Atomic("default", True, False)
    assert not [name for name in ATOMIC if not hasattr(atomic, name)]
    assert tuple(inspect.signature(transaction.Atomic).parameters) == (
        "using",
        "savepoint",
        "durable",
    )


@pytest.mark.django_db(transaction=True)
def test_djangos_error_for_a_nested_durable_block_is_recognized() -> None:
    with pytest.raises(RuntimeError) as error, transaction.atomic():  # noqa: SIM117
        with transaction.atomic(durable=True):
            pass
    assert django_internals.refuses_durable(error.value)


@pytest.mark.django_db(transaction=True)
def test_a_hook_is_savepoints_function_and_robustness() -> None:
    with transaction.atomic():
        transaction.on_commit(print, robust=True)
        assert connections["default"].run_on_commit == [(set(), print, True)]
        with transaction.atomic():
            transaction.on_commit(repr)
            (name,) = connections["default"].savepoint_ids
            assert connections["default"].run_on_commit[1] == ({name}, repr, False)
            connections["default"].run_on_commit.clear()


@pytest.mark.parametrize("name", HANDLER)
def test_request_handlers_have_the_parameters_that_we_pass(name: str) -> None:
    method = getattr(BaseHandler, name)
    parameters = tuple(inspect.signature(inspect.unwrap(method)).parameters)
    assert parameters == ("self", *HANDLER[name])


@pytest.mark.parametrize("name", QUERYSET)
def test_querysets_have_the_parameters_that_we_pass(name: str) -> None:
    method = getattr(QuerySet, name)
    assert tuple(inspect.signature(method).parameters) == ("self", *QUERYSET[name])


@pytest.mark.parametrize("name", VIEW)
def test_a_non_atomic_view_is_recognized(name: str) -> None:
    view = transaction.non_atomic_requests(using="other")(lambda _: HttpResponse())
    assert getattr(view, name) == {"other"}
    assert middleware.is_non_atomic(view, "other")


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_imported_names_of_django_exist(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


PACKAGE = Path(django_txmsg.__file__).parent
MODULES = ("django_internals.py", "middleware.py")


def names_in(path: Path) -> Iterator[str]:
    """Yield the attributes and the string constants in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_undocumented_names_are_used_in_two_modules() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in TELLING.intersection(names_in(path))
        if path.name not in MODULES and str(path.relative_to(PACKAGE)) not in ELSEWHERE
    }
    assert not found


def test_everything_named_here_is_used() -> None:
    used = {name for module in MODULES for name in names_in(PACKAGE / module)}
    assert used >= {*STATE, *METHODS, *OTHERS, *SQLITE, *FEATURES, *ATOMIC} | {
        *HANDLER,
        *VIEW,
        *QUERYSET,
    }
