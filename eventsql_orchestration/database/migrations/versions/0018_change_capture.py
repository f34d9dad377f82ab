"""Change capture: the changes of a table as events of a topic, written by the transaction that makes them."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0018"
down_revision = "0017"

# Columns are known by their numbers, which a change of a name leaves alone. After a dump and a restore the table has
# another oid, and its columns may have other numbers: then the names count, and the old oid may be another table's.
_CAPTURE = """
CREATE TABLE capture (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_topic text NOT NULL,
    eql_relation oid NOT NULL,
    eql_table text NOT NULL,
    eql_key_names text[] NOT NULL,
    eql_key_numbers smallint[] NOT NULL,
    eql_column_names text[],
    eql_column_numbers smallint[],
    eql_snapshot text NOT NULL
        CONSTRAINT capture_snapshot CHECK (eql_snapshot IN ('none', 'running', 'done')),
    eql_snapshot_after text[],
    eql_snapshot_rows bigint NOT NULL DEFAULT 0,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX capture_topic ON capture (eql_topic);
"""

_FORGET_CAPTURES = """
CREATE TRIGGER topic_captures_forgotten AFTER DELETE ON {schema}.topic
    FOR EACH ROW EXECUTE FUNCTION {schema}.forget_captures();
"""


def upgrade() -> None:
    run(_CAPTURE)
    install("layouts", "capture", "capture_changes")
    run(_FORGET_CAPTURES)
