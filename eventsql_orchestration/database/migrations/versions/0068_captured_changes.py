"""A captured change tells its own row, and not one of the same key that another transaction has deleted.

Above READ COMMITTED, a row that another transaction deleted since the snapshot is still visible. A transaction that
wrote a row of the same key told the deleted one, too.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0068"
down_revision = "0067"


def upgrade() -> None:
    install("capture_changes")
