"""Which backfills are done: their windows are deleted then, as the windows of a backfill that was given up."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0015"
down_revision = "0014"

# Older versions of this package end a backfill without a row here.
_ADDED = """
CREATE TABLE finished_backfill (
    eql_topic text NOT NULL,
    eql_consumer text NOT NULL,
    eql_id text NOT NULL,
    eql_finished_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_topic, eql_consumer, eql_id)
);
"""

# The triggers of revision 0009, with the new table.
_FORGET_TOPIC = """
CREATE OR REPLACE FUNCTION forget_topic() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept_by text;
BEGIN
    FOREACH kept_by IN ARRAY ARRAY[
        'consumer', 'consumer_claim', 'topic_layout', 'shard_fence', 'redriven_dead_letter', 'event_buffer_lock',
        'finished_backfill'
    ] LOOP
        EXECUTE format('DELETE FROM %I.%I WHERE eql_topic = $1', TG_TABLE_SCHEMA, kept_by) USING OLD.eql_name;
    END LOOP;
    EXECUTE format(
        'DELETE FROM %1$I.spark_staged_event block WHERE eql_topic = $1 AND ('
        'eql_buffer_id IS NOT NULL OR EXISTS ('
        'SELECT FROM %1$I.spark_part part WHERE eql_published_at IS NULL AND block.eql_attempt = ANY (eql_attempts)))',
        TG_TABLE_SCHEMA
    ) USING OLD.eql_name;
    RETURN NULL;
END
$$;
"""

_FORGET_CONSUMER = """
CREATE OR REPLACE FUNCTION forget_consumer() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept_by text;
BEGIN
    FOREACH kept_by IN ARRAY ARRAY['consumer_claim', 'finished_backfill'] LOOP
        EXECUTE format(
            'DELETE FROM %1$I.%2$I WHERE (eql_topic, eql_consumer) IN ('
            'SELECT eql_topic, eql_name FROM gone WHERE NOT EXISTS ('
            'SELECT FROM %1$I.consumer c WHERE c.eql_topic = gone.eql_topic AND c.eql_name = gone.eql_name))',
            TG_TABLE_SCHEMA, kept_by
        );
    END LOOP;
    RETURN NULL;
END
$$;
"""


def upgrade() -> None:
    for statements in (_ADDED, _FORGET_TOPIC, _FORGET_CONSUMER):
        run(statements)
