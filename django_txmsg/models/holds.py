"""Rules in querysets: `filter(Holds(outbox.DUE, now=Now()))`."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F

from ..rules.rule import Rule


class Holds(models.Func):
    """Whether a rule is true for a row. `values` are expressions."""

    output_field = models.BooleanField()

    def __init__(self, rule: Rule, **values: Any) -> None:
        names = [name for _, name in rule.parts() if name]
        super().__init__(*(values.get(name, F(name)) for name in names))
        self.rule = rule

    def as_sql(  # type: ignore[override]  # it has no function and no template
        self, compiler: Any, connection: Any, *_: Any, **context: Any
    ) -> tuple[str, list[Any]]:
        parts, parameters = [], list[Any]()
        given = iter(self.get_source_expressions())
        for text, name in self.rule.parts():
            parts.append(text)
            if name:
                sql, values = compiler.compile(next(given))
                parts.append(sql)
                parameters += values
        return f"({''.join(parts)})", parameters
