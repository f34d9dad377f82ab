"""ANALYZE does not look at the arrays of new segments of logs in blocks: no plan uses their statistics.

An autovacuum worker read the keys of up to 30,000 blocks each time when a tenth of a segment was new, which took
seconds. The segments that are there keep their statistics.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0069"
down_revision = "0068"


def upgrade() -> None:
    install("log")
