"""Staged events as blocks of a log: arrays, which a transfer moves into the log without reading them."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0026"
down_revision = "0025"

# Blocks of earlier versions are packed in eql_value and have no arrays. No default: no table is rewritten.
_ARRAYS = """
ALTER TABLE spark_staged_event
    ADD COLUMN eql_keys text[], ADD COLUMN eql_values bytea[], ADD COLUMN eql_event_metadata json[];
ALTER TABLE spark_staged_event
    ALTER COLUMN eql_keys SET STORAGE EXTERNAL, ALTER COLUMN eql_values SET STORAGE EXTERNAL,
    ALTER COLUMN eql_event_metadata SET STORAGE EXTERNAL;
"""


def upgrade() -> None:
    run(_ARRAYS)
