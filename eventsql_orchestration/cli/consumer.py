"""`eventsql consumer`: the consumers of the registry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import Column, partition_of, say, show_fields, show_items, write_json
from eventsql_orchestration.cli.parameters import (
    LogPlace,
    NameValue,
    consumer_argument,
    json_option,
    optional_topic_argument,
    topic_argument,
)
from eventsql_orchestration.consumer import EVERY_EVENT, Consumer, ConsumerState, EventFilter
from eventsql_orchestration.consuming.lag import LagCause
from eventsql_orchestration.topics.offsets import Earliest, Place


@click.group()
def consumer() -> None:
    """Create, list, describe, pause, resume and delete consumers."""


@consumer.command()
@topic_argument
@consumer_argument
@click.option(
    "--partitioned", is_flag=True, help="Consume the topic's partitions side by side, each with its own offset."
)
@click.option(
    "--max-attempts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Attempts before an event is given up  [default: 5, or as before].",
)
@click.option(
    "--start",
    "--from",
    "start",
    type=LogPlace(),
    metavar="PLACE",
    help="Where a new consumer begins: earliest, latest, an offset, a time with its zone (2026-05-01T12:00:00Z), or "
    "a duration before now (15m, 2h, 7d)  [default: earliest].",
)
@click.option("--key", "keys", multiple=True, metavar="K", help="Only events with this key; if repeated, any of them.")
@click.option("--key-prefix", metavar="P", help="Only events whose key begins with P.")
@click.option(
    "--metadata",
    type=NameValue(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Only events with this metadata; if repeated, only events with all of it.",
)
@click.option("--no-filter", is_flag=True, help="Remove the filter.")
@pass_context
def create(
    context: CliContext,
    *,
    topic: str,
    consumer: str,
    partitioned: bool,
    max_attempts: int | None,
    start: Place | None,
    keys: tuple[str, ...],
    key_prefix: str | None,
    metadata: tuple[tuple[str, str], ...],
    no_filter: bool,
) -> None:
    """Create CONSUMER of TOPIC, or change it. The offsets of a consumer that exists stay: `eventsql seek` moves them.

    Its attempts and its filter change if options name them. --partitioned cannot be added to a consumer that exists, or
    removed from it.
    """
    conditions = _filter(keys, key_prefix, metadata)
    if conditions is not None and no_filter:
        raise click.UsageError("--no-filter contradicts --key, --key-prefix and --metadata")
    with context.definitions() as platform:
        platform.registry.topic(topic)
        registered = platform.registry.declare_consumer(
            Consumer(topic, consumer, partitioned),
            max_attempts=max_attempts,
            start=Earliest() if start is None else start,
            filter=EVERY_EVENT if no_filter else conditions,
        )
        conditions = platform.registry.consumer(topic, consumer)[0].filter
    say(f"{registered}{_filtered(conditions)}")
    if start is not None and not registered.created:
        say(f"its offsets stay where they are, whatever --start says: `eventsql seek {topic} {consumer}` moves them")


def _filter(keys: tuple[str, ...], key_prefix: str | None, metadata: tuple[tuple[str, str], ...]) -> EventFilter | None:
    if not keys and key_prefix is None and not metadata:
        return None
    texts = dict(metadata)
    if len(texts) < len(set(metadata)):
        raise click.UsageError("no event can match: --metadata names one name with two values")
    return EventFilter(frozenset(keys) or None, key_prefix, texts)


def _filtered(conditions: EventFilter | None) -> str:
    return "" if conditions is None else f"; only events with {conditions}"


@consumer.command("list")
@optional_topic_argument
@json_option
@pass_context
def list_consumers(context: CliContext, *, topic: str | None, as_json: bool) -> None:
    """List the consumer partitions, of TOPIC or of all topics."""
    with context.platform() as platform:
        states = platform.registry.consumers(topic)
    if as_json:
        write_json([context.on_its_shard(state, _JSON) for state in states])
        return
    show_items(states, {"topic": "topic", "consumer": "name", "shard": "shard", **_PROGRESS, "filter": "filter"})


def condition(state: ConsumerState) -> str:
    """The state of a consumer partition, in a word. `eventsql lag` tells the reason for `held back`."""
    if state.paused:
        return "paused"
    if state.failing:
        return "blocked" if state.spent else "retrying"
    if state.leased(datetime.now(UTC)):
        return "leased"
    if state.until is not None and state.last_event_id >= state.until:
        return str(LagCause.HELD_BACK)
    return "active"


_PROGRESS: Final[dict[str, Column]] = {
    "partition": partition_of,
    "offset": "last_event_id",
    "consumed": "consumed_events",
    "last consumed (UTC)": "last_consumption_at",
    "state": condition,
}

_FAILURES: Final[dict[str, Column]] = {
    "leased by": "lease_owner",
    "failing event": "failed_event_id",
    "failure": "failure",
}

_JSON: Final[dict[str, Column]] = {
    "topic": "topic",
    "consumer": "name",
    "partition": "partition",
    "offset": "last_event_id",
    "consumed_events": "consumed_events",
    "last_consumption_at": "last_consumption_at",
    "state": condition,
    "paused": "paused",
    "max_attempts": "max_attempts",
    "lease_owner": "lease_owner",
    "lease_expires_at": "lease_expires_at",
    "failed_event_id": "failed_event_id",
    "attempts": "attempts",
    "failure": "failure",
    "retry_at": "retry_at",
    "filter": lambda state: None if state.filter is None else state.filter.as_json(),
}


@consumer.command()
@topic_argument
@consumer_argument
@json_option
@pass_context
def describe(context: CliContext, *, topic: str, consumer: str, as_json: bool) -> None:
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


@consumer.command()
@topic_argument
@consumer_argument
@pass_context
def delete(context: CliContext, *, topic: str, consumer: str) -> None:
    """Delete CONSUMER of TOPIC with its offsets; the events stay."""
    with context.definitions() as platform:
        platform.registry.unregister_consumer(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} deleted")


@consumer.command()
@topic_argument
@consumer_argument
@pass_context
def pause(context: CliContext, *, topic: str, consumer: str) -> None:
    """Pause CONSUMER until it is resumed. A batch that is under way is finished."""
    with context.platform() as platform:
        platform.registry.pause(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} paused")


@consumer.command()
@topic_argument
@consumer_argument
@pass_context
def resume(context: CliContext, *, topic: str, consumer: str) -> None:
    """Resume CONSUMER, and retry an event that blocks it."""
    with context.platform() as platform:
        platform.registry.resume(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} resumed")
