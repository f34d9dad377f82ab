"""Topics that are consumed as queues: a row for each event that was handed out and is not acknowledged."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0025"
down_revision = "0024"

_TABLES = """
CREATE TABLE consumer_cursor (
    eql_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_topic text NOT NULL,
    eql_consumer text NOT NULL,
    eql_partition smallint NOT NULL,
    eql_offset bigint NOT NULL,
    eql_claimed_upto bigint NOT NULL,
    eql_unacknowledged integer NOT NULL DEFAULT 0,
    eql_by_key boolean NOT NULL,
    UNIQUE (eql_topic, eql_consumer, eql_partition),
    UNIQUE (eql_id, eql_topic)
);
CREATE TABLE consumer_worker (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_topic text NOT NULL,
    eql_consumer text NOT NULL,
    eql_name text NOT NULL,
    eql_expires_at timestamptz NOT NULL
);
CREATE INDEX consumer_worker_expires ON consumer_worker (eql_topic, eql_consumer, eql_expires_at);
CREATE TABLE consumer_delivery (
    eql_cursor integer NOT NULL,
    eql_id bigint NOT NULL,
    eql_topic text NOT NULL,
    eql_key bigint,
    eql_worker bigint,
    eql_attempts integer NOT NULL DEFAULT 0,
    eql_failure text,
    eql_due_at timestamptz,
    PRIMARY KEY (eql_cursor, eql_id),
    FOREIGN KEY (eql_cursor, eql_topic) REFERENCES consumer_cursor (eql_id, eql_topic)
);
"""

# The trigger of revision 0015, with the new tables. These go with their partition of a consumer.
_FORGET_CONSUMER = """
CREATE OR REPLACE FUNCTION forget_consumer() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept_by text;
BEGIN
    FOREACH kept_by IN ARRAY ARRAY['consumer_claim', 'finished_backfill', 'consumer_worker'] LOOP
        EXECUTE format(
            'DELETE FROM %1$I.%2$I WHERE (eql_topic, eql_consumer) IN ('
            'SELECT eql_topic, eql_name FROM gone WHERE NOT EXISTS ('
            'SELECT FROM %1$I.consumer c WHERE c.eql_topic = gone.eql_topic AND c.eql_name = gone.eql_name))',
            TG_TABLE_SCHEMA, kept_by
        );
    END LOOP;
    EXECUTE format(
        'WITH cursors AS ('
        'DELETE FROM %1$I.consumer_cursor k USING gone WHERE k.eql_topic = gone.eql_topic '
        'AND k.eql_consumer = gone.eql_name AND k.eql_partition = gone.eql_partition RETURNING k.eql_id) '
        'DELETE FROM %1$I.consumer_delivery d USING cursors WHERE d.eql_cursor = cursors.eql_id',
        TG_TABLE_SCHEMA
    );
    RETURN NULL;
END
$$;
"""


def upgrade() -> None:
    for statements in (_TABLES, _FORGET_CONSUMER):
        run(statements)
