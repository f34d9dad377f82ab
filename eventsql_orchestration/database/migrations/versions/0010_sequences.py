"""Sequences give ids out one by one and upwards; redrives are known by their letters' ids alone."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0010"
down_revision = "0009"

# Where a sequence is set so already, nothing waits for its users.
_SEQUENCES = """
DO $$
DECLARE
    sequence record;
BEGIN
    FOR sequence IN
        SELECT s.relnamespace::regnamespace AS namespace, s.relname AS name
        FROM pg_class owner
        JOIN pg_depend depend ON depend.refobjid = owner.oid AND depend.deptype IN ('a', 'i')
            AND depend.refclassid = 'pg_class'::regclass AND depend.classid = 'pg_class'::regclass
        JOIN pg_class s ON s.oid = depend.objid AND s.relkind = 'S'
        JOIN pg_sequence settings ON settings.seqrelid = s.oid
        WHERE owner.relnamespace = quote_ident(current_schema())::regnamespace
          AND (owner.relname IN ('event_buffer', 'consumer_claim', 'queue_message', 'timeline_entry', 'log_line')
               OR owner.relname IN (SELECT lower(eql_name COLLATE "C") || '_event' FROM topic))
          AND (settings.seqcache <> 1 OR settings.seqincrement < 1 OR settings.seqcycle)
    LOOP
        EXECUTE format('ALTER SEQUENCE %s.%I CACHE 1 INCREMENT BY 1 NO CYCLE', sequence.namespace, sequence.name);
    END LOOP;
END
$$;
"""

# Those of topics that were deleted. From now on a redrive goes with its topic's log.
_REDRIVES = """
DELETE FROM redriven_dead_letter r
WHERE NOT EXISTS (SELECT FROM topic t WHERE t.eql_name = r.eql_topic AND t.eql_created_at <= r.eql_redriven_at);
"""


def upgrade() -> None:
    for statements in (_SEQUENCES, _REDRIVES):
        run(statements)
