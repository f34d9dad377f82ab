"""Layouts of topics: partitions that change while events flow, each from an offset on."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0003"
down_revision = "0002"

# Defaults that are constants: no table is rewritten.
_ADDED = """
ALTER TABLE topic ADD COLUMN eql_layout integer NOT NULL DEFAULT 1;
ALTER TABLE consumer ADD COLUMN eql_until bigint;
CREATE TABLE topic_layout (
    eql_topic text NOT NULL,
    eql_layout integer NOT NULL,
    eql_partitions smallint NOT NULL,
    eql_after bigint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_topic, eql_layout)
);
"""


def upgrade() -> None:
    run(_ADDED)
    install("layouts")
