"""Selects dead letters by a filter. Pages and commands use the same filters.

A bulk operation stores its filter, and applies it again for every batch.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, Max, Min, Q, QuerySet, Sum, Value
from django.db.models.functions import Now
from django.db.models.lookups import Exact

from .. import conf, wire
from ..errors import TxmsgError
from ..models import DeadLetter, Run
from ..models.bulk_operation import BulkKind
from ..models.dead_letter import Resolution
from ..models.fields import Holds, MessageKey, OneOf, clock, local
from ..rules import dead_letters as rules
from ..sending.undoing import IN_DOUBT

#: The columns by which a filter selects. The empty stage means the relay.
COLUMNS = ("stage", "destination", "fingerprint", "reason", "resolution")

#: The keys of a filter. All given conditions must hold. "since" and "before" are the
#: bounds of the time of burial (RFC 3339), the first of them included. "older" selects
#: lower ids. "again" is true for those that died again after a redelivery. "operation"
#: is the last bulk operation that redelivered, discarded or restored them. "search"
#: finds a message id, a correlation id, a key or a fingerprint.
FILTERS = (
    "ids", *COLUMNS, "since", "before", "older", "again", "operation", "search",
)  # fmt: skip


#: Most dead letters that an operator can select by their ids. The pipeline's replay
#: selects more.
MOST_IDS = 5_000


def matching(
    kind: BulkKind | str, filters: Mapping[str, Any], *, using: str
) -> QuerySet[DeadLetter]:
    """Return the dead letters that match `filters` and to which the operation `kind`
    applies.

    Raises TxmsgError if a filter is unknown: ignoring the filter would select too many
    dead letters.
    """
    if kind == BulkKind.RESTORE:
        state = Q(resolution=Resolution.DISCARDED)
    else:
        state = Q(Holds(rules.OPEN))
    return filtered(filters, using=using).filter(state)


def filtered(filters: Mapping[str, Any], *, using: str) -> QuerySet[DeadLetter]:
    """Return the dead letters, in any state, that match `filters`. Raises TxmsgError if
    a filter is unknown or blank."""
    unknown = filters.keys() - {*FILTERS}
    if unknown:
        raise TxmsgError(
            f"Dead letters cannot be filtered by {', '.join(sorted(unknown))}; "
            f"known: {', '.join(FILTERS)}."
        )
    letters = DeadLetter.objects.using(using)
    if "ids" in filters:
        # Ids that a row can have.
        ids = [one for one in filters["ids"] if 0 < one < 2**63]
        letters = letters.filter(OneOf("pk", ids))
    for name in COLUMNS:
        if name in filters:
            letters = letters.filter(**{name: filters[name]})
    if "since" in filters:
        letters = letters.filter(created_at__gte=instant(filters["since"]))
    if "before" in filters:
        letters = letters.filter(created_at__lt=instant(filters["before"]))
    if "older" in filters:
        letters = letters.filter(pk__lt=min(int(filters["older"]), 2**63 - 1))
    if "operation" in filters:
        letters = letters.filter(operation=min(int(filters["operation"]), 2**63 - 1))
    if filters.get("again"):
        letters = letters.filter(deaths__gt=1)
    if "search" in filters:
        if not filters["search"].strip():
            raise TxmsgError("A blank search would select unrelated dead letters.")
        letters = letters.filter(searched(filters["search"]))
    return letters


def insist_on_few_ids(filters: Mapping[str, Any]) -> None:
    """Raise TxmsgError if an operator has selected too many dead letters by id."""
    if (number := len(filters.get("ids", ()))) > MOST_IDS:
        raise TxmsgError(
            f"{number:,} dead letters are too many to select by id (at most "
            f"{MOST_IDS:,}): choose them by a filter."
        )


def left(
    action: str,
    letters: QuerySet[DeadLetter],
    filters: Mapping[str, Any],
    given: list[str],
) -> list[str]:
    """Return the chosen dead letters that the action leaves, with their states. Do not
    return others of a message, chosen by its id, of which one is changed."""
    if not given:
        return []
    messages = [one for one in given if not one.isdecimal()]
    rows = filtered({"ids": filters["ids"]}, using=letters.db)
    rows = rows.exclude(pk__in=letters.values("pk")).exclude(
        message_id__in=letters.filter(message_id__in=messages).values("message_id")
    )
    wanted = Resolution.DISCARDED if action == "restore" else Resolution.OPEN
    found = []
    states = rows.order_by("pk").values_list("pk", "resolution", "resolved_by")
    for pk, state, by in states:
        more = " (other options exclude it)" if state == wanted else ""
        if by == rules.GONE_ON:
            more = " (its flow has gone on)"
        found.append(f"{pk} is {state}{more}")
    return found


def filter_text(filters: Mapping[str, Any]) -> str:
    """Return a filter as text for people, without the service that is stored with
    it."""
    parts = []
    for name, value in filters.items():
        if name == "service":
            continue
        if name == "ids":
            parts.append(f"{len(value)} selected")
        elif name == "again":
            parts.append("failed again")
        elif name in ("since", "before"):
            parts.append(f"{name} {local(instant(value))}")
        else:
            parts.append(f"{name} {value or '(relay)'}")
    return ", ".join(parts) or "all"


def searched(text: str) -> Q:
    """Return the condition for dead letters with this id: a message id, a correlation
    id, a key or a fingerprint. The text must be the complete id, because the query uses
    an index."""
    text = text.strip()
    same_flow = Q(correlation_id=text)
    try:
        return same_flow | Q(message_id=uuid.UUID(text))
    except ValueError:
        by_key = Q(Exact(MessageKey("headers"), Value(text)))
        return same_flow | Q(fingerprint=text) | by_key


@dataclass
class Summary:
    """How many dead letters an action would affect, how old they are, and where they
    died.

    `forgotten` counts dead letters that are older than the inbox's retention. A stage
    may have processed such a message in the meantime, and the inbox may have deleted
    its record of the message. Then a redelivery would process the message again.
    `in_doubt` counts dead undos of flows. For each of these undos, it is unknown
    whether the request to undo was processed. If an operator discards such an undo, the
    undo counts as done.
    """

    count: int = 0
    oldest: dt.datetime | None = None
    newest: dt.datetime | None = None
    again: int = 0
    forgotten: int = 0
    in_doubt: int = 0
    places: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Shown:
    """What a confirmation page showed to an operator: how many dead letters or runs
    there were, when, the id of the newest, and the sum of the ids."""

    count: int
    up_to: int
    ids: int
    #: The instant, by the database's clock (RFC 3339).
    as_of: str

    @classmethod
    def of(cls, rows: QuerySet[Any]) -> Shown:
        """Return what a page shows now for these rows."""
        now = clock(rows.db)
        shown = rows.filter(**{f"{since(rows)}__lt": now})
        found = shown.aggregate(n=Count("pk"), last=Max("pk"), ids=Sum("pk"))
        last, ids = found["last"] or 0, int(found["ids"] or 0)
        return cls(found["n"], last, ids, now.isoformat())

    @classmethod
    def parse(cls, token: str) -> Shown:
        """Return the object for a token from `--dry-run`. Raises TxmsgError if the
        token is malformed."""
        *numbers, as_of = token.split(".", 3)
        try:
            count, up_to, ids = map(int, numbers)
            shown = cls(count, up_to, ids, as_of)
            instant(as_of)
        except ValueError:
            raise TxmsgError(f"Not a token of --dry-run: {token!r}.") from None
        return shown

    def __str__(self) -> str:
        return f"{self.count}.{self.up_to}.{self.ids}.{self.as_of}"

    def before(self, filters: Mapping[str, Any]) -> str:
        """Return a value for the filter `before`, so that the filter selects no row
        that began to match after the page. The value is the earlier of two times: the
        time of the page, and the value of `before` in `filters`, if any."""
        given = filters.get("before", self.as_of)
        return min((self.as_of, str(given)), key=instant)

    def bound(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return those of `rows` that the page showed to the operator."""
        before = {f"{since(rows)}__lt": instant(self.as_of)}
        return rows.filter(pk__lte=self.up_to, **before)

    def insist(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the shown rows. Raises Changed unless all of them still match, and no
        other rows."""
        found = self.bound(rows)
        now = found.aggregate(n=Count("pk"), ids=Sum("pk"))
        if (now["n"], now["ids"] or 0) == (self.count, self.ids):
            return found
        if now["n"] < self.count:
            raise Changed(
                f"Nothing is done yet: {self.count - now['n']:,} of the "
                f"{self.count:,} that you were shown have changed since."
            )
        raise Changed(
            f"Nothing is done yet: others match now than the {self.count:,} that you "
            "were shown."
        )


class Changed(TxmsgError):
    """Some of the rows on the operator's confirmation page no longer match the
    filter."""


def summary(letters: QuerySet[DeadLetter]) -> Summary:
    """Return the summary of these dead letters for the confirmation page, in one
    query."""
    days = conf.get().RETENTION.INBOX
    bound = Now() - dt.timedelta(days=36_500 if days is None else days)
    found = Summary()
    rows: Any = letters.values("stage", "destination").annotate(
        count=Count("pk"),
        oldest=Min("created_at"),
        newest=Max("created_at"),
        again=Count("pk", filter=Q(deaths__gt=1)),
        forgotten=Count("pk", filter=Q(created_at__lt=bound) & ~Q(stage="")),
        in_doubt=Count("pk", filter=Q(reason=IN_DOUBT)),
    )
    for row in rows.order_by("-count"):
        found.count += row["count"]
        found.again += row["again"]
        found.forgotten += row["forgotten"]
        found.in_doubt += row["in_doubt"]
        found.oldest = min(filter(None, (found.oldest, row["oldest"])))
        found.newest = max(filter(None, (found.newest, row["newest"])))
        found.places.append((row["stage"], row["destination"], row["count"]))
    return found


def since(rows: QuerySet[Any]) -> str:
    """Return the column with the time since which a row may match: since when a run has
    waited at its step, or when a dead letter was buried."""
    return "since" if rows.model is Run else "created_at"


def instant(value: Any) -> dt.datetime:
    """Return the time in a filter. Raises TxmsgError if it is not a time."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = wire.parse_instant(value)
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise TxmsgError(f"Not an instant with a time zone: {value!r}.")
    return value
