"""Changes of closed aggregates can be archived: moved into a table that everything reads as a part of the store."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0039"
down_revision = "0038"

# Inheritance rewrites no table. Each statement that reads changes, also of older versions of this package, reads the
# archived ones too. The strongest lock comes first. The index of ids is not unique: a transaction whose snapshot is
# older than an archived change can use the id of that again, and archiving must not fail for it.
_ARCHIVE = """
ALTER TABLE aggregate ADD COLUMN eql_archived_at timestamptz;
CREATE INDEX aggregate_closed ON aggregate (eql_type, eql_closed_at)
    WHERE eql_closed_at IS NOT NULL AND eql_archived_at IS NULL;
CREATE TABLE archived_change (
    PRIMARY KEY (eql_type, eql_aggregate_id, eql_version)
) INHERITS (aggregate_change);
CREATE UNIQUE INDEX archived_change_place ON archived_change (eql_transaction, eql_position);
CREATE INDEX archived_change_id ON archived_change (eql_change_id) WHERE eql_change_id IS NOT NULL;
"""


def upgrade() -> None:
    run(_ARCHIVE)
