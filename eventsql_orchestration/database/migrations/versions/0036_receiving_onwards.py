"""Receiving from a queue goes on where the last receive found messages, past the rows of those that are gone."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import copy_rights, install, run

revision = "0036"
down_revision = "0035"

_BEFORE = "take_messages(integer, integer, double precision)"


def upgrade() -> None:
    install("queue_receiving")
    copy_rights(_BEFORE, to="take_messages(integer, integer, double precision, timestamptz)")
    run(f"DROP FUNCTION IF EXISTS {{schema}}.{_BEFORE}")
