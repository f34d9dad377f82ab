"""Fetching in SQL passes over many events at once that the consumer's filter does not take."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import copy_rights, install

revision = "0050"
down_revision = "0049"


def upgrade() -> None:
    install("reading", "consuming")
    # The second function calls the first.
    copy_rights("filter_takes(jsonb, text, json)", to="first_taken(text, smallint, bigint, bigint, jsonb)")
