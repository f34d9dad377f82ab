"""Queues with definitions: order by key, priorities, dead letters, an archive, deduplication."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0020"
down_revision = "0019"

# Messages that wait stay where they are. A receiver that holds one during the upgrade loses its receipt.
_TABLES = """
CREATE TABLE queue (
    eql_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_name text NOT NULL UNIQUE,
    eql_ordered boolean NOT NULL DEFAULT false,
    eql_visibility_timeout double precision NOT NULL DEFAULT 30,
    eql_max_receives integer,
    eql_dead_letters integer REFERENCES queue,
    eql_retention_seconds double precision,
    eql_deduplication_seconds double precision NOT NULL DEFAULT 300,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    CHECK ((eql_max_receives IS NULL) = (eql_dead_letters IS NULL))
);

LOCK TABLE queue_message IN ACCESS EXCLUSIVE MODE;
INSERT INTO queue (eql_name) SELECT DISTINCT eql_queue FROM queue_message ORDER BY eql_queue;
DROP INDEX queue_message_visible;
ALTER TABLE queue_message RENAME COLUMN eql_queue TO eql_queue_name;
ALTER TABLE queue_message
    DROP COLUMN eql_receipt,
    ADD COLUMN eql_queue integer,
    ADD COLUMN eql_priority smallint NOT NULL DEFAULT 0,
    ADD COLUMN eql_in_order boolean NOT NULL DEFAULT false,
    ADD COLUMN eql_receipt integer,
    ADD COLUMN eql_unhandled integer NOT NULL DEFAULT 0,
    ADD COLUMN eql_due_at timestamptz,
    ADD COLUMN eql_origin integer,
    ADD COLUMN eql_history jsonb;
UPDATE queue_message m SET eql_queue = q.eql_id FROM queue q WHERE q.eql_name = m.eql_queue_name;
ALTER TABLE queue_message DROP COLUMN eql_queue_name, ALTER COLUMN eql_queue SET NOT NULL;

CREATE INDEX queue_message_visible ON queue_message (eql_queue, eql_priority, eql_visible_at, eql_id);
CREATE INDEX queue_message_in_order ON queue_message (eql_queue, eql_key, eql_id) WHERE eql_in_order;
CREATE INDEX queue_message_held_in_order ON queue_message (eql_queue, eql_key)
    WHERE eql_in_order AND eql_receipt IS NOT NULL;
CREATE INDEX queue_message_parked ON queue_message (eql_queue, eql_key, eql_id)
    WHERE eql_in_order AND eql_visible_at = 'infinity';
CREATE INDEX queue_message_dead ON queue_message (eql_origin) WHERE eql_origin IS NOT NULL;

CREATE TABLE queue_deduplication (
    eql_queue integer NOT NULL,
    eql_deduplication_id text NOT NULL,
    eql_message bigint NOT NULL,
    eql_expires_at timestamptz NOT NULL,
    PRIMARY KEY (eql_queue, eql_deduplication_id)
);
CREATE INDEX queue_deduplication_expires ON queue_deduplication (eql_queue, eql_expires_at);

CREATE TABLE queue_archive (
    eql_queue integer NOT NULL,
    eql_id bigint NOT NULL,
    eql_priority smallint NOT NULL,
    eql_key text,
    eql_body bytea NOT NULL,
    eql_metadata json NOT NULL,
    eql_created_at timestamptz NOT NULL,
    eql_receives integer NOT NULL,
    eql_history jsonb,
    eql_acknowledged_at timestamptz NOT NULL,
    eql_expires_at timestamptz NOT NULL
) PARTITION BY RANGE (eql_expires_at);
CREATE INDEX queue_archive_queue ON queue_archive (eql_queue, eql_acknowledged_at);
"""

# Rights that were given by hand on the messages go on to be enough.
_KEEP_RIGHTS = """
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM pg_catalog.pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE c.oid = '{schema}.queue_message'::regclass AND acl.grantee <> c.relowner
          AND acl.privilege_type IN ('INSERT', 'UPDATE')
    LOOP
        EXECUTE 'GRANT SELECT, INSERT, UPDATE ON {schema}.queue TO ' || grantee;
        EXECUTE 'GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.queue_deduplication TO ' || grantee;
        EXECUTE 'GRANT SELECT, INSERT ON {schema}.queue_archive TO ' || grantee;
        EXECUTE 'GRANT USAGE ON SEQUENCE {schema}.queue_message_eql_id_seq TO ' || grantee;
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.make_queue_archive(timestamptz) TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_TABLES)
    install("queue_sending", "queue_receiving", "queue_settling")
    run(_KEEP_RIGHTS)
