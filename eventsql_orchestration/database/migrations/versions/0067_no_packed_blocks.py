"""All staged blocks are arrays: versions before revision 0026 packed them, and this package no longer unpacks them."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0067"
down_revision = "0066"

# Events that are published stay, and only a version that unpacks them can transfer them.
_REFUSE = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM event_buffer WHERE eql_partition = -2) OR EXISTS (
        SELECT FROM spark_part part JOIN spark_staged_event block ON block.eql_attempt = ANY (part.eql_attempts)
        WHERE part.eql_published_at IS NULL AND block.eql_values IS NULL
    ) THEN
        RAISE EXCEPTION 'events that Spark published by a version before revision 0026 are not in their logs yet: '
            'transfer them by that version, and migrate again';
    END IF;
END
$$;
"""

# The rest belongs to writes that were not published. A write that still runs finds its events missing, and is repeated.
_DELETE = """
DELETE FROM spark_staged_event WHERE eql_values IS NULL;
ALTER TABLE spark_staged_event ALTER COLUMN eql_values SET NOT NULL;
"""


def upgrade() -> None:
    run(_REFUSE)
    run(_DELETE)
