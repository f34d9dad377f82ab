"""`eventsql consumer`: the consumers of the registry."""

from __future__ import annotations

from typing import Annotated, Final

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say, say_plan, write_json
from eventsql_orchestration.cli.parameters import (
    PLACES,
    POSITIVE,
    AsJson,
    ConsumerName,
    OptionalTopicName,
    TopicName,
    command,
    executing,
    option,
)
from eventsql_orchestration.cli.tables import Columns, cell, partition_of, same, show_fields, show_items
from eventsql_orchestration.consumer import EVERY_EVENT, Consumer, ConsumerState, EventFilter
from eventsql_orchestration.consuming.lag_values import LagCause
from eventsql_orchestration.topics.positions import Earliest, Place
from eventsql_orchestration.topics.side_consumers import backfill_of
from eventsql_orchestration.validation import advised, counted


@click.group()
def consumer() -> None:
    """Create, list, describe, pause, resume and delete consumers."""


@command(consumer)
def create(
    context: CliContext,
    *,
    topic: TopicName,
    consumer: ConsumerName,
    partitioned: Annotated[bool, option("Consume the partitions side by side, each with its own offset.")],
    max_attempts: Annotated[
        int | None, option("Attempts before an event is given up  [default: 5, or unchanged].", type=POSITIVE)
    ],
    start: Annotated[
        Place | None, option(f"Where a new consumer begins: {PLACES}  [default: earliest].", "--start", "--from")
    ],
    keys: Annotated[
        tuple[str, ...], option("Only events with this key; repeat it for several keys.", "--key", metavar="KEY")
    ],
    key_prefix: Annotated[str | None, option("Only events whose key begins with PREFIX.", metavar="PREFIX")],
    metadata: Annotated[
        tuple[tuple[str, str], ...], option("Only events with this metadata; repeat it: all must match.")
    ],
    no_filter: Annotated[bool, option("Remove the filter.")],
) -> None:
    """Create CONSUMER of TOPIC, or change it. The offsets of a consumer that exists stay: `eventsql seek` moves them.

    Its attempts and its filter change if options name them. --partitioned cannot be added to a consumer that exists, or
    removed from it.
    """
    conditions = _filter(keys, key_prefix, metadata)
    if conditions is not None and no_filter:
        raise click.UsageError("--no-filter contradicts --key, --key-prefix and --metadata")
    with context.whole() as platform:
        platform.registry.topic(topic)
        registered = platform.registry.declare_consumer(
            Consumer(topic, consumer, partitioned),
            max_attempts=max_attempts,
            start=Earliest() if start is None else start,
            filter=EVERY_EVENT if no_filter else conditions,
        )
        conditions = platform.registry.consumer(topic, consumer)[0].filter

    say(f"{registered}{'' if conditions is None else f'; only events with {conditions}'}")
    if start is not None and not registered.created:
        say(f"--start does not move a consumer that exists: `{advised('seek', topic, consumer)}` moves its offsets")


def _filter(keys: tuple[str, ...], key_prefix: str | None, metadata: tuple[tuple[str, str], ...]) -> EventFilter | None:
    if not keys and key_prefix is None and not metadata:
        return None
    return EventFilter(frozenset(keys) or None, key_prefix, dict(metadata))


@command(consumer, "list")
def list_consumers(
    context: CliContext,
    *,
    topic: OptionalTopicName,
    backfills: Annotated[bool, option("Also the side consumers, one for each window that a backfill replays.")],
    as_json: AsJson,
) -> None:
    """List the consumer partitions, of TOPIC or of all topics."""
    with context.platform() as platform:
        states = platform.registry.consumers(topic)
    if not backfills:
        states = [state for state in states if backfill_of(state.name) is None]
    table = {**same("topic"), "consumer": "name", **same("shard"), **_PROGRESS, **same("filter")}
    context.show_items(states, as_json=as_json, json=_JSON, table=table, spare=("consumed", "last consumed"))


def condition(state: ConsumerState) -> str:
    """The state of a consumer partition, in a word. `eventsql lag` tells the reason for `held back`."""
    if state.paused:
        return "paused"
    if state.failing:
        return "blocked" if state.spent else "retrying"
    if state.leased:
        return "leased"
    if state.until is not None and state.last_event_id >= state.until:
        return str(LagCause.HELD_BACK)
    return "active"


_PROGRESS: Final[Columns] = {
    "partition": partition_of, "offset": "last_event_id", "consumed": "consumed_events",
    "last consumed": "last_consumption_at", "state": condition,
}  # fmt: skip


def _owner(state: ConsumerState) -> object:
    return state.lease_owner if state.leased else None


def _leased_until(state: ConsumerState) -> object:
    return state.lease_expires_at if state.leased else None


_FAILURES: Final[Columns] = {
    "leased by": _owner, "leased until": _leased_until, "failing event": "failed_event_id", **same("failure"),
}  # fmt: skip

_JSON: Final[Columns] = {
    **same("topic"), "consumer": "name", **same("partition"), "offset": "last_event_id",
    **same("consumed_events", "last_consumption_at"), "state": condition,
    **same("paused", "max_attempts"), "lease_owner": _owner, "lease_expires_at": _leased_until,
    **same("failed_event_id", "attempts", "failure", "retry_at"),
    "filter": lambda state: None if state.filter is None else state.filter.as_json(),
}  # fmt: skip


@command(consumer)
def describe(context: CliContext, topic: TopicName, consumer: ConsumerName, as_json: AsJson) -> None:
    """Show CONSUMER of TOPIC: offsets, leases and failures of its partitions."""
    with context.platform() as platform:
        states = platform.registry.consumer(topic, consumer)
    if as_json:
        write_json([context.on_its_shard(state, _JSON) for state in states])
        return
    partitioned = states[0].partition >= 0
    show_fields(
        {
            "topic": topic,
            "consumer": consumer,
            "partitions": len({state.partition for state in states}) if partitioned else "not partitioned",
            "attempts at most": states[0].max_attempts,
            "filter": states[0].filter,
        }
    )
    show_items(states, {"shard": "shard", **_PROGRESS, **_FAILURES})


@command(consumer)
def delete(
    context: CliContext, topic: TopicName, consumer: ConsumerName, execute: Annotated[bool, executing("Delete it")]
) -> None:
    """Delete CONSUMER of TOPIC with its offsets: a plan and, with --execute, the deletion. The events stay."""
    with context.whole() as platform:
        states = platform.registry.consumer(topic, consumer)
        if execute:
            platform.registry.unregister_consumer(topic, consumer)
    if execute:
        say(f"consumer {consumer!r} of topic {topic!r} deleted")
        return
    consumed = counted(sum(state.consumed_events for state in states), "event")
    last = max(filter(None, (state.last_consumption_at for state in states)), default=None)
    since = "" if last is None else f", and the last one at {cell(last)}"
    say_plan(
        f"consumer {consumer!r} of topic {topic!r} would be deleted with its offsets. It has consumed {consumed}{since}"
    )


@command(consumer)
def pause(context: CliContext, topic: TopicName, consumer: ConsumerName) -> None:
    """Pause CONSUMER until it is resumed. A batch that is under way is finished."""
    with context.platform() as platform:
        platform.registry.pause(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} paused")


@command(consumer)
def resume(context: CliContext, topic: TopicName, consumer: ConsumerName) -> None:
    """Resume CONSUMER, and retry an event that blocks it or waits for its next attempt."""
    with context.platform() as platform:
        platform.registry.resume(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} resumed")
