"""`eventsql store`: the aggregates of the event store, their changes, and its subscriptions."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.lag import SUBSCRIPTION_COLUMNS
from eventsql_orchestration.cli.output import say, say_plan, timestamp, write_lines
from eventsql_orchestration.cli.parameters import (
    MOMENT,
    POSITIVE,
    AsJson,
    Name,
    argument,
    command,
    executing,
    leave_out,
    option,
)
from eventsql_orchestration.cli.tables import Columns, same, show_list
from eventsql_orchestration.errors import EventSQLError, ValidationError
from eventsql_orchestration.validation import check_name, counted, shown

if TYPE_CHECKING:
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.store.change import RecordedChange
    from eventsql_orchestration.store.dead_letters import StoreDeadLetter

_BATCH: Final = 1_000

_FOLLOW_DELAY: Final = 0.3
"""Seconds between two reads without new changes. A notification ends the wait."""

AggregateType = Annotated[str, argument(metavar="TYPE", type=Name("type", partial(check_name, "aggregate type")))]
AggregateId = Annotated[str, argument(metavar="ID", type=Name("id", partial(check_name, "aggregate id")))]


@click.group()
def store() -> None:
    """Look at the event store, append to it, replay subscriptions, and dismiss their dead letters."""


@command(store, "list")
def list_aggregates(
    context: CliContext,
    *,
    aggregate_type: Annotated[str | None, argument(metavar="[TYPE]")],
    after: Annotated[str | None, option("Only aggregates after this id.", metavar="ID")],
    limit: Annotated[int, option("At most N aggregates.", type=POSITIVE, default=100)],
    as_json: AsJson,
) -> None:
    """List the types of aggregates, or the aggregates of TYPE by their ids."""
    if aggregate_type is None:
        leave_out("is for the aggregates of a TYPE", "after", "limit")
    with context.platform() as platform:
        if aggregate_type is None:
            types = [{"type": name, "aggregates": count} for name, count in platform.store.types().items()]
            show_list(types, same("type", "aggregates"), as_json=as_json, json=dict)
            return
        found = platform.store.aggregates(aggregate_type, after_id=after or "", limit=limit)
        columns: Columns = same("id", "version", "created_at", "closed_at", "archived_at")
        context.show_items(found, as_json=as_json, json=columns, table=columns, spare=("closed_at", "archived_at"))
        if len(found) == limit:
            say(f"there may be more: --after {shlex.quote(found[-1].id)}")


@command(store)
def show(
    context: CliContext,
    *,
    aggregate_type: AggregateType,
    aggregate_id: AggregateId,
    upto: Annotated[int | None, option("Only changes up to version N.", type=POSITIVE)],
) -> None:
    """Print the changes of an aggregate as JSON lines."""
    with context.platform() as platform:
        _write(_changes(platform, aggregate_type, aggregate_id, upto))


def _changes(
    platform: EventSQL, aggregate_type: str, aggregate_id: str, upto: int | None = None
) -> Sequence[RecordedChange]:
    changes = platform.store.load(aggregate_type, aggregate_id, upto_version=upto)
    if not changes:
        raise EventSQLError(
            f"no aggregate {aggregate_id!r} of type {aggregate_type!r} has changes: see `eventsql store list`"
        )
    return changes


@command(store)
def tail(
    context: CliContext,
    *,
    after: Annotated[str | None, option("Begin after this checkpoint of an earlier line.", metavar="CHECKPOINT")],
    types: Annotated[tuple[str, ...], option("Only this type of aggregate; repeat it for several.", "--type")],
    kinds: Annotated[tuple[str, ...], option("Only this kind of change; repeat it for several.", "--kind")],
    limit: Annotated[int | None, option("End after N changes.", type=POSITIVE)],
    follow: Annotated[bool, option("Go on with new changes, until Ctrl-C.")],
) -> None:
    """Print the changes of all aggregates as JSON lines, in the global order.

    Each line has its checkpoint. Without --after, it begins with the first change, and with --follow at the end.
    """
    with context.platform() as platform:
        opened = platform.store
        place = lazy.StoreCheckpoint.parse(after) if after is not None else opened.newest() if follow else None
        wake = threading.Event()
        if follow:
            platform.listener.subscribe(lazy.STORE, None, wake.set)
        left = inf if limit is None else limit
        while left > 0:
            changes = opened.read_all(place, types=types or None, kinds=kinds or None, limit=int(min(_BATCH, left)))
            _write(changes)
            if changes:
                place = changes[-1].checkpoint
                left -= len(changes)
                continue
            if not follow:
                return
            wake.wait(_FOLLOW_DELAY)
            wake.clear()


@command(store)
def append(
    context: CliContext,
    *,
    aggregate_type: AggregateType,
    aggregate_id: AggregateId,
    kind: Annotated[str, argument()],
    data: Annotated[str, argument()],
    expected: Annotated[
        str, option("The version it must have: a number, any, exists or none.", "--expected-version", default="any")
    ],
    change_id: Annotated[UUID | None, option("The change's id. An id is stored only once.", "--id", type=click.UUID)],
    metadata: Annotated[tuple[tuple[str, str], ...], option("Metadata of the change; repeat it for several.")],
) -> None:
    """Append a change of KIND to an aggregate. DATA is a JSON object."""
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"DATA is not JSON: {error}") from None
    # Python reads no more than some thousand digits.
    version: Any = int(expected) if expected.isdecimal() and len(expected) < 20 else expected
    with context.platform() as platform:
        change = lazy.Change(kind, decoded, id=change_id, metadata=dict(metadata))
        new = platform.store.append(aggregate_type, aggregate_id, [change], expected_version=version)
    say(f"{aggregate_type} {aggregate_id!r} is at version {new}")


@command(store)
def close(
    context: CliContext, *, aggregate_type: AggregateType, aggregate_id: AggregateId,
    execute: Annotated[bool, executing("Close it")],
) -> None:  # fmt: skip
    """Close an aggregate for ever, so that it takes no more changes, and can be archived.

    A plan and, with --execute, the closing.
    """
    with context.platform() as platform:
        if execute:
            platform.store.close_stream(aggregate_type, aggregate_id)
            say(f"{aggregate_type} {aggregate_id!r} is closed")
        else:
            version = _changes(platform, aggregate_type, aggregate_id)[-1].version
            say_plan(f"{aggregate_type} {aggregate_id!r} would be closed for ever at version {version}")


@command(store)
def archive(
    context: CliContext,
    *,
    aggregate_type: AggregateType,
    aggregate_id: Annotated[str | None, argument(metavar="[ID]")],
    closed_before: Annotated[
        datetime | None, option("All aggregates closed before this time, or this long ago (90d).", type=MOMENT)
    ],
    limit: Annotated[int, option("At most N aggregates.", type=POSITIVE, default=10_000)],
) -> None:
    """Move the changes of closed aggregates into the archive. Everything reads them there as before."""
    if (aggregate_id is None) == (closed_before is None):
        raise click.UsageError("name an ID, or give --closed-before")
    if aggregate_id is not None:
        leave_out("is for --closed-before", "limit")
    with context.platform() as platform:
        if aggregate_id is not None:
            moved = platform.store.archive_stream(aggregate_type, aggregate_id)
            say(f"{aggregate_type} {aggregate_id!r}: {counted(moved, 'change')} archived")
        elif closed_before is not None:
            done = platform.store.archive_closed(aggregate_type, before=closed_before, limit=limit)
            say(f"{counted(done.aggregates, 'aggregate')} archived, with {counted(done.changes, 'change')}")


@command(store)
def unarchive(context: CliContext, *, aggregate_type: AggregateType, aggregate_id: AggregateId) -> None:
    """Move the changes of an aggregate out of the archive again. It stays closed."""
    with context.platform() as platform:
        moved = platform.store.unarchive_stream(aggregate_type, aggregate_id)
    say(f"{aggregate_type} {aggregate_id!r}: {counted(moved, 'change')} moved out of the archive")


@command(store)
def subscriptions(context: CliContext, as_json: AsJson) -> None:
    """List the subscriptions with their lag and its cause."""
    with context.platform() as platform:
        found = platform.store.subscriptions()
    details: Columns = {
        **same("name"), "checkpoint": lambda lag: str(lag.checkpoint),
        **same("handled", "handled_at", "waiting", "held_back", "seconds"),
        "held_back_by": lambda lag: None if lag.held_back_by is None else lag.held_back_by.description,
        "held_back_seconds": lambda lag: None if lag.held_back_by is None else lag.held_back_by.seconds,
        **same("attempts", "failure", "retry_in", "dead_letters"),
    }  # fmt: skip
    context.show_items(found, as_json=as_json, json=details, table={**SUBSCRIPTION_COLUMNS, **same("handled")})


@command(store)
def replay(
    context: CliContext,
    *,
    subscription: Annotated[str, argument()],
    start: Annotated[str, option("Where to go on: earliest, latest, or a checkpoint.", "--from", default="earliest")],
    execute: Annotated[bool, executing("Move it")],
) -> None:
    """Move SUBSCRIPTION to another place: its handler gets the changes after that place again.

    A plan and, with --execute, the move.
    """
    try:
        place: Any = start if start in ("earliest", "latest") else lazy.StoreCheckpoint.parse(start)
    except ValidationError:
        raise click.UsageError(f"--from is earliest, latest or a checkpoint, not {shown(start)}") from None
    with context.platform() as platform:
        found = next((each for each in platform.store.subscriptions() if each.name == subscription), None)
        if found is None:
            raise lazy.not_found(subscription)
        if not execute:
            say_plan(f"subscription {subscription!r} would move from {found.checkpoint} to {place}")
            return
        reached = platform.store.replay(subscription, place)
    say(f"subscription {subscription!r} goes on after {reached}")


@command(store)
def dead_letters(context: CliContext, subscription: Annotated[str, argument()], as_json: AsJson) -> None:
    """List the changes that SUBSCRIPTION has given up. `Subscription.redrive()` hands them to its handler again."""
    with context.platform() as platform:
        found = _dead_letters(platform, subscription)
    columns = same("id", "aggregate_type", "aggregate_id", "version", "attempts", "failure", "created_at")
    context.show_items(found, as_json=as_json, json=columns, table=columns)


def _dead_letters(platform: EventSQL, subscription: str) -> list[StoreDeadLetter]:
    found = platform.store.dead_letters(subscription)
    if not found and subscription not in {each.name for each in platform.store.subscriptions()}:
        raise lazy.not_found(subscription)
    return found


@command(store)
def dismiss(
    context: CliContext,
    *,
    subscription: Annotated[str, argument()],
    ids: Annotated[tuple[int, ...], option("Only the dead letter with this id; repeat it.", "--id", type=POSITIVE)],
    execute: Annotated[bool, executing("Delete them")],
) -> None:
    """Delete dead letters of SUBSCRIPTION whose changes need no handling any more. Their changes stay in the store.

    A plan and, with --execute, the deletion.
    """
    with context.platform() as platform:
        if execute:
            dismissed = platform.store.dismiss(subscription, ids or None)
            say(f"{counted(dismissed, 'dead letter')} of subscription {subscription!r} dismissed")
        else:
            chosen = [each for each in _dead_letters(platform, subscription) if not ids or each.id in ids]
            would = f"{counted(len(chosen), 'dead letter')} of subscription {subscription!r} would be deleted"
            say_plan(would, number=len(chosen))


@command(store)
def adopt(context: CliContext) -> None:
    """Adopt an event store that was restored from a dump of another server. Writers wait meanwhile."""
    with context.platform() as platform:
        done = platform.store.adopt()
    if not done.changes:
        say(
            "nothing to adopt: this server orders every change of the event store; only changes that came with a dump "
            "of another server, or through pg_upgrade, need this command"
        )
        return
    say(f"adopted {counted(done.changes, 'change')}; subscriptions go on where they stood")


def _write(changes: Iterable[RecordedChange]) -> None:
    write_lines(map(_object, changes))


def _object(change: RecordedChange) -> dict[str, Any]:
    """A change as the commands print it."""
    return {
        "type": change.aggregate_type,
        "id": change.aggregate_id,
        "version": change.version,
        "kind": change.kind,
        "data": change.data,
        "schema_version": change.schema_version,
        "change_id": None if change.id is None else str(change.id),
        "metadata": change.metadata,
        "created_at": timestamp(change.created_at),
        **({} if change.checkpoint is None else {"checkpoint": str(change.checkpoint)}),
    }
