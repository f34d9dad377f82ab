"""Pruning claims: making claims also deletes claims that ended long ago, so that their table stops growing.

An ended claim is looked up by its id (by a repeated write, or a run that replays it) and by its owner (by
`eventsql trace`). Housekeeping prunes the claims of runs, as part of Dagster's history.
"""

from __future__ import annotations

import logging
from typing import Final

import psycopg

from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import EventSQLError

logger = logging.getLogger(__name__)

RUN_OWNER: Final = "run "
"""Prefix of the owner of a claim if it is a run of Dagster's."""

PROCESS_OWNER: Final = "process "
"""Prefix of the owner of a claim if it is a consumer in a process."""

LEASED_SECONDS: Final = 3_600.0
"""Age at which claims of consumers in processes are deleted: nothing repeats them."""

KEPT_SECONDS: Final = 30 * 86_400.0
"""Age at which claims of other owners are deleted, the same as for runs."""

EVERY: Final = 257
"""Every 257th claim prunes. A prime number, so that each partition prunes even if partitions are claimed in turns."""

BATCH: Final = 500
"""Claims to check each time: more than are made until the next time."""

PRUNE_SECONDS: Final = 5.0
"""Seconds after which pruning gives up: a claim that was just made waits for it."""


class ClaimPruning:
    """Prunes the claims of the partitions that one `Claims` object claims."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("claims", database.schema)
        self._looked_upto: dict[ConsumerPartition, int] = {}

    def made(self, key: ConsumerPartition, claim_id: int) -> None:
        """Count a new claim, and prune the claims of its partition if it is their turn. Raises no error."""
        if claim_id % EVERY:
            return
        try:
            self.prune(key)
        except (EventSQLError, psycopg.Error) as error:
            logger.info("old claims of %s are kept for now: %s", key, error)

    def prune(self, key: ConsumerPartition) -> int:
        """Check some claims of a partition and delete the old claims; returns their number.

        If there were none, the next call continues after the checked claims.
        """
        values = {
            **key.parameters(), "after": self._looked_upto.get(key, -1), "limit": BATCH,
            "runs": RUN_OWNER, "processes": PROCESS_OWNER, "leased": LEASED_SECONDS, "kept": KEPT_SECONDS,
        }  # fmt: skip
        with self._database.transaction() as connection:
            connection.execute(f"SET LOCAL statement_timeout TO {round(PRUNE_SECONDS * 1000)}")
            looked_at, upto, deleted = fetch_one(connection, self._queries("prune"), values, prepare=False)
        if deleted or looked_at < BATCH:
            self._looked_upto.pop(key, None)
        else:
            self._looked_upto[key] = upto
        return int(deleted)
