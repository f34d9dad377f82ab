"""Receiving from a queue goes on where the last receive found messages, past the rows of those that are gone."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0036"
down_revision = "0035"

# Of revision 0020. While an old snapshot is open, no vacuum removes the rows of acknowledged messages, and each receive
# would read all of them again. So a receive tells at which time it found its first message visible (`onwards`), and the
# next one may begin there (`since`). That time is 0.1 s ago or more, because senders commit after their messages become
# visible. A receiver leaves `since` out from time to time, and so finds every message. `since` is of priority 0 alone.
# The rows that are found are locked, so their places (ctid) stay until they are updated.
_TAKE = """
SELECT set_config('eventsql.rights', coalesce(p.proacl::text, ''), true)
FROM pg_proc p WHERE p.oid = '{schema}.take_messages(integer, integer, double precision)'::regprocedure;
DROP FUNCTION {schema}.take_messages(integer, integer, double precision);
CREATE FUNCTION {schema}.take_messages(
    of_queue integer, most integer, seconds double precision, since timestamptz DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata text, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb, onwards bytea
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
ROWS 100 AS $$
DECLARE
    allowed integer;
    dead integer;
    ready tid[];
    spent bigint[];
    earliest timestamptz := coalesce(since, '-infinity');
    first timestamptz;
    until timestamptz;
    taken integer := 0;
BEGIN
    SELECT q.eql_max_receives, q.eql_dead_letters INTO allowed, dead FROM {schema}.queue q WHERE q.eql_id = of_queue;
    LOOP
        SELECT array_agg(found.place) FILTER (WHERE (found.eql_receives >= allowed) IS NOT TRUE),
               array_agg(found.eql_id) FILTER (WHERE found.eql_receives >= allowed),
               min(found.eql_visible_at) FILTER (WHERE found.level = 0)
        INTO ready, spent, first
        FROM (
            SELECT visible.place, visible.eql_id, visible.eql_receives, visible.eql_visible_at, level
            FROM generate_series(9, 0, -1) AS level
            CROSS JOIN LATERAL (
                SELECT m.ctid AS place, m.eql_id, m.eql_receives - m.eql_unhandled AS eql_receives, m.eql_visible_at
                FROM {schema}.queue_message m
                WHERE m.eql_queue = of_queue AND m.eql_priority = level
                  AND m.eql_visible_at >= CASE WHEN level = 0 THEN earliest ELSE '-infinity' END
                  AND m.eql_visible_at <= now()
                ORDER BY m.eql_visible_at, m.eql_id LIMIT most - taken
                FOR UPDATE SKIP LOCKED
            ) visible
            LIMIT most - taken
        ) found;
        IF spent IS NOT NULL THEN
            PERFORM {schema}.bury_messages(of_queue, dead, spent);
        END IF;
        IF ready IS NOT NULL THEN
            taken := taken + cardinality(ready);
            until := clock_timestamp() + make_interval(secs => seconds);
            RETURN QUERY WITH given AS (
                UPDATE {schema}.queue_message m
                SET eql_visible_at = until,
                    eql_receives = m.eql_receives + 1,
                    eql_receipt = m.eql_receives + 1,
                    eql_history = CASE WHEN m.eql_receipt IS NULL THEN m.eql_history ELSE {schema}.note_of_message(
                        m.eql_history, m.eql_receives, m.eql_visible_at, 'the visibility timeout ended') END
                WHERE m.ctid = ANY (ready)
                RETURNING m.eql_id, m.eql_body, m.eql_key, m.eql_metadata, m.eql_receives, m.eql_receipt,
                          m.eql_priority, m.eql_created_at, m.eql_history
            )
            SELECT g.eql_id, g.eql_body, g.eql_key, g.eql_metadata::text, g.eql_receives, g.eql_receipt, g.eql_priority,
                   g.eql_created_at, g.eql_history,
                   CASE WHEN first IS NOT NULL THEN timestamptz_send(least(first, now() - interval '0.1 seconds')) END
            FROM given g ORDER BY g.eql_priority DESC, g.eql_id;
        END IF;
        IF ready IS NULL AND spent IS NULL AND earliest > '-infinity' THEN
            earliest := '-infinity';
        ELSE
            EXIT WHEN spent IS NULL OR taken >= most;
        END IF;
    END LOOP;
END
$$;
"""

# A function without rights of its own is everybody's.
_KEEP_RIGHTS = """
DO $$
DECLARE
    grantee text;
BEGIN
    IF current_setting('eventsql.rights') = '' THEN
        RETURN;
    END IF;
    REVOKE EXECUTE ON FUNCTION {schema}.take_messages FROM PUBLIC;
    FOR grantee IN
        SELECT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM aclexplode(current_setting('eventsql.rights')::aclitem[]) acl WHERE acl.privilege_type = 'EXECUTE'
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.take_messages TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    schema = f'"{context.config.attributes["schema"]}"'
    for statements in (_TAKE, _KEEP_RIGHTS):
        run(statements.replace("{schema}", schema))
