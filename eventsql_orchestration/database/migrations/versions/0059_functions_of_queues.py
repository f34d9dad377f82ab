"""Ordered queues note each timeout and refuse long keys in words. The last segment of a log ends at the largest id."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import copy_rights, install

revision = "0059"
down_revision = "0058"


def upgrade() -> None:
    install("queue", "queue_sending", "queue_receiving", "queue_settling", "log", "reading")
    # The first function of each pair calls the second, and so do others that the same roles execute.
    copy_rights("queue_acknowledge_all(text, bigint[], integer[])", to="refuse_messages(text, bigint[])")
    copy_rights("partition_events(text, smallint, bigint, bigint)", to="range_statement(text, smallint, text)")
