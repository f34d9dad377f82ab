"""An acknowledgement takes less of the server's time: it sorts few ids, and plans two statements less."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0045"
down_revision = "0044"

_SETTINGS = """LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

# Of revision 0037. Mostly all messages have the same receipt, the first: then the ids need no order. It looks for the
# messages that wait behind these by itself. The server would plan a function for that with its update, which few
# acknowledgements need.
_ACKNOWLEDGE = """CREATE OR REPLACE FUNCTION {schema}.acknowledge_messages(
    of_queue integer, ids bigint[], receipts integer[]
) RETURNS bigint[]
{settings} AS $$
DECLARE
    ordered boolean;
    retention double precision;
    alike boolean := receipts = array_fill(receipts[1], ARRAY[cardinality(receipts)]);
    given bigint[] := ids;
    held integer[] := receipts;
    done bigint[];
    keys text[];
    next bigint[];
BEGIN
    SELECT q.eql_ordered, q.eql_retention_seconds INTO ordered, retention
    FROM {schema}.queue q WHERE q.eql_id = of_queue;
    IF ordered AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- Its snapshot would miss the messages that wait behind these.
        RETURN NULL;
    END IF;
    IF retention IS NOT NULL THEN
        PERFORM {schema}.make_queue_archive(clock_timestamp() + make_interval(secs => retention));
    END IF;

    IF alike IS NOT TRUE THEN
        SELECT array_agg(each.id ORDER BY each.id), array_agg(each.receipt ORDER BY each.id) INTO given, held
        FROM unnest(ids, receipts) AS each (id, receipt);
    END IF;

    BEGIN
        IF retention IS NULL THEN
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (given) AND m.eql_queue + 0 = of_queue
                  AND m.eql_receipt = held[CASE WHEN alike THEN 1 ELSE width_bucket(m.eql_id, given) END]
                RETURNING m.eql_id, CASE WHEN m.eql_in_order THEN m.eql_key END AS key
            )
            SELECT array_agg(eql_id), array_agg(key) INTO done, keys FROM deleted;
        ELSE
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (given) AND m.eql_queue + 0 = of_queue
                  AND m.eql_receipt = held[CASE WHEN alike THEN 1 ELSE width_bucket(m.eql_id, given) END]
                RETURNING m.*
            ), kept AS (
                INSERT INTO {schema}.queue_archive
                SELECT d.eql_queue, d.eql_id, d.eql_priority, d.eql_key, d.eql_body, d.eql_metadata, d.eql_created_at,
                       d.eql_receives, d.eql_history, clock_timestamp(),
                       clock_timestamp() + make_interval(secs => retention)
                FROM deleted d
            )
            SELECT array_agg(eql_id), array_agg(eql_key) FILTER (WHERE eql_in_order) INTO done, keys FROM deleted;
        END IF;
        IF cardinality(done) IS DISTINCT FROM cardinality(ids) AND done IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'EQ001';
        END IF;
    EXCEPTION WHEN SQLSTATE 'EQ001' THEN
        RETURN ARRAY(SELECT each FROM unnest(ids) AS each WHERE each <> ALL (done));
    END;
    IF done IS NULL THEN
        RETURN ids;
    END IF;
    IF ordered THEN
        -- In a new snapshot: it sees what receivers have parked behind these messages.
        SELECT array_agg(first.eql_id) INTO next
        FROM unnest(keys) AS of_key
        CROSS JOIN LATERAL (
            SELECT n.eql_id FROM {schema}.queue_message n
            WHERE n.eql_queue = of_queue AND n.eql_key >= of_key AND n.eql_key <= of_key
              AND n.eql_in_order AND n.eql_visible_at = 'infinity'
            ORDER BY n.eql_key, n.eql_id LIMIT 1
        ) first;
        IF next IS NOT NULL THEN
            UPDATE {schema}.queue_message m
            SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
            WHERE m.eql_id = ANY (next) AND m.eql_visible_at = 'infinity';
        END IF;
    END IF;
    RETURN '{}';
END
$$;
"""


def upgrade() -> None:
    schema = f'"{context.config.attributes["schema"]}"'
    run(_ACKNOWLEDGE.replace("{settings}", _SETTINGS).replace("{schema}", schema))
