"""Declared views: tables of their own, partitioned by time. The tables of earlier views stay as they are."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0021"
down_revision = "0020"

_ADDED = """
CREATE TABLE view_definition (
    eql_name text PRIMARY KEY,
    eql_kind text NOT NULL CONSTRAINT view_definition_kind CHECK (eql_kind = ANY (ARRAY['timeline', 'rollup', 'logs'])),
    eql_definition jsonb NOT NULL,
    eql_retention_seconds bigint,
    eql_period_seconds bigint NOT NULL CONSTRAINT view_definition_period CHECK (eql_period_seconds >= 3600),
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
"""


def upgrade() -> None:
    run(_ADDED)
    install("views")
