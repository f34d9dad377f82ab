"""Messages of queues have only times that programs can read, so no worker's login stops the figures of all topics.

Python has no infinite time, and before PostgreSQL 17 the server cannot subtract one. Only a message that waits for
another message of its key is at infinity.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0075"
down_revision = "0074"

# Sending has the same bounds. Writers wait while the server reads all messages: half a second for three million.
_TIMES = """
UPDATE {schema}.queue_message
SET eql_visible_at = CASE WHEN eql_visible_at = 'infinity' THEN eql_visible_at
        ELSE greatest('0001-01-01 00:00+00', least('9999-12-31 00:00+00', eql_visible_at)) END,
    eql_due_at = CASE WHEN eql_due_at IS NOT NULL
        THEN greatest('0001-01-01 00:00+00', least('9999-12-31 00:00+00', eql_due_at)) END
WHERE eql_visible_at < '0001-01-01 00:00+00' OR eql_due_at < '0001-01-01 00:00+00'
   OR eql_visible_at >= '10000-01-01 00:00+00' AND eql_visible_at < 'infinity' OR eql_due_at >= '10000-01-01 00:00+00';
ALTER TABLE {schema}.queue_message
ADD CONSTRAINT eql_visible_at_can_be_read CHECK (
    eql_visible_at >= '0001-01-01 00:00+00' AND eql_visible_at < '10000-01-01 00:00+00' OR eql_visible_at = 'infinity'
),
ADD CONSTRAINT eql_due_at_can_be_read CHECK (
    eql_due_at >= '0001-01-01 00:00+00' AND eql_due_at < '10000-01-01 00:00+00'
);
"""


def upgrade() -> None:
    run(_TIMES)
