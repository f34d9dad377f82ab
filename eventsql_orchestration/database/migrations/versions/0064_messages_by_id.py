"""The primary key of messages alone finds a message by its id.

A plan that was made while the table counted as empty, with dead rows alone, took the index of visible messages for an
id, and read the whole index for each acknowledgement. The index has the ids now as an expression, which only the order
of a receive uses.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0064"
down_revision = "0063"

_INDEX = """
DROP INDEX {schema}.queue_message_visible;
CREATE INDEX queue_message_visible ON {schema}.queue_message (eql_queue, eql_priority, eql_visible_at, (eql_id + 0));
"""


def upgrade() -> None:
    run(_INDEX)
    install("queue_receiving", "queue_settling")
