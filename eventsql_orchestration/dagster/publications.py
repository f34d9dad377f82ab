"""Deletes the records of publications that nothing repeats any more: one for each that an asset or a stream made."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.lineage import claim_of, run_of
from eventsql_orchestration.database import Queries

PAGE: Final = 500


def delete_publications(platform: EventSQL, instance: dg.DagsterInstance, *, before: datetime) -> int:
    """Delete the records of publications on one database from before a time; gives their number.

    By its record a publication that is repeated is known and not published again. So that of an asset is kept as long
    as the instance has the run that it belongs to, which could be executed again; one that committed a claim is not
    needed for that, since a claim is committed once. Of other writers, streams above all, the newest batch is kept for
    ever: a stream repeats its last one, whenever it goes on.
    """
    queries = Queries("publications", platform.database.schema)
    deleted, after = 0, ""
    with platform.database.connection() as connection:
        while True:
            rows = connection.execute(
                queries("old_writers"), {"after": after, "before": before, "limit": PAGE}
            ).fetchall()
            writers = [str(row[0]) for row in rows]
            if not writers:
                break
            gone = _not_to_be_repeated(writers, instance)
            deleted += connection.execute(queries("delete_writers"), {"writers": gone, "before": before}).rowcount
            after = writers[-1]
        deleted += connection.execute(queries("delete_batches"), {"before": before}).rowcount
    return deleted


def _not_to_be_repeated(writers: Sequence[str], instance: dg.DagsterInstance) -> list[str]:
    runs = {writer: run for writer in writers if (run := run_of(writer)) is not None}
    wanted = sorted(set(runs.values()))
    kept = {run.run_id for run in instance.get_runs(dg.RunsFilter(run_ids=wanted))} if wanted else set()
    gone = {writer for writer, run in runs.items() if run not in kept}
    return [writer for writer in writers if writer in gone or claim_of(writer) is not None]
