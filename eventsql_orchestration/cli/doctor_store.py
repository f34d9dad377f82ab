"""Findings of `eventsql doctor` about the event store, its projections, and views.

Each raises `PermissionDeniedError`: roles have no rights on the event store and on views unless they were given some.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from eventsql_orchestration.cli.doctor_consumers import IDLE
from eventsql_orchestration.cli.findings import Finding, problem, warning
from eventsql_orchestration.cli.output import timestamp
from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.rows import query_all
from eventsql_orchestration.errors import RestoredStoreError
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.storage import sequences
from eventsql_orchestration.store.store import Store
from eventsql_orchestration.validation import advised, age, counted
from eventsql_orchestration.views.catalog import Views


def store_findings(shard: Shard, stalled_after: float) -> Iterator[Finding]:
    """An event store of another server, and subscriptions that stand still."""
    try:
        subscriptions = Store(shard).subscriptions()
    except RestoredStoreError as error:
        # A restored database has an empty store of another server, too.
        if query_all(shard.database, Queries("store", shard.database.schema)("in_use"), prepare=False):
            yield problem("store", error.message, "eventsql store adopt")
        return
    for each in subscriptions:
        idle = each.handled_at is None or datetime.now(UTC) - each.handled_at > IDLE
        if each.waiting and each.seconds > IDLE.total_seconds() and idle:
            yield warning(
                "store",
                f"subscription {each.name} has handled nothing for ten minutes, and "
                f"{counted(each.waiting, 'change')} {'waits' if each.waiting == 1 else 'wait'} for it",
                f"start the process that runs it; if nobody runs it any more: store.unsubscribe({each.name!r})",
            )
        writer = each.held_back_by
        if writer is not None and writer.seconds is not None and writer.seconds > stalled_after:
            yield warning(
                "store",
                f"subscription {each.name} waits with {counted(each.held_back, 'change')} for "
                f"{writer.description}, whose transaction is open for {age(round(writer.seconds))}",
                "start the standby for which its commit waits; do not end the process"
                if writer.waits_for_standby
                else "end that transaction: pg_terminate_backend(pid) ends a process, and ROLLBACK PREPARED in its "
                "database a prepared transaction",
            )
        if each.attempts:
            yield warning(
                "store",
                f"subscription {each.name} has failed {counted(each.attempts, 'time')} at its next change: "
                f"{each.failure}",
                "correct its handler; the change is tried again by itself",
            )
        if each.dead_letters:
            yield warning(
                "store",
                f"subscription {each.name} has given up {counted(each.dead_letters, 'change')}",
                f"{advised('store dead-letters', each.name)} says why; correct its handler, and call "
                f"subscription.redrive(); if they need no handling: {advised('store dismiss --execute', each.name)}",
            )


def projection_findings(shard: Shard) -> Iterator[Finding]:
    """Rebuilds of projections that have not ended."""
    rebuilds = query_all(shard.database, Queries("projections", shard.database.schema)("progress"), prepare=False)
    for name, applied, began in rebuilds:
        yield warning(
            "store",
            f"a rebuild of projection {name} began at {timestamp(began)}, applied {counted(applied, 'change')} and has "
            "not ended: if no process runs it, it was killed, and its tables take room",
            f"projections.rebuild({name!r}) goes on with it, and projections.give_up({name!r}) drops it",
        )


def view_findings(shard: Shard) -> Iterator[Finding]:
    """Views whose retention nobody applies, rebuilds that have not ended, and sequences of a logical replica."""
    views = Views(shard)
    overdue, rebuilds = views.overdue(), views.unfinished_rebuilds()
    tables = [view.table for view in views.definitions()]
    with shard.database.connection() as connection:
        unused = sequences.unused(connection, shard.database.schema, tables)
    for fault in unused:
        yield problem("views", fault.finding, fault.remedy)
    for name, began in rebuilds.items():
        yield warning(
            "views",
            f"a rebuild of view {name} began at {timestamp(began)} and has not ended: if no process runs it, it was "
            "killed, and its table takes room",
            advised("view give-up --execute", name),
        )
    for name, partitions in overdue.items():
        yield warning(
            "views",
            f"{counted(partitions, 'partition')} of view {name} should have been dropped a day ago or earlier",
            "eventsql view retain --execute, once a day",
        )
