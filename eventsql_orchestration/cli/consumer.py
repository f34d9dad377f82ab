"""`eventsql consumer`: the consumers of the registry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import partition_name, say, show_fields, show_table, write_json
from eventsql_orchestration.cli.parameters import (
    LogPlace,
    NameValue,
    consumer_argument,
    json_option,
    optional_topic_argument,
    topic_argument,
)
from eventsql_orchestration.log.lag import LagCause
from eventsql_orchestration.log.positions import Earliest, Place
from eventsql_orchestration.log.registration import register_consumer
from eventsql_orchestration.model import EVERY_EVENT, Consumer, ConsumerState, EventFilter


@click.group()
def consumer() -> None:
    """Create, list, describe, pause, resume and delete consumers."""


@consumer.command()
@topic_argument
@consumer_argument
@click.option("--partitioned", is_flag=True, help="One offset for each partition of the topic, consumed side by side.")
@click.option(
    "--max-attempts",
    type=click.IntRange(min=1),
    metavar="N",
    help="How often an event is tried before it is given up  [default: 5, or as it was].",
)
@click.option(
    "--start",
    "--from",
    "start",
    type=LogPlace(),
    metavar="PLACE",
    help="Where a new consumer begins: earliest, latest, an offset, a time with its zone (2026-05-01T12:00:00Z), or "
    "how long ago that was (15m, 2h, 7d)  [default: earliest].",
)
@click.option("--key", "keys", multiple=True, metavar="K", help="Only events with this key; of several, any of them.")
@click.option("--key-prefix", metavar="P", help="Only events whose key begins so.")
@click.option(
    "--metadata",
    type=NameValue(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Only events whose metadata has this; of several, all of them.",
)
@click.option("--no-filter", is_flag=True, help="Every event, where the consumer had a filter.")
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
    """Create CONSUMER of TOPIC, or find it as it is. The offsets of one that exists stay: `eventsql seek` moves them.

    Its attempts and its filter change to those that are given; without any it keeps what it has. One that exists with
    --partitioned is not changed into one without it, nor the other way round.
    """
    conditions = _filter(keys, key_prefix, metadata)
    if conditions is not None and no_filter:
        raise click.UsageError("--no-filter contradicts --key, --key-prefix and --metadata")
    with context.definitions() as platform:
        platform.registry.topic(topic)
        registered = register_consumer(
            platform.registry,
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
        write_json([_object(context, state) for state in states])
        return
    several = any(state.shard is not None for state in states)
    show_table(
        [
            "topic", "consumer", *(["shard"] if several else []), "partition", "offset", "consumed",
            "last consumed (UTC)", "state", "filter",
        ],
        [
            (
                state.topic,
                state.name,
                *([state.shard] if several else []),
                partition_name(state.partition),
                state.last_event_id,
                state.consumed_events,
                state.last_consumption_at,
                condition(state),
                state.filter,
            )
            for state in states
        ],
    )  # fmt: skip


def condition(state: ConsumerState) -> str:
    """What a consumer partition is up to, in a word; `eventsql lag` says what one that is held back waits for."""
    if state.paused:
        return "paused"
    if state.failing:
        return "blocked" if state.spent else "retrying"
    if state.leased(datetime.now(UTC)):
        return "leased"
    if state.until is not None and state.last_event_id >= state.until:
        return str(LagCause.HELD_BACK)
    return "active"


def _object(context: CliContext, state: ConsumerState) -> dict[str, Any]:
    return {
        **context.on_shard(state.shard),
        "topic": state.topic,
        "consumer": state.name,
        "partition": state.partition,
        "offset": state.last_event_id,
        "consumed_events": state.consumed_events,
        "last_consumption_at": state.last_consumption_at,
        "state": condition(state),
        "paused": state.paused,
        "max_attempts": state.max_attempts,
        "lease_owner": state.lease_owner,
        "lease_expires_at": state.lease_expires_at,
        "failed_event_id": state.failed_event_id,
        "attempts": state.attempts,
        "failure": state.failure,
        "retry_at": state.retry_at,
        "filter": None if state.filter is None else state.filter.as_json(),
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
        write_json([_object(context, state) for state in states])
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
    several = any(state.shard is not None for state in states)
    show_table(
        [
            *(["shard"] if several else []), "partition", "offset", "consumed", "last consumed (UTC)", "state",
            "leased by", "failing event", "failure",
        ],
        [
            (
                *([state.shard] if several else []),
                partition_name(state.partition),
                state.last_event_id,
                state.consumed_events,
                state.last_consumption_at,
                condition(state),
                state.lease_owner,
                state.failed_event_id,
                state.failure,
            )
            for state in states
        ],
    )  # fmt: skip


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
    """Let no consumption of CONSUMER start until it is resumed; one that is under way goes on."""
    with context.platform() as platform:
        platform.registry.pause(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} paused")


@consumer.command()
@topic_argument
@consumer_argument
@pass_context
def resume(context: CliContext, *, topic: str, consumer: str) -> None:
    """End a pause of CONSUMER, and try an event that blocks it anew."""
    with context.platform() as platform:
        platform.registry.resume(topic, consumer)
    say(f"consumer {consumer!r} of topic {topic!r} resumed")
