"""Sending in order: a message that comes behind another one of its key waits out of sight from the start."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import copy_rights, install, run

revision = "0041"
down_revision = "0040"

_REPLACED = {
    "put_messages(integer, bytea[], text[], text[], integer[], timestamptz[], double precision[], text[])": "boolean",
    "take_in_order(integer, integer, double precision)": "timestamptz",
}
"""The functions that are replaced, and the argument that each has now besides."""


def upgrade() -> None:
    install("queue_sending", "queue_receiving")
    for before, added in _REPLACED.items():
        copy_rights(before, to=before.replace(")", f", {added})"))
        run(f"DROP FUNCTION IF EXISTS {{schema}}.{before}")
