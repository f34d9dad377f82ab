"""Deletes old history: runs, ticks and reports of Dagster, claims, records of publications, partitions of backfills.

Dagster deletes events with their run, and the whole history of an asset. It has no call that deletes events without a
run, such as the reports of the lag sensor. If Dagster's storage is PostgreSQL, this module deletes these events from
Dagster's tables as `delete_run` does, each event with its tags. The last observation and materialization of each asset
and the last result of each check stay, because Dagster reads them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg
import sqlalchemy as sa

from eventsql_orchestration import Shard
from eventsql_orchestration.dagster.backfills.assets import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.metadata_keys import CONSUMED_TOPIC
from eventsql_orchestration.dagster.shards import OnShards
from eventsql_orchestration.dagster.tags import (
    BACKFILL_OF_TAG,
    BACKFILL_TAG,
    DAGSTER_ROOT_TAG,
    FINISHED,
    FORMER_HOUSEKEEPING_TAG,
    HOUSEKEEPING_INTERNAL,
    HOUSEKEEPING_TAG,
)
from eventsql_orchestration.database import Queries
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.windows import Backfill, is_recent, read_key
from eventsql_orchestration.orchestration.owners import AIRFLOW_OWNER
from eventsql_orchestration.orchestration.provenance import Writer
from eventsql_orchestration.validation import MAX_BIGINT

BATCH: Final = 1_000
"""Rows that one statement deletes. It takes a few milliseconds, so it holds up nobody."""

PAGE: Final = 100
"""Number of runs, or of writers of publications, that are read at once."""

NO_RUN: Final = ""
"""The run id that Dagster stores for an event without a run."""

_ASSETS: Final = sa.text("SELECT asset_key FROM asset_keys")

_TAGS: Final = {
    dg.DagsterEventType.ASSET_OBSERVATION.value: "asset_observation",
    dg.DagsterEventType.ASSET_MATERIALIZATION.value: "materialization",
}
"""The key of an event's tags within its JSON, by type. Dagster's table of tags lacks this package's tags."""

# Ids grow with time: the index (asset_key, type, id) gives the oldest events first, and the first event that is too
# young to delete ends the scan.
_DELETE_EVENTS: Final = sa.text("""
WITH old AS (
    SELECT e.id FROM event_logs e
    WHERE e.asset_key = :asset AND e.dagster_event_type = :type AND e.run_id = :run AND e.timestamp < :before
      AND e.id < (SELECT max(id) FROM event_logs WHERE asset_key = :asset AND dagster_event_type = :type)
      AND :own IN (
          e.event::json #>> ARRAY['dagster_event', 'event_specific_data', :entry, 'tags', :tag],
          e.event::json #>> ARRAY['dagster_event', 'event_specific_data', :entry, 'tags', :former]
      )
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

# `delete_run` leaves the results of the checks that the run executed.
_DELETE_ORPHANS: Final = sa.text("""
DELETE FROM asset_check_executions x
WHERE x.asset_key = :asset AND x.check_name = :check AND x.run_id <> :run AND x.evaluation_event_timestamp < :before
  AND NOT EXISTS (SELECT FROM runs r WHERE r.run_id = x.run_id)
  AND x.id < (SELECT max(id) FROM asset_check_executions WHERE asset_key = :asset AND check_name = :check)
""")


def delete_runs(instance: dg.DagsterInstance, kind: str, *, before: datetime, page: int = PAGE) -> int:
    """Delete the finished runs of a kind that ended before a time, with their logs; gives their number."""
    deleted = 0
    for tag in (HOUSEKEEPING_TAG, FORMER_HOUSEKEEPING_TAG):
        old = dg.RunsFilter(tags={tag: kind}, statuses=list(FINISHED), updated_before=before)
        while runs := instance.get_run_records(old, limit=page):
            for run in runs:
                run_id = run.dagster_run.run_id
                # Each location of an instance deletes the same runs, and all of them begin in the same minute.
                with suppress(FileNotFoundError):
                    instance.compute_log_manager.delete_logs(prefix=[run_id])
                instance.delete_run(run_id)
                deleted += 1
    return deleted


def purge_ticks(
    instance: dg.DagsterInstance, states: Iterable[Any], *, before: datetime, failures_before: datetime
) -> None:
    """Delete the ticks from before a time, of the sensors and schedules with these stored states.

    Failed ticks have a separate time, because they explain gaps.
    """
    for state in states:
        origin, selector = state.instigator_origin_id, state.selector_id
        instance.purge_ticks(origin, selector, before.timestamp(), _statuses("SKIPPED", "STARTED", "SUCCESS"))
        instance.purge_ticks(origin, selector, failures_before.timestamp(), _statuses("FAILURE"))


def _statuses(*names: str) -> list[Any]:
    """Statuses of ticks, read from their stored form, because Dagster does not export their type."""
    return [dg.deserialize_value(json.dumps({"__enum__": f"TickStatus.{name}"})) for name in names]


def delete_reports(
    instance: dg.DagsterInstance, checks: Collection[dg.AssetCheckKey], *, before: datetime, batch: int = BATCH
) -> int | None:
    """Delete this package's reports from before a time. Returns their number, or None if the storage is not PostgreSQL.

    Reports are observations and materializations without a run, and results of `checks` without a run or with a deleted
    run.
    """
    # Without dagster-postgres, no instance has its storage in PostgreSQL.
    try:
        from dagster_postgres import PostgresEventLogStorage  # noqa: PLC0415 - it need not be installed
    except ModuleNotFoundError:
        return None
    storage: Any = instance.event_log_storage
    if not isinstance(storage, PostgresEventLogStorage):
        return None

    # Dagster stores times in UTC, without a zone.
    common = {"before": before.astimezone(UTC).replace(tzinfo=None), "run": NO_RUN, "batch": batch}
    own = {**common, "tag": HOUSEKEEPING_TAG, "former": FORMER_HOUSEKEEPING_TAG, "own": HOUSEKEEPING_INTERNAL}
    deleted = 0
    # The connection is in autocommit mode: each batch is a transaction.
    with storage.index_connection() as connection:
        for asset in connection.execute(_ASSETS).scalars().all():
            for kind, entry in _TAGS.items():
                values = {**own, "asset": asset, "type": kind, "entry": entry}
                deleted += _in_batches(connection, _DELETE_EVENTS, values)
        for check in checks:
            values = {**common, "asset": check.asset_key.to_string(), "check": check.name}
            deleted += _in_batches(connection, _DELETE_EVALUATIONS, values)
            deleted += connection.execute(_DELETE_ORPHANS, values).rowcount
    return deleted


def _in_batches(connection: sa.Connection, statement: sa.TextClause, values: dict[str, Any]) -> int:
    deleted = 0
    while True:
        result = connection.execute(statement, values)
        done: int = result.scalar_one() if result.returns_rows else result.rowcount
        deleted += done
        if done < values["batch"]:
            return deleted


def delete_claims(shard: Shard, *, before: datetime, batch: int = BATCH) -> int:
    """Delete the claims of one database that ended before a time; gives their number.

    A claim that has not ended stays, whatever its age. A run whose claim is deleted cannot replay it, and
    `eventsql trace` does not find the origin of the events that were made from it.
    """
    queries = Queries("claim_history", shard.database.schema)
    deleted = 0
    with shard.database.connection() as connection:
        young = connection.execute(queries("first_since"), {"before": before}).fetchone()
        values = {"first": MAX_BIGINT if young is None else young[0], "before": before, "batch": batch}
        while (done := connection.execute(queries("delete_before"), values).rowcount) == batch:
            deleted += done
    return deleted + done


def delete_publications(shard: Shard, instance: dg.DagsterInstance, *, before: datetime, page: int = PAGE) -> int:
    """Delete the records of assets' publications of one database from before a time; gives their number.

    The record keeps a repeated publication from being published again. It stays as long as the instance has the run or
    a re-execution of it, because each of them could be executed again. It need not stay if the run committed a claim: a
    claim is committed once. The records of Airflow's tasks stay, because Dagster does not know whether somebody may
    clear the task. The publications of all other writers, such as streams, delete their records themselves.
    """
    queries = Queries("publications", shard.database.schema)
    deleted, after = 0, ""
    with shard.database.connection() as connection:
        while True:
            values = {"after": after, "before": before, "limit": page}
            writers = [str(row[0]) for row in connection.execute(queries("old_writers"), values).fetchall()]
            if not writers:
                break
            gone = _not_repeated(writers, instance)
            deleted += connection.execute(queries("delete_writers"), {"writers": gone, "before": before}).rowcount
            after = writers[-1]
    return deleted


def _not_repeated(writers: Sequence[str], instance: dg.DagsterInstance) -> list[str]:
    """The writers that cannot publish again: they committed a claim, or their run and its re-executions are deleted."""
    read = {writer: Writer.read(writer) for writer in writers}
    runs = {name: each.run for name, each in read.items() if each.run and not each.run.startswith(AIRFLOW_OWNER)}
    wanted = sorted(set(runs.values()))
    kept: set[str | None] = set()
    if wanted:
        kept = {run.run_id for run in instance.get_runs(dg.RunsFilter(run_ids=wanted))}
        kept |= {run.root_run_id for run in instance.get_runs(dg.RunsFilter(tags={DAGSTER_ROOT_TAG: wanted}))}
    return [name for name in writers if read[name].claim is not None or (name in runs and runs[name] not in kept)]


def delete_windows(
    registered: OnShards[Sequence[Backfill]], instance: dg.DagsterInstance, specs: Iterable[dg.AssetSpec],
    *, now: datetime,
) -> dict[str, int]:  # fmt: skip
    """Delete the partitions of ended backfills from the backfill assets among `specs`; gives counts by asset.

    The partitions of a backfill stay while it is `registered`, while it may be registered on a shard that `registered`
    leaves out, and while Dagster has a run of it. They also stay for a day at least: a run that plans a backfill adds
    its partitions before it registers the backfill.
    """
    deleted: dict[str, int] = {}
    for spec in specs:
        partitions = spec.partitions_def
        if ASSETS_METADATA not in spec.metadata or not isinstance(partitions, dg.DynamicPartitionsDefinition):
            continue
        name = str(partitions.name)
        topic, consumer = str(spec.metadata[CONSUMED_TOPIC]), str(spec.metadata["consumer"])
        known = (each for found in registered.of.values() for each in found)
        kept = {each.id for each in known if (each.topic, each.consumer) == (topic, consumer)}
        by_id: dict[str, list[str]] = {}
        for key in instance.get_dynamic_partitions(name):
            try:
                backfill_id, window, _ = read_key(key)
            except ValidationError:
                # A user has added this partition.
                continue
            by_id.setdefault(backfill_id, []).append(key)
            if registered.left_out and window.shard not in registered.of:
                kept.add(backfill_id)

        for backfill_id in by_id.keys() - kept:
            if is_recent(backfill_id, now):
                continue
            tags = {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: backfill_of(topic, consumer)}
            if instance.get_runs(dg.RunsFilter(tags=tags), limit=1):
                continue
            for key in by_id[backfill_id]:
                instance.delete_dynamic_partition(name, key)
            deleted[name] = deleted.get(name, 0) + len(by_id[backfill_id])
    return deleted
