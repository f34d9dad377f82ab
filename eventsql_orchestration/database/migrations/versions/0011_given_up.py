"""How many events each consumer partition has given up as dead letters: a backfill stops at a number of them."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0011"
down_revision = "0010"

# A constant default: no table is rewritten. Older versions of this package write nothing here.
_ADDED = "ALTER TABLE consumer ADD COLUMN eql_given_up bigint NOT NULL DEFAULT 0;"


def upgrade() -> None:
    run(_ADDED)
