"""The example project as three services, with planted faults between them.

`shop` places orders, `payments` charges them, and `shipping` ships them. For each
order, the project's own commands store, relay and consume three messages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from django_txmsg.spark.spec import SourceSpec
from tests.acceptance.shop import PROJECT, environment
from tests.services import PostgreSQL
from tests.spark.conftest import ROOT

STAGES = {
    "shop": "orders.shipped",
    "payments": "payments.charge",
    "shipping": "shipping.ship",
}
#: What happens to an order, by its number in a hundred; nothing to the others.
FATES = {
    1: "lost", 2: "doubled", 3: "bank closed", 4: "fails", 5: "late",
    6: "again after the archive", 7: "stranger", 8: "lost on the second hop",
}  # fmt: skip
_QUEUE = "django_txmsg_queuemessage"
_COPY = f"INSERT INTO {_QUEUE} (queue, headers, body, deliveries) "

PLACE = """
from django.test import Client
client = Client(SERVER_NAME="localhost")
for number in range({first}, {last}):
    form = {{"item": "Box of tea", "quantity": 1}}
    if number % 100 == 4:
        form["payment_fails"] = "on"
    answer = client.post("/", form)
    assert answer.status_code == 302, answer.content
"""


@dataclass
class ThreeServices:
    """The running services, and the ids of the messages with a planted fault."""

    urls: dict[str, str]
    met: dict[str, set[str]] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    @property
    def sources(self) -> list[SourceSpec]:
        return [SourceSpec(name, self.urls[name]) for name in STAGES]

    def manage(self, service: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, str(PROJECT / "manage.py"), *words],
            env=environment(
                DJANGO_SETTINGS_MODULE="tests.spark.one_service",
                PYTHONPATH=str(ROOT),
                SERVICE=service,
                DEBUG="False",
                DATABASE_URL=self.urls[service],
                BROKER_DATABASE_URL=self.urls["broker"],
            ),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def ask(self, service: str, sql: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.urls[service], autocommit=True) as connection:
            done = connection.execute(sql, values)
            return done.fetchall() if done.description else []

    def place(self, first: int, last: int) -> None:
        self.manage("shop", "shell", "-c", PLACE.format(first=first, last=last))

    def relay(self, service: str) -> None:
        self.manage(service, "relay", "--once")

    def consume(self, service: str) -> None:
        self.manage(service, "consume", "--once", STAGES[service])

    def run(self, count: int) -> None:
        """Process orders, and plant faults in their messages."""
        self.place(0, count)
        charges = self.ask(
            "shop",
            "SELECT message_id::text, convert_from(body, 'UTF8')::json->>'order'"
            " FROM django_txmsg_outboxmessage ORDER BY id",
        )
        assert len(charges) == count
        for number, (message, order) in enumerate(charges):
            fate = FATES.get(number % 100, "")
            self.met.setdefault(fate, set()).add(message)
            self.orders.setdefault(fate, []).append(order)
        self.ask(
            "shop",
            "UPDATE django_txmsg_outboxmessage SET created_at = created_at -"
            " interval '3 hours', due_at = due_at - interval '3 hours'"
            " WHERE message_id::text = ANY(%s)",
            list(self.met["late"]),
        )
        closed = ", ".join(f"'{order}'" for order in self.orders["bank closed"])
        self.ask(
            "payments",
            "ALTER TABLE payments_payment ADD CONSTRAINT bank_is_closed"
            f' CHECK ("order" NOT IN ({closed}))',
        )
        self.relay("shop")
        self._lose("lost")
        chosen = f"FROM {_QUEUE} WHERE headers->>'txmsg-id' = ANY(%s)"
        fields = "queue, headers, body, 0"
        self.ask("broker", f"{_COPY} SELECT {fields} {chosen}", self._ids("doubled"))
        self._let_strangers_in()
        self.kept = self.ask(
            "broker",
            f"SELECT queue, headers::text, body {chosen}",
            self._ids("again after the archive"),
        )
        self.consume("payments")
        second = self.ask(
            "payments",
            "SELECT message_id::text FROM django_txmsg_outboxmessage"
            " WHERE convert_from(body, 'UTF8')::json->>'order' = ANY(%s)",
            self.orders["lost on the second hop"],
        )
        self.met["lost on the second hop"] = {row[0] for row in second}
        self.relay("payments")
        self._lose("lost on the second hop")
        self.consume("shipping")
        self.relay("shipping")
        self.consume("shop")

    def come_again(self) -> None:
        """Deliver copies of messages whose inbox rows are already in the lake."""
        for queue, headers, body in self.kept:
            self.ask("broker", f"{_COPY} VALUES (%s, %s, %s, 0)", queue, headers, body)
        self.consume("payments")

    def open_the_bank(self) -> None:
        self.ask(
            "payments", "ALTER TABLE payments_payment DROP CONSTRAINT bank_is_closed"
        )

    def finish(self) -> None:
        """Relay and consume all stored messages."""
        self.relay("shop")
        self.relay("payments")
        for service in ("payments", "shipping"):
            self.consume(service)
            self.relay(service)
        self.consume("shop")

    def _ids(self, fate: str) -> list[str]:
        return sorted(self.met[fate])

    def _lose(self, fate: str) -> None:
        lost = self.ask(
            "broker",
            f"DELETE FROM {_QUEUE} WHERE headers->>'txmsg-id' = ANY(%s) RETURNING id",
            self._ids(fate),
        )
        assert len(lost) == len(self.met[fate])

    def _let_strangers_in(self) -> None:
        """Copy some messages in the broker. Each copy has a new id, which no service
        has sent, and its body names an order that does not exist."""
        strangers = self.ask(
            "broker",
            f"{_COPY} SELECT queue, jsonb_set(headers, '{{txmsg-id}}',"
            " to_jsonb(gen_random_uuid()::text)), convert_to(replace(convert_from("
            "body, 'UTF8'), headers->>'correlation-id', 'stranger'), 'UTF8'), 0"
            f" FROM {_QUEUE} WHERE headers->>'txmsg-id' = ANY(%s)"
            " RETURNING headers->>'txmsg-id'",
            self._ids("stranger"),
        )
        self.met["unknown"] = {row[0] for row in strangers}


def start(postgres: PostgreSQL) -> ThreeServices:
    """Create the services' databases. One is migrated, and the others are copies of
    it."""
    name = f"shop_{os.urandom(4).hex()}"
    urls = {"template": postgres.create_database(f"{name}_template")}
    services = ThreeServices(
        urls | {"shop": urls["template"], "broker": urls["template"]}
    )
    services.manage("shop", "migrate", "--verbosity", "0")
    server = SourceSpec("", postgres.url("postgres"))
    with psycopg.connect(server.url, autocommit=True) as connection:
        for service in (*STAGES, "broker"):
            connection.execute(
                f'CREATE DATABASE "{name}_{service}" TEMPLATE "{name}_template"'
            )
            services.urls[service] = postgres.url(f"{name}_{service}")
    return services


def drop(postgres: PostgreSQL, services: ThreeServices) -> None:
    for url in services.urls.values():
        postgres.drop_database(Path(url).name)
