"""Which streaming query published a writer's batch, and a checksum of its rows: another query's batch may be another
one.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0014"
down_revision = "0013"

# NULL in the rows of older versions of this package, and for batches without a streaming query.
_ADDED = "ALTER TABLE spark_publication ADD COLUMN eql_query text, ADD COLUMN eql_checksum bigint;"


def upgrade() -> None:
    run(_ADDED)
