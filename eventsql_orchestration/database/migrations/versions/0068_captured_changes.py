"""A captured change tells its own row, and not one of the same key that another transaction has deleted.

Above READ COMMITTED, a row that another transaction deleted since the snapshot is still visible. A transaction that
wrote a row of the same key told the deleted one, too.

A statement that changes few rows of a captured table takes half as much time for their events. Most of that time is
planning. So a query of one table reads the changes, an INSERT whose plan the session keeps writes them, and the columns
of the table are read in one pass.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0068"
down_revision = "0067"


def upgrade() -> None:
    install("capture", "capture_changes")
