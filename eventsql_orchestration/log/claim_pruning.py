"""Pruning claims: whoever makes claims deletes those that ended long ago, so that their table stops growing.

A claim that is over is looked up by its id (a write that repeats it, a run that replays it) and by its owner
(`eventsql trace`). The claims of runs are Dagster's history, which housekeeping prunes.
"""

from __future__ import annotations

import logging
from typing import Final

import psycopg

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.log.consumption import ConsumerPartition

logger = logging.getLogger(__name__)

RUN_OWNER: Final = "run "
"""How the owner of a claim begins that is a run of Dagster's."""

PROCESS_OWNER: Final = "process "
"""How the owner of a claim begins that is a consumer in a process."""

LEASED_SECONDS: Final = 3_600.0
"""How long the claims of consumers in processes are kept: nothing repeats them."""

KEPT_SECONDS: Final = 30 * 86_400.0
"""How long the claims of other owners are kept, as housekeeping keeps those of runs."""

EVERY: Final = 257
"""One of so many claims prunes. A prime, so that each of the partitions that are claimed in turns comes to it."""

BATCH: Final = 500
"""Claims that are looked at each time: more than are made meanwhile."""


class ClaimPruning:
    """Prunes the claims of the partitions that one object claims."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("claims", database.schema)
        self._looked_upto: dict[ConsumerPartition, int] = {}

    def made(self, key: ConsumerPartition, claim_id: int) -> None:
        """Note that a claim was made, and prune those of its partition where it is their turn.

        Raises nothing: the claim is made, and the next one prunes too.
        """
        if claim_id % EVERY:
            return
        try:
            self.prune(key)
        except (EventSQLError, psycopg.Error) as error:
            logger.info("old claims of %s are kept for now: %s", key, error)

    def prune(self, key: ConsumerPartition) -> int:
        """Look at some claims of a partition and delete those that are to go; gives their number.

        The next call goes on where nothing was to be deleted.
        """
        values = {
            **key.parameters(), "after": self._looked_upto.get(key, -1), "limit": BATCH,
            "runs": RUN_OWNER, "processes": PROCESS_OWNER, "leased": LEASED_SECONDS, "kept": KEPT_SECONDS,
        }  # fmt: skip
        with self._database.transaction() as connection:
            connection.execute("SET LOCAL statement_timeout TO '5s'")
            row = connection.execute(self._queries("prune"), values).fetchone()
        assert row is not None, "a SELECT without FROM gives a row"
        looked_at, upto, deleted = row
        if deleted or looked_at < BATCH:
            self._looked_upto.pop(key, None)
        else:
            self._looked_upto[key] = upto
        return int(deleted)
