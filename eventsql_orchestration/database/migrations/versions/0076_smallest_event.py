"""`fail` refuses the smallest number as it refuses any number that is no event of its claim.

The other files lose conditions that decide nothing.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0076"
down_revision = "0075"


def upgrade() -> None:
    install("capture", "consuming", "queue_receiving", "queue_sending")
