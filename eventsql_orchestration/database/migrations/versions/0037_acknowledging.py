"""Acknowledging finds each message by its id, whatever the statistics of the table say."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0037"
down_revision = "0036"

# Of revision 0020. An ANALYZE of a table with dead rows alone says that it is empty. A plan that was made then joined
# the messages by their queue's index, and read the whole queue for each message. Without a join and without the queue's
# index (+ 0), the primary key is left. `width_bucket` finds the place of an id among the sorted ones.
_SETTINGS = """LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

_ACKNOWLEDGE = """
CREATE OR REPLACE FUNCTION {schema}.acknowledge_messages(
    of_queue integer, ids bigint[], receipts integer[]
) RETURNS bigint[]
{settings} AS $$
DECLARE
    ordered boolean;
    retention double precision;
    given bigint[];
    held integer[];
    done bigint[];
    keys text[];
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

    SELECT array_agg(each.id ORDER BY each.id), array_agg(each.receipt ORDER BY each.id) INTO given, held
    FROM unnest(ids, receipts) AS each (id, receipt);

    BEGIN
        IF retention IS NULL THEN
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (given) AND m.eql_receipt = held[width_bucket(m.eql_id, given)]
                  AND m.eql_queue + 0 = of_queue
                RETURNING m.eql_id, m.eql_key, m.eql_in_order
            )
            SELECT array_agg(eql_id), array_agg(DISTINCT eql_key) FILTER (WHERE eql_in_order) INTO done, keys
            FROM deleted;
        ELSE
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (given) AND m.eql_receipt = held[width_bucket(m.eql_id, given)]
                  AND m.eql_queue + 0 = of_queue
                RETURNING m.*
            ), kept AS (
                INSERT INTO {schema}.queue_archive
                SELECT d.eql_queue, d.eql_id, d.eql_priority, d.eql_key, d.eql_body, d.eql_metadata, d.eql_created_at,
                       d.eql_receives, d.eql_history, clock_timestamp(),
                       clock_timestamp() + make_interval(secs => retention)
                FROM deleted d
            )
            SELECT array_agg(eql_id), array_agg(DISTINCT eql_key) FILTER (WHERE eql_in_order) INTO done, keys
            FROM deleted;
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
    IF ordered AND keys IS NOT NULL THEN
        -- In a new snapshot: it sees what receivers have parked behind these messages.
        PERFORM {schema}.promote_keys(of_queue, keys);
    END IF;
    RETURN '{}';
END
$$;
"""


def upgrade() -> None:
    schema = f'"{context.config.attributes["schema"]}"'
    run(_ACKNOWLEDGE.replace("{settings}", _SETTINGS).replace("{schema}", schema))
