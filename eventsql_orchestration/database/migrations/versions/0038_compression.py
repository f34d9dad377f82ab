"""The compression of a topic's blocks."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0038"
down_revision = "0037"

_UPGRADE = """
ALTER TABLE {schema}.topic ADD COLUMN eql_compression text NOT NULL DEFAULT 'none'
    CONSTRAINT topic_compression CHECK (eql_compression IN ('none', 'pglz', 'lz4'));
"""


def upgrade() -> None:
    run(_UPGRADE)
