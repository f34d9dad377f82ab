"""A receive takes less of the server's time: fewer statements, each message read once, and short plans at the start."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import copy_rights, install

revision = "0044"
down_revision = "0043"


def upgrade() -> None:
    install("queue_receiving")
    # The first function calls the second.
    copy_rights(
        "take_in_order(integer, integer, double precision, timestamptz)",
        to="take_others_in_order(integer, integer, double precision, tid[], bytea)",
    )
