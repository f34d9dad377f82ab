"""Topics that are consumed as queues: a row for each event that was handed out and is not acknowledged."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

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


def upgrade() -> None:
    run(_TABLES)
    install("leftovers")
