"""An ordered queue notes each timeout, refuses keys in words, and no dead letter with a long key holds a queue up."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import copy_rights, install

revision = "0059"
down_revision = "0058"


def upgrade() -> None:
    install("queue", "queue_sending", "queue_receiving", "queue_settling", "log", "reading")
    # The first function of each pair calls the second.
    copy_rights("queue_acknowledge_all(text, bigint[], integer[])", to="refuse_messages(text, bigint[])")
    copy_rights("partition_events(text, smallint, bigint, bigint)", to="range_statement(text, smallint, text)")
