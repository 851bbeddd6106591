"""The index that a stream of PostgreSQL's rows reads by, made beside their writers."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from . import _tables


def forwards(apps: Any, schema_editor: Any) -> None:
    _tables.index_marks(schema_editor)


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("txmsg_spark", "0001_initial")]
    # It goes with its column.
    operations = [migrations.RunPython(forwards, migrations.RunPython.noop)]
