"""Whether this code can continue the open runs of flows: `check --database ALIAS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.core.checks import CheckMessage, Error
from django.db import Error as AnyDatabaseError
from django.db import transaction
from django.db.models import Count

from .. import conf
from ..envelope.typed_body import TypeHeader
from ..flows.declaration import Declaration, Step, declarations
from ..models import Run
from ..models.run import WaitsFor
from ..monitoring import databases


def check(asked: Sequence[str]) -> Iterator[CheckMessage]:
    """Return the flows, steps and types that open runs wait for, and that this code
    does not have. Such a run is not lost: it waits for code that has them."""
    known = {one.name: one for one in declarations()}
    for using in databases.with_tables():
        if using not in asked:
            continue
        runs = Run.objects.using(using).filter(
            service=conf.get().SERVICE, ended_at=None
        )
        columns = ("flow", "step", "otherwise", "version", "waits_for", "reads")
        try:
            with transaction.atomic(using=using):
                found = runs.values_list(*columns).order_by(*columns)
                groups = list(found.annotate(Count("pk")))
        except AnyDatabaseError:
            continue  # not migrated yet
        for flow, step, otherwise, version, waits_for, reads, count in groups:
            missing = ["the flow itself"]
            if (declared := known.get(flow)) is not None:
                missing = [
                    *_missing(declared, step, otherwise, version, waits_for, reads)
                ]
            if missing:
                yield Error(
                    f"{count} open runs of flow {flow!r} in database {using!r} wait "
                    "for something that this code does not have: "
                    f"{', '.join(missing)}.",
                    hint="Keep it until these runs have ended. A step that has another "
                    "name now: @step(was=…). After a roll-back, the runs wait until "
                    "the newer code is back.",
                    id="txmsg.E064",
                )


def _missing(
    declared: Declaration,
    step: str,
    otherwise: str,
    version: int,
    waits_for: str,
    reads: str,
) -> Iterator[str]:
    if version > declared.version:
        yield f"version {version} of its state"
    if waits_for == WaitsFor.UNDO:
        return  # no step follows
    for name in filter(None, (step, otherwise)):
        if name not in declared.steps:
            yield f"the step {name!r}"
    if step in declared.steps:
        yield from _unread(declared.steps[step], reads)


def _unread(step: Step, reads: str) -> Iterator[str]:
    types = () if step.takes_nothing else step.reader.types
    known = {one.name: one.version for one in types}
    for one in map(TypeHeader.parse, reads.splitlines()):
        if not step.takes_nothing and known.get(one.name, 0) < one.oldest_reader:
            yield f"{one.name} version {one.version}, as step {step.name!r} took it"
