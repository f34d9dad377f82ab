"""Publications of Spark over several shards: what the deciding one has decided, and the parts of the others."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0006"
down_revision = "0005"

_ADDED = """
CREATE TABLE spark_decision (
    eql_id uuid PRIMARY KEY,
    eql_writer text NOT NULL,
    eql_batch bigint NOT NULL,
    eql_shards text[] NOT NULL,
    eql_decided boolean NOT NULL DEFAULT false,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE spark_part (
    eql_id uuid PRIMARY KEY,
    eql_shard text NOT NULL,
    eql_writer text NOT NULL,
    eql_batch bigint NOT NULL,
    eql_attempts uuid[] NOT NULL,
    eql_events bigint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    eql_published_at timestamptz
);
CREATE INDEX spark_part_published ON spark_part (eql_published_at);
"""


def upgrade() -> None:
    run(_ADDED)
