"""Shards: the name of this database among those that share its topics, and how far it was when others joined."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0004"
down_revision = "0003"

_ADDED = """
CREATE TABLE shard (
    eql_name text PRIMARY KEY,
    eql_set uuid NOT NULL,
    eql_active boolean NOT NULL DEFAULT false,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX shard_one ON shard ((true));
CREATE TABLE shard_layout (
    eql_generation integer PRIMARY KEY,
    eql_shards text[] NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE shard_fence (
    eql_generation integer NOT NULL,
    eql_topic text NOT NULL,
    eql_fence bigint NOT NULL,
    PRIMARY KEY (eql_generation, eql_topic)
);
"""


def upgrade() -> None:
    run(_ADDED)
