"""A database role with the privileges that the manual names runs the pipeline."""

from __future__ import annotations

import pytest

from django_txmsg.spark.connection import connect_plain
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.privileges import acting
from tests.spark.log import Log
from tests.spark.running import outcome


@pytest.mark.parametrize("may_see", [True, False])
def test_archive_knows_how_old_a_transaction_of_another_role_is(
    pg_log: Log, lake: LakeSpec, may_see: bool
) -> None:
    """To a role without `pg_read_all_stats`, the transaction counts as open for too
    long. To other roles it is young."""
    spec = JobSpec((pg_log.spec,), lake)
    owner, other = connect_plain(pg_log.spec), connect_plain(pg_log.spec)
    name = owner.value("SELECT current_database()")
    try:
        with acting(owner.execute, name) as role:
            if may_see:
                owner.execute(f"GRANT pg_read_all_stats TO {role}")
            with other.transaction():
                other.value("SELECT pg_current_xact_id()")
                pg_log.send_many(3)
                held = outcome(
                    spec, "archive", "--engine", "local", "--older-than", "1d"
                )
            after = outcome(spec, "archive", "--engine", "local", "--older-than", "1d")
        assert (held.exit_code, after.exit_code) == (0 if may_see else 1, 0)
        assert pg_log.count() == 0
    finally:
        owner.close()
        other.close()
