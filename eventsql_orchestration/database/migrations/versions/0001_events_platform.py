"""The tables of EventSQL 1.0.0, adopted where that library made them, and those of this package."""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import text

from eventsql_orchestration.database.migrations import run
from eventsql_orchestration.qualification import qualified

revision = "0001"
down_revision = None

# As EventSQL 1.0.0 makes them. It creates them itself where it came first, so nothing here may fail on what exists.
_EVENTSQL = """
CREATE TABLE IF NOT EXISTS topic (
    eql_name text PRIMARY KEY,
    eql_partitions smallint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS consumer (
    eql_topic text NOT NULL,
    eql_name text NOT NULL,
    eql_partition smallint NOT NULL,
    eql_first_event_id bigint,
    eql_last_event_id bigint,
    eql_last_consumption_at timestamptz,
    eql_consumed_events bigint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_topic, eql_name, eql_partition)
);
CREATE TABLE IF NOT EXISTS event_buffer (
    eql_id bigserial PRIMARY KEY,
    eql_topic text NOT NULL,
    eql_partition smallint NOT NULL,
    eql_key text,
    eql_value bytea NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    eql_metadata json NOT NULL
);
CREATE INDEX IF NOT EXISTS event_buffer_topic_id ON event_buffer (eql_topic, eql_id);
CREATE TABLE IF NOT EXISTS event_buffer_lock (
    eql_topic text PRIMARY KEY
);
"""

_ADDED_TO_EVENTSQL = """
ALTER TABLE consumer
    ADD COLUMN IF NOT EXISTS eql_paused boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS eql_max_attempts integer NOT NULL DEFAULT 5,
    ADD COLUMN IF NOT EXISTS eql_epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS eql_lease_owner text,
    ADD COLUMN IF NOT EXISTS eql_lease_expires_at timestamptz,
    ADD COLUMN IF NOT EXISTS eql_failed_event_id bigint,
    ADD COLUMN IF NOT EXISTS eql_attempts integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS eql_failure text,
    ADD COLUMN IF NOT EXISTS eql_retry_at timestamptz;
"""

# That library writes `timestamp`, by the clock of its sessions' time zone, its machine's.
# On PostgreSQL the change to `timestamptz` rewrites nothing while the session's time zone is UTC. Its event tables are
# found through its topics, all before the first is altered: no open query may read a table that is.
_TO_ADOPT = qualified("""
        SELECT 'ALTER TABLE ' || c.oid::regclass || ' '
            || string_agg('ALTER COLUMN ' || quote_ident(a.attname) || ' TYPE timestamptz', ', ')
        FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relnamespace = quote_ident(current_schema())::regnamespace
          AND (c.relkind = 'r' OR c.relkind = 'p')
          AND a.atttypid = 'timestamp'::regtype
          AND (c.relname = ANY (ARRAY['topic', 'consumer', 'event_buffer'])
               OR c.relname = ANY (SELECT lower(eql_name COLLATE "C") || '_event' FROM topic))
        GROUP BY c.oid
""")
_ADOPT_TIMES = f"""
DO $$
DECLARE
    statement text;
    statements text[] := ARRAY({_TO_ADOPT});
BEGIN
    FOREACH statement IN ARRAY statements LOOP
        EXECUTE statement;
    END LOOP;
END
$$;
"""

_OURS = """
CREATE TABLE consumer_claim (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_topic text NOT NULL,
    eql_consumer text NOT NULL,
    eql_partition smallint NOT NULL,
    eql_after bigint NOT NULL,
    eql_upto bigint NOT NULL,
    eql_events integer NOT NULL,
    eql_epoch bigint NOT NULL,
    eql_owner text NOT NULL,
    eql_state text NOT NULL DEFAULT 'claimed'
        CONSTRAINT consumer_claim_state CHECK (eql_state IN ('claimed', 'committed', 'released')),
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    eql_finished_at timestamptz,
    CONSTRAINT consumer_claim_not_empty CHECK (eql_after < eql_upto)
);
CREATE UNIQUE INDEX consumer_claim_live ON consumer_claim (eql_topic, eql_consumer, eql_partition)
    WHERE eql_state = 'claimed';
CREATE INDEX consumer_claim_range ON consumer_claim (eql_topic, eql_consumer, eql_partition, eql_upto);

CREATE TABLE spark_publication (
    eql_writer text NOT NULL,
    eql_batch bigint NOT NULL,
    eql_events bigint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_writer, eql_batch)
);
CREATE TABLE spark_staged_event (
    eql_attempt uuid NOT NULL,
    eql_position bigint NOT NULL,
    eql_topic text NOT NULL,
    eql_partition smallint NOT NULL,
    eql_key text,
    eql_value bytea NOT NULL,
    eql_metadata json NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_attempt, eql_position)
);

CREATE TABLE queue_message (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_queue text NOT NULL,
    eql_key text,
    eql_body bytea NOT NULL,
    eql_metadata json NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    eql_visible_at timestamptz NOT NULL DEFAULT now(),
    eql_receives integer NOT NULL DEFAULT 0,
    eql_receipt uuid
);
CREATE INDEX queue_message_visible ON queue_message (eql_queue, eql_visible_at, eql_id);

CREATE TABLE aggregate (
    eql_type text NOT NULL,
    eql_id text NOT NULL,
    eql_version bigint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_type, eql_id)
);
CREATE TABLE aggregate_change (
    eql_type text NOT NULL,
    eql_aggregate_id text NOT NULL,
    eql_version bigint NOT NULL,
    eql_kind text NOT NULL,
    eql_data jsonb NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_type, eql_aggregate_id, eql_version)
);
CREATE TABLE aggregate_snapshot (
    eql_type text NOT NULL,
    eql_aggregate_id text NOT NULL,
    eql_version bigint NOT NULL,
    eql_data jsonb NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_type, eql_aggregate_id, eql_version)
);

CREATE TABLE timeline_entry (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_timeline text NOT NULL,
    eql_resource text NOT NULL,
    eql_data jsonb NOT NULL,
    eql_occurred_at timestamptz NOT NULL
);
CREATE INDEX timeline_entry_resource ON timeline_entry (eql_timeline, eql_resource, eql_id);

CREATE TABLE rollup_bucket (
    eql_rollup text NOT NULL,
    eql_bucket timestamptz NOT NULL,
    eql_dimension text NOT NULL,
    eql_count bigint NOT NULL,
    eql_sum bigint NOT NULL,
    PRIMARY KEY (eql_rollup, eql_bucket, eql_dimension)
);

CREATE TABLE log_line (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_log text NOT NULL,
    eql_resource text NOT NULL,
    eql_line text NOT NULL,
    eql_written_at timestamptz NOT NULL
);
CREATE INDEX log_line_resource ON log_line (eql_log, eql_resource, eql_written_at);
CREATE INDEX log_line_time ON log_line (eql_log, eql_written_at);
"""


def upgrade() -> None:
    bind = op.get_bind()
    for statements in (_EVENTSQL, _ADDED_TO_EVENTSQL):
        run(statements)
    zone = text("SELECT pg_catalog.set_config('timezone', :zone, true)")
    bind.execute(zone, {"zone": context.config.attributes["times_in"]})
    run(_ADOPT_TIMES)
    bind.execute(zone, {"zone": "UTC"})
    run(_OURS)
