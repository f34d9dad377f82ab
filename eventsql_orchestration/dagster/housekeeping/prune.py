"""Deletes old events that belong to no run from Dagster's event storage: what the lag sensor has reported.

Dagster deletes events with their run, and the whole history of an asset; for events without a run it has no call. On
PostgreSQL, where this package keeps Dagster's storage, they are deleted from its tables by what Dagster itself deletes
by: an event with its tags, as `delete_run` does. What Dagster asks for as the newest stays: the last observation and
materialization of each asset, the last result of each check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg
import sqlalchemy as sa

from eventsql_orchestration.dagster.tags import HOUSEKEEPING_INTERNAL, HOUSEKEEPING_TAG

BATCH: Final = 1_000
"""Events that one statement deletes: a few milliseconds, in which nobody waits."""

NO_RUN: Final = ""
"""What Dagster has for the run of an event that belongs to none."""

_ASSETS: Final = sa.text("SELECT asset_key FROM asset_keys")

_TAGS: Final = {
    dg.DagsterEventType.ASSET_OBSERVATION.value: "asset_observation",
    dg.DagsterEventType.ASSET_MATERIALIZATION.value: "materialization",
}
"""Where an event of each type has its tags, within its JSON: Dagster's table of tags has only some of its own."""

# Ids grow with time: the index (asset_key, type, id) gives the oldest first, and the first young one ends the look.
_DELETE_EVENTS: Final = sa.text("""
WITH old AS (
    SELECT e.id FROM event_logs e
    WHERE e.asset_key = :asset AND e.dagster_event_type = :type AND e.run_id = :run AND e.timestamp < :before
      AND e.id < (SELECT max(id) FROM event_logs WHERE asset_key = :asset AND dagster_event_type = :type)
      AND e.event::json #>> ARRAY['dagster_event', 'event_specific_data', :entry, 'tags', :tag] = :own
    ORDER BY e.id
    LIMIT :batch
), tags AS (
    DELETE FROM asset_event_tags WHERE event_id IN (SELECT id FROM old)
)
DELETE FROM event_logs WHERE id IN (SELECT id FROM old)
""")

_DELETE_EVALUATIONS: Final = sa.text("""
WITH old AS (
    SELECT x.id FROM asset_check_executions x
    WHERE x.asset_key = :asset AND x.check_name = :check AND x.run_id = :run AND x.evaluation_event_timestamp < :before
      AND x.id < (
          SELECT max(id) FROM asset_check_executions
          WHERE asset_key = :asset AND check_name = :check AND execution_status IN ('SUCCEEDED', 'FAILED')
      )
    ORDER BY x.id
    LIMIT :batch
), executions AS (
    DELETE FROM asset_check_executions WHERE id IN (SELECT id FROM old) RETURNING evaluation_event_storage_id
), events AS (
    DELETE FROM event_logs WHERE run_id = :run AND id IN (SELECT evaluation_event_storage_id FROM executions)
)
SELECT count(*) FROM executions
""")

# Of runs that were deleted: `delete_run` leaves the results of the checks that they executed.
_DELETE_ORPHANS: Final = sa.text("""
DELETE FROM asset_check_executions x
WHERE x.asset_key = :asset AND x.check_name = :check AND x.run_id <> :run AND x.evaluation_event_timestamp < :before
  AND NOT EXISTS (SELECT FROM runs r WHERE r.run_id = x.run_id)
  AND x.id < (SELECT max(id) FROM asset_check_executions WHERE asset_key = :asset AND check_name = :check)
""")


class EventHistory:
    """The events without a run in an instance's storage, where that is PostgreSQL; `supported` says whether it is."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._storage: Any = instance.event_log_storage

    @property
    def supported(self) -> bool:
        """Whether anything can be deleted."""
        # Without dagster-postgres no instance has its storage there.
        try:
            from dagster_postgres import PostgresEventLogStorage  # noqa: PLC0415 - it need not be installed
        except ModuleNotFoundError:
            return False
        return isinstance(self._storage, PostgresEventLogStorage)

    def delete_events(self, *, before: datetime) -> int:
        """Delete this package's observations and materializations without a run from before a time; gives how many."""
        with self._connection() as connection:
            assets = connection.execute(_ASSETS).scalars().all()
            return sum(
                self._in_batches(
                    connection, _DELETE_EVENTS,
                    asset=asset, type=kind, before=_stored(before),
                    entry=entry, tag=HOUSEKEEPING_TAG, own=HOUSEKEEPING_INTERNAL,
                )
                for asset in assets
                for kind, entry in _TAGS.items()
            )  # fmt: skip

    def delete_evaluations(self, checks: Collection[dg.AssetCheckKey], *, before: datetime) -> int:
        """Delete the results of some checks from before a time, of no run or one that is gone; gives how many."""
        deleted = 0
        with self._connection() as connection:
            for check in checks:
                values = {"asset": check.asset_key.to_string(), "check": check.name, "before": _stored(before)}
                deleted += self._in_batches(connection, _DELETE_EVALUATIONS, **values)
                deleted += connection.execute(_DELETE_ORPHANS, {**values, "run": NO_RUN}).rowcount
        return deleted

    def _in_batches(self, connection: sa.Connection, statement: sa.TextClause, **values: Any) -> int:
        deleted = 0
        while True:
            result = connection.execute(statement, {**values, "run": NO_RUN, "batch": BATCH})
            done: int = result.scalar_one() if result.returns_rows else result.rowcount
            deleted += done
            if done < BATCH:
                return deleted

    @contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        # In autocommit mode: each batch is a transaction.
        with self._storage.index_connection() as connection:
            yield connection


def _stored(moment: datetime) -> datetime:
    """A time as Dagster stores it: in UTC, without saying so."""
    return moment.astimezone(UTC).replace(tzinfo=None)
