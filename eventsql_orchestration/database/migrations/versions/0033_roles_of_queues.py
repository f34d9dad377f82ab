"""Roles that only send messages to queues, and roles that only work them off."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0033"
down_revision = "0032"

_KINDS = """
ALTER TABLE access_role DROP CONSTRAINT access_role_kind;
ALTER TABLE access_role ADD CONSTRAINT access_role_kind CHECK (eql_kind IN (
    'admin', 'transfer', 'publisher', 'stager', 'consumer', 'reader', 'eraser', 'sender', 'worker'
));
"""


def upgrade() -> None:
    run(_KINDS)
