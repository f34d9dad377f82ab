"""Which publication of a writer's batch took place, and who is at one that is announced."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0007"
down_revision = "0006"

# NULL where an older version of this package wrote the row: no table is rewritten.
_ADDED = """
ALTER TABLE spark_publication ADD COLUMN eql_id uuid;
ALTER TABLE spark_decision ADD COLUMN eql_owner text;
"""


def upgrade() -> None:
    run(_ADDED)
