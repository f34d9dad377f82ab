"""Retention per topic, filters per consumer, and which dead letters were redriven."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run
from eventsql_orchestration.qualification import qualified

revision = "0002"
down_revision = "0001"

_ADDED = """
ALTER TABLE topic
    ADD COLUMN eql_retention_seconds double precision,
    ADD COLUMN eql_retention_bytes bigint,
    ADD COLUMN eql_retention_events bigint;
ALTER TABLE consumer ADD COLUMN eql_filter json;
CREATE TABLE redriven_dead_letter (
    eql_topic text NOT NULL,
    eql_letter_id bigint NOT NULL,
    eql_redriven_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_topic, eql_letter_id)
);
"""

_MARK = qualified(
    "'INSERT INTO redriven_dead_letter (eql_topic, eql_letter_id) SELECT ' || quote_literal(redrive.eql_topic) || "
    "', eql_id FROM ' || quote_ident(redrive.eql_topic || '_event') || ' WHERE eql_id <= ' || redrive.eql_last_event_id"
)
# Until now, a consumer of the dead letter topic said by its offset what was redriven.
_REDRIVEN = f"""
DO $$
DECLARE
    redrive record;
BEGIN
    FOR redrive IN
        SELECT eql_topic, eql_last_event_id FROM consumer
        WHERE eql_name = 'eventsql.redrive' AND eql_last_event_id IS NOT NULL
    LOOP
        EXECUTE {_MARK};
    END LOOP;
    DELETE FROM consumer WHERE eql_name = 'eventsql.redrive';
END
$$;
"""  # noqa: S608 - the text stands above


def upgrade() -> None:
    for statements in (_ADDED, _REDRIVEN):
        run(statements)
