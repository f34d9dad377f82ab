"""How many events each consumer partition has given up as dead letters: a backfill stops at a number of them."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"

# A constant default: no table is rewritten. Older versions of this package write nothing here.
_ADDED = "ALTER TABLE consumer ADD COLUMN eql_given_up bigint NOT NULL DEFAULT 0;"


def upgrade() -> None:
    op.get_bind().exec_driver_sql(_ADDED)
