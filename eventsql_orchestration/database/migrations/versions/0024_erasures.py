"""Records of erasures, and a kind of role that erases."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0024"
down_revision = "0023"

# A key may be personal data itself, so a record has its SHA-256 only.
_RECORDS = """
CREATE TABLE erasure (
    eql_topic text NOT NULL,
    eql_key_digest text NOT NULL,
    eql_started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    eql_finished_at timestamptz,
    eql_role text NOT NULL,
    eql_requested_by text,
    eql_events bigint NOT NULL DEFAULT 0,
    eql_buffered bigint NOT NULL DEFAULT 0,
    eql_dead_letters bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (eql_topic, eql_key_digest, eql_started_at)
);
CREATE INDEX erasure_started_at ON erasure (eql_started_at);
CREATE UNIQUE INDEX erasure_unfinished ON erasure (eql_topic, eql_key_digest) WHERE eql_finished_at IS NULL;
"""

_ROLES = """
ALTER TABLE access_role DROP CONSTRAINT access_role_kind;
ALTER TABLE access_role ADD CONSTRAINT access_role_kind
    CHECK (eql_kind IN ('admin', 'transfer', 'publisher', 'stager', 'consumer', 'reader', 'eraser'));
"""


def upgrade() -> None:
    for statements in (_RECORDS, _ROLES):
        run(statements)
