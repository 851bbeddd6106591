"""The contract file is valid, and `check` reports breaking changes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import jsonschema
import pydantic
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from django_txmsg import (
    Destination,
    Message,
    codecs,
    contracts,
    message_type,
    stages,
    upgrade,
)
from django_txmsg.sending import destination
from tests import factories
from tests.acceptance.shop import PROJECT, environment
from tests.forgetting import forget_upgraders
from tests.running import committing, declared, txmsg

Item = TypeVar("Item")

OFFICIAL = Path(__file__).parents[1] / "unit" / "asyncapi-3.0.0.json"


@dataclass
class Line:
    amount: Decimal


@message_type("shop.Order")
@dataclass
class First:
    number: str
    lines: list[Line]
    above: First | None = None


@message_type("shop.Order", version=2)
@dataclass
class Compatible:
    number: str
    lines: list[Line]
    above: Compatible | None = None
    currency: str = "EUR"


@message_type("shop.Order", version=2)
@dataclass
class Breaking:
    order: str
    lines: list[Line]


@message_type("shop.Order", version=2)
@dataclass
class Demanding:
    """Code of version 1 can read its bodies, but it cannot read those of version 1."""

    number: str
    lines: list[Line]
    currency: str


@message_type("shop.Order", version=2, readable_from=1)
@dataclass
class Promising:
    order: str


@message_type("shop.Order")
@dataclass
class Unversioned:
    order: str


@message_type("shop.Cancel")
@dataclass
class Cancel:
    number: str


@message_type("shop.Order")
@dataclass
class Page(Generic[Item]):
    items: list[Item]


def handler_of(annotation: Any) -> Any:
    def handle(body: Any) -> None:
        """Do nothing."""

    handle.__annotations__["body"] = annotation
    return handle


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stages, "_stages", {})
    monkeypatch.setattr(destination, "_declared", [])
    yield
    forget_upgraders("shop.Order")
    codecs.forget()


@contextmanager
def service(
    takes: dict[str, Any] | None = None, sends: dict[str, Any] | None = None
) -> Iterator[None]:
    """Declare a service's stages, from `takes`, and the destinations that it sends to,
    from `sends`. Both map a destination's name to its type."""
    destination._declared.clear()
    codecs.forget()
    with ExitStack() as stack:
        for name, annotation in (takes or {}).items():
            stack.enter_context(declared(handler_of(annotation), name))
        for name, annotation in (sends or {}).items():
            Destination(name, annotation)
        yield


def contract(before: Any = None, **given: Any) -> contracts.Contract:
    with service(**given):
        return contracts.build(before)


def broken(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    old = contract(**before)
    with service(**after):
        return [str(one) for one in contracts.breaking(old, contracts.build(old))]


EVERYTHING: dict[str, Any] = {
    "takes": {
        "orders.place": First,
        "orders.events": First | Cancel,
        "topic:orders.placed": list[int],
        "orders.any": Message,
    },
    "sends": {"topic:orders.told": First, "orders.events": First | Cancel},
}


def test_the_document_is_valid_by_the_official_schema() -> None:
    found = contract(**EVERYTHING)

    jsonschema.validate(found, json.loads(OFFICIAL.read_text()))
    assert set(found["channels"]) == {
        *EVERYTHING["takes"], "topic:orders.told",
    }  # fmt: skip
    assert found["operations"]["receive.orders.place"]["action"] == "receive"
    assert found["operations"]["send.topic:orders.told"]["action"] == "send"
    assert set(found["components"]["messages"]) == {
        "shop.Order", "shop.Cancel", "topic.orders.placed.body",
    }  # fmt: skip


def test_every_reference_is_resolved_and_every_schema_valid() -> None:
    found = contract(**EVERYTHING)
    references = re.findall(r'"\$ref": "([^"]+)"', contracts.text(found))

    assert len(references) > 10
    for reference in references:
        at: Any = found
        for part in reference.removeprefix("#/").split("/"):
            at = at[part.replace("~1", "/").replace("~0", "~")]
    for message in found["components"]["messages"].values():
        jsonschema.Draft202012Validator.check_schema(message["payload"]["schema"])


def test_a_body_that_is_sent_is_valid_by_the_schema() -> None:
    found = contract(**EVERYTHING)
    order = First("A-1", [Line(Decimal("1.5"))])
    body = codecs.type_of(order)
    assert body is not None
    pointer = {"$ref": "#/components/messages/shop.Order/payload/schema"}

    jsonschema.validate(json.loads(body.encode(order)), {**found, **pointer})


def test_the_same_code_gives_the_same_text() -> None:
    turned = {
        kind: dict(reversed(list(given.items()))) for kind, given in EVERYTHING.items()
    }

    assert contracts.text(contract(**EVERYTHING)) == contracts.text(contract(**turned))


ORDER = {"orders.place": First}
NULLABLE = {"orders.place": First | None}
IN = contracts.OLD_MESSAGES
OUT = contracts.OLD_READERS


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"takes": ORDER, "sends": ORDER}, []),
        ({"takes": ORDER}, {"takes": ORDER}, []),
        # A stage that is there, and one that is gone.
        ({"takes": ORDER}, {}, [f"orders.place: no stage consumes it any more; {IN}"]),
        ({"sends": ORDER}, {}, []),
        # One type more, one less.
        ({"takes": ORDER}, {"takes": {"orders.place": First | Cancel}}, []),
        ({"takes": {"orders.place": First | Cancel}}, {"takes": ORDER},
         [f"orders.place: no stage takes shop.Cancel any more; {IN}"]),
        ({"sends": ORDER}, {"sends": {"orders.place": First | Cancel}},
         [f"orders.place: shop.Cancel is sent to it now; {OUT}"]),
        ({"sends": {"orders.place": First | Cancel}}, {"sends": ORDER}, []),
        # From every message to typed ones, and back.
        ({"takes": {"orders.place": Message}}, {"takes": ORDER},
         ["orders.place: its stage took every message, and now takes typed ones only; "
          + IN]),
        ({"takes": ORDER}, {"takes": {"orders.place": Message}}, []),
        # A null body more, one less; and in another channel.
        ({"takes": ORDER, "sends": ORDER}, {"takes": NULLABLE, "sends": ORDER}, []),
        ({"takes": NULLABLE, "sends": NULLABLE}, {"takes": ORDER, "sends": NULLABLE},
         [f"orders.place: no stage takes shop.Order.null any more; {IN}"]),
        ({"sends": ORDER}, {"sends": NULLABLE},
         [f"orders.place: shop.Order.null is sent to it now; {OUT}"]),
        ({"takes": NULLABLE}, {"takes": {**NULLABLE, "a.new": First}}, []),
        # By direction: who takes, and who sends.
        ({"takes": ORDER}, {"takes": {"orders.place": Compatible}}, []),
        ({"sends": ORDER}, {"sends": {"orders.place": Compatible}}, []),
        ({"takes": ORDER}, {"takes": {"orders.place": Breaking}},
         [f"shop.Order: $.order: missing; {IN}"]),
        ({"sends": ORDER}, {"sends": {"orders.place": Breaking}}, []),
        ({"sends": ORDER}, {"sends": {"orders.place": Promising}},
         [f"shop.Order: $.number: missing; {OUT}",
          f"shop.Order: $.lines: missing; {OUT}"]),
        ({"sends": ORDER}, {"sends": {"orders.place": Unversioned}},
         [f"shop.Order: $.number: missing; {OUT}",
          f"shop.Order: $.lines: missing; {OUT}"]),
        # A version that goes back.
        ({"sends": {"orders.place": Compatible}}, {"sends": ORDER},
         [f"shop.Order: version 2 has become 1; {OUT}"]),
    ],
)  # fmt: skip
def test_breaking_and_compatible_changes(
    before: dict[str, Any], after: dict[str, Any], told: list[str]
) -> None:
    assert broken(before, after) == told


def test_with_an_upgrader_a_new_type_breaks_no_old_messages() -> None:
    upgrade("shop.Order", from_version=1)(dict)

    assert broken({"takes": ORDER}, {"takes": {"orders.place": Breaking}}) == []


def test_the_oldest_version_that_can_read_a_message_is_sent(
    tmp_path: Path,
) -> None:
    file = tmp_path / "asyncapi.json"
    with txmsg(CONTRACT=str(file)):
        for cls, before, after in (
            (First, "shop.Order;v=1;min=1", "shop.Order;v=1;min=1"),
            (Compatible, "shop.Order;v=2;min=2", "shop.Order;v=2;min=1"),
            (Breaking, "shop.Order;v=2;min=1", "shop.Order;v=2;min=2"),
            (Compatible, "shop.Order;v=2;min=2", "shop.Order;v=2;min=2"),
        ):
            with service(takes={"orders.place": cls}):
                assert codecs.body_type(cls).header == before
                call_command("txmsg", "contracts", "export", stdout=io.StringIO())
                codecs.forget()
                assert codecs.body_type(cls).header == after
        file.write_text(contracts.text(contract(takes=ORDER)))
        with service(takes={"orders.place": Breaking}):
            call_command("txmsg", "contracts", "export", stdout=io.StringIO())
            codecs.forget()
            assert codecs.body_type(Breaking).header == "shop.Order;v=2;min=2"


def invoice(version: int, note: str | None = "") -> type:
    """Return a version of a type whose `note` is required, optional or missing."""

    @dataclass
    class Line:
        number: str

    @dataclass
    class Noted:
        line: Line
        note: str

    @dataclass
    class Optional:
        line: Line
        note: str = ""

    @dataclass
    class Bare:
        line: Line

    cls = {"": Noted, "may be left out": Optional, None: Bare}[note]
    return message_type("shop.Order", version=version)(cls)


def test_every_declared_reader_can_read_a_new_version() -> None:
    versions = [invoice(1), invoice(2, "may be left out"), invoice(3, None)]
    agreed, found = {}, []
    for cls in versions:
        agreed = contract(agreed, sends={"orders.told": cls})
        message = agreed["components"]["messages"]["shop.Order"]
        found.append(message["x-txmsg-readable-from"])
        for reference in re.findall(r'"\$ref": "#/([^"]+)"', contracts.text(agreed)):
            place = agreed
            for name in reference.split("/"):
                place = place[name.replace("~1", "/")]

    # Version 2 reads 3, and version 1 reads 2; but version 1 does not read 3.
    assert found == [1, 1, 2]
    assert list(message["x-txmsg-readers"]) == ["1", "2"]


def test_bodies_of_every_older_version_stay_readable() -> None:
    """Version 2 cannot be read by version 1, but the bodies of version 1 may wait."""

    @dataclass
    class Counted:
        number: str
        count: int

    @dataclass
    class Plain:
        number: str

    @dataclass
    class Named:
        number: str
        count: str = ""

    agreed: contracts.Contract = {}
    for version, cls in enumerate((Counted, Plain), start=1):
        message_type("shop.Order", version=version)(cls)
        both = {"orders.place": cls}
        agreed = contract(agreed, takes=both, sends=both)

    message_type("shop.Order", version=3)(Named)
    with service(takes={"orders.place": Named}):
        now = contracts.build(agreed)
        found = [str(one) for one in contracts.breaking(agreed, now)]
        upgrade("shop.Order", from_version=1)(dict)
        assert contracts.breaking(agreed, now) == []

    assert found == [f"shop.Order: $.count: type; {IN}"]


@pytest.mark.parametrize(
    ("one", "other"),
    [(First, Unversioned), (First, Compatible), (Page[int], Page[str])],
)
def test_two_types_of_one_name_are_refused(
    one: type, other: type, tmp_path: Path
) -> None:
    file = str(tmp_path / "contract.json")
    given = {"takes": {"orders.place": one}, "sends": {"elsewhere": other}}

    with service(**given), pytest.raises(CommandError, match=r"named 'shop\.Order'"):
        run("export", file)


def test_the_same_declaration_twice_is_no_second_type() -> None:
    @message_type("shop.Cancel")
    @dataclass
    class Cancel:
        number: str

    both = {"orders.place": Cancel, "orders.other": globals()["Cancel"]}

    assert "shop.Cancel" in contract(sends=both)["components"]["messages"]


@pytest.mark.parametrize(
    "form", [First | None, Annotated[First, pydantic.Field(description="The latest.")]]
)
def test_one_class_in_two_forms_is_no_second_type(form: Any) -> None:
    found = contract(takes={"orders.place": form}, sends=ORDER)["components"][
        "messages"
    ]

    assert found.pop("shop.Order.null", None) is None or form == First | None
    assert found == contract(sends=ORDER)["components"]["messages"]


def test_a_declared_reader_counts_for_an_optional_body() -> None:
    agreed = contract(takes=ORDER)
    agreed = contract(agreed, takes={"orders.place": Promising | None})

    message = agreed["components"]["messages"]["shop.Order"]
    assert message["x-txmsg-readable-from"] == 1


def test_a_version_must_stay_readable_by_all_declared_readers() -> None:
    agreed = contract(sends={"orders.told": invoice(1)})
    agreed = contract(agreed, sends={"orders.told": invoice(2, "may be left out")})

    with service(sends={"orders.told": invoice(2, None)}):
        now = contracts.build(agreed)
        found = [str(one) for one in contracts.breaking(agreed, now)]

    assert found == [f"shop.Order: $.note: missing; {OUT}"]


def run(*arguments: str) -> tuple[str, int]:
    out = io.StringIO()
    try:
        call_command("txmsg", "contracts", *arguments, stdout=out)
    except SystemExit as error:
        return out.getvalue(), int(str(error.code))
    return out.getvalue(), 0


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    file = str(tmp_path / "contract.json")
    with service(takes=ORDER):
        with pytest.raises(CommandError, match="contracts export"):
            run("check", file)
        assert run("export", file) == (f"Wrote {file}.\n", 0)
        assert run("export", file) == (f"{file} matches the code.\n", 0)
        assert run("check", file) == ("The contract matches the code.\n", 0)
        assert json.loads(run("export", "-")[0])["asyncapi"] == "3.0.0"
    with service(takes={"orders.place": Compatible}):
        said, code = run("check", file)
        assert (code, "The changes break nothing" in said) == (0, True)
    with service(takes={"orders.place": Breaking}):
        assert run("check", file) == (f"shop.Order: $.order: missing; {IN}\n", 1)
        said, code = run("check", file, "--json")
        assert (code, json.loads(said)["breaking"]) == (
            1,
            [{"where": "shop.Order", "what": "$.order: missing", "breaks": IN}],
        )


@pytest.mark.parametrize(
    "classes",
    [
        (First, Breaking),
        (First, Demanding),
        (First, Compatible, Unversioned),
        (First, Compatible, Breaking),
    ],
)
def test_check_passes_after_the_export_of_a_break(
    classes: tuple[type, ...], tmp_path: Path
) -> None:
    file = str(tmp_path / "contract.json")
    *earlier, last = ({"orders.place": cls} for cls in classes)
    for both in earlier:
        with service(takes=both, sends=both):
            run("export", file)
    with service(takes=last, sends=last):
        assert run("check", file)[1] == 1
        run("export", file)
        assert run("check", file) == ("The contract matches the code.\n", 0)


@pytest.mark.parametrize("cls", [Breaking, Demanding])
def test_check_reports_a_removed_upgrader_until_the_export(
    cls: type, tmp_path: Path
) -> None:
    file = str(tmp_path / "contract.json")
    with service(takes=ORDER):
        run("export", file)
    upgrade("shop.Order", from_version=1)(dict)
    with service(takes={"orders.place": cls}):
        run("export", file)
        assert run("check", file)[1] == 0
    forget_upgraders("shop.Order")
    with service(takes={"orders.place": cls}):
        said, code = run("check", file)
        assert (code, said.count(IN)) == (1, 1)
        run("export", file)
        assert run("check", file) == ("The contract matches the code.\n", 0)


def test_check_reports_a_break_when_a_stage_first_takes_a_sent_type() -> None:
    """While the type was only sent, no one was shown the break."""
    agreed: contracts.Contract = {}
    for cls in (First, Demanding):
        agreed = contract(agreed, sends={"orders.place": cls})

    with service(takes={"orders.place": Demanding}):
        found = contracts.breaking(agreed, contracts.build(agreed))

    assert [str(one) for one in found] == [f"shop.Order: $.currency: missing; {IN}"]


@pytest.mark.parametrize("content", ["[]", "{}", '"a"', "<<<<<<< HEAD", None])
def test_a_file_that_is_no_contract_is_named(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "contract.json"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with service(takes=ORDER):
        for action in ("check", "export"):
            with pytest.raises(CommandError, match=re.escape(f"{file} ")):
                run(action, str(file))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "<<<<<<< HEAD",
        '{"components": {"messages": {"shop.Order": "a"}}}',
        '{"components": {"messages": {"shop.Order": null}}}',
    ],
)
def test_a_sender_logs_once_that_the_contract_cannot_be_read(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "asyncapi.json"
    with txmsg(CONTRACT=str(file)):
        assert codecs.body_type(Compatible).header == "shop.Order;v=2;min=1"
        assert "cannot be read" not in caplog.text
        file.write_text(content)
        codecs.forget()
        for cls in (Compatible, Breaking):
            assert codecs.body_type(cls).header == "shop.Order;v=2;min=1"
    assert caplog.text.count(f"the contract {file} cannot be read") == 1


@committing
def test_rows_waiting_for_a_removed_type_are_reported(tmp_path: Path) -> None:
    file = str(tmp_path / "contract.json")
    header = {"txmsg-type": "shop.Cancel;v=1;min=1"}
    factories.OutboxMessageFactory(destination="orders.old")
    factories.OutboxMessageFactory(destination="elsewhere", headers=header)
    factories.InboxMessageFactory(stage="orders.old", parked=True)
    factories.QueueMessageFactory(queue="orders.old")
    factories.DeadLetterFactory(stage="x", destination="x", headers=header)
    with service(takes={"orders.old": Cancel}, sends={"elsewhere": First}):
        run("export", file)
        assert run("check", file, "--database") == (
            "The contract matches the code.\n",
            0,
        )
    with service(sends={"elsewhere": First}):
        for alias in ("nope", ""):
            with pytest.raises(CommandError, match=f"No database '{alias}'"):
                run("check", file, "--database", alias)
        said, code = run("check", file, "--database", "default")

    assert code == 1
    assert said.splitlines() == [
        f"orders.old: no stage consumes it any more; {IN}",
        "orders.old: 1 pending in the outbox; rows still wait for it",
        "orders.old: 1 parked; rows still wait for it",
        "orders.old: 1 in the embedded broker; rows still wait for it",
        "stage orders.old: 1 parked; rows still wait for it",
        "shop.Cancel: 1 pending in the outbox; rows still wait for it",
        "shop.Cancel: 1 open dead letters; rows still wait for it",
    ]


@committing
def test_every_command_is_a_verb() -> None:
    out = io.StringIO()

    call_command("txmsg", "prune_messages", "--dry-run", stdout=out)

    assert out.getvalue()


def test_the_example_project_keeps_its_contract(tmp_path: Path) -> None:
    """`contracts check` accepts the example project. It finds the contract file beside
    manage.py, whatever the current directory is."""
    done = subprocess.run(
        [sys.executable, PROJECT / "manage.py", "txmsg", "contracts", "check"],
        cwd=tmp_path,
        env=environment(DATABASE_URL="sqlite://:memory:"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
