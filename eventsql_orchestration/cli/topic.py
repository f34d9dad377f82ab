"""`eventsql topic`: the topics of the registry. `topic_upkeep.py` has the commands that take care of their logs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

import click

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.capture import say_idle
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say, say_plan, write_json
from eventsql_orchestration.cli.parameters import (
    POSITIVE,
    SIZE,
    AsJson,
    TopicName,
    TopicNames,
    command,
    executing,
    option,
)
from eventsql_orchestration.cli.tables import Columns, show_list, without
from eventsql_orchestration.cli.topic_output import STATISTICS, TOPIC, description, form, statistics
from eventsql_orchestration.cli.topic_upkeep import compact, erase, erasures, retain
from eventsql_orchestration.errors import TopicNotFoundError
from eventsql_orchestration.model import (
    COMPRESSIONS,
    NOT_PARTITIONED,
    STORAGES,
    UNCOMPRESSED,
    Compression,
    Retention,
    Storage,
    Topic,
    check_partitions,
)
from eventsql_orchestration.orchestration.words import kept
from eventsql_orchestration.topics.side_consumers import backfill_of
from eventsql_orchestration.validation import counted

if TYPE_CHECKING:
    from eventsql_orchestration.capture import Capture
    from eventsql_orchestration.client.eventsql import EventSQL


class _Retention(TypedDict):
    retention_age: Annotated[timedelta | None, option("Keep events for 7d, 12h, PT36H.")]
    retention_size: Annotated[int | None, option("Keep the newest 10GiB, 500MB.", type=SIZE, metavar="SIZE")]
    retention_events: Annotated[int | None, option("Keep the newest N events.", type=POSITIVE)]
    keep_forever: Annotated[bool, option("Keep all events: remove the bounds.")]


def _bounds(**given: Unpack[_Retention]) -> dict[str, Any]:
    """The bounds of retention that options name: with --keep-forever, each of them is None.

    Raises `ValidationError`, and `click.UsageError` if options contradict each other.
    """
    age = given["retention_age"]
    seconds = None if age is None else age.total_seconds()
    bounds: dict[str, Any] = {"seconds": seconds, "bytes": given["retention_size"], "events": given["retention_events"]}
    named = {name: bound for name, bound in bounds.items() if bound is not None}
    if given["keep_forever"] and named:
        raise click.UsageError("--keep-forever contradicts the bounds of retention")
    Retention(**named)
    return bounds if given["keep_forever"] else named


@click.group()
def topic() -> None:
    """Create, list, describe, alter and delete topics, drop events by retention, and erase the events of a key."""


@command(topic)
def create(
    context: CliContext,
    topic: TopicName,
    *,
    partitions: Annotated[
        int,
        option("1 to 32767; without it, the topic is not partitioned.", default=NOT_PARTITIONED, show_default=False),
    ],
    storage: Annotated[
        Storage | None,
        option(
            "The form of its log: blocks, or rows for a topic that EventSQL's Java library shares  [default: blocks].",
            type=click.Choice(STORAGES),
        ),
    ],
    compression: Annotated[
        Compression | None,
        option("How its blocks are compressed  [default: lz4 if the server has it].", type=click.Choice(COMPRESSIONS)),
    ],
    dead_letters: Annotated[bool, option("Also create TOPIC_dlt for the events that its consumers give up.")],
    **retention: Unpack[_Retention],
) -> None:
    """Create TOPIC, or change it.

    A topic that exists gets the bounds of retention that options name. If it has no events and no consumers, it also
    gets the number of partitions. Its form stays: `eventsql topic alter --storage` changes it.
    """
    wanted, bounds = Topic(topic, partitions, storage=storage, compression=compression), _bounds(**retention)
    letters = Topic(wanted.dead_letter_topic) if dead_letters else None
    with context.whole() as platform:
        context.make_tables(platform)
        _register(platform, wanted, bounds)
        if letters is not None:
            before = _find(platform, letters.name)
            if before is None:
                platform.registry.register_topic(letters)
            done = "created" if before is None else "exists already"
            say(f"topic {letters.name!r} {done}, {form(before or letters)}")


@command(topic)
def alter(
    context: CliContext,
    topic: TopicName,
    partitions: Annotated[int | None, option("1 to 32767, or -1 for none.")],
    storage: Annotated[
        Storage | None, option("The form of its new events: see `eventsql topic create`.", type=click.Choice(STORAGES))
    ],
    compression: Annotated[
        Compression | None, option("How its new blocks are compressed.", type=click.Choice(COMPRESSIONS))
    ],
    **retention: Unpack[_Retention],
) -> None:
    """Change the partitions, the form, the compression or the retention of TOPIC.

    The number of partitions of a partitioned topic can change while publishers and consumers go on. Every consumer
    finishes the old partitions before it begins with the new partitions, so that keys stay in their order. `eventsql
    topic describe` shows consumers that have not finished. With another form, its present events stay as they are, and
    publishers and consumers go on; programs that write to its table themselves are refused. Retention drops whole old
    segments of the log, and keeps segments that a consumer has not passed.
    """
    bounds = _bounds(**retention)
    if partitions is not None:
        check_partitions(partitions)
    elif not bounds and storage is None and compression is None:
        raise click.UsageError(
            "nothing to alter: give --partitions, --storage, --compression, a bound of retention or --keep-forever"
        )
    with context.whole() as platform:
        found = platform.registry.topic(topic)
        if compression is not None:
            _compress(platform, topic, compression)
        if storage is not None:
            _store(platform, topic, storage)
        if partitions is not None and found.partitioned and partitions != NOT_PARTITIONED:
            _repartition(platform, topic, partitions)
            partitions = None
        if partitions is not None or bounds:
            found = platform.registry.topic(topic)
            _register(platform, found if partitions is None else replace(found, partitions=partitions), bounds)


def _store(platform: EventSQL, topic: str, storage: Storage) -> None:
    if platform.registry.set_storage(topic, storage):
        say(f"new events of topic {topic!r} are stored in {storage} now; its present events stay as they are")
    else:
        say(f"new events of topic {topic!r} are stored in {storage} already")


def _compress(platform: EventSQL, topic: str, compression: Compression) -> None:
    way = "not compressed" if compression == UNCOMPRESSED else f"compressed by {compression}"
    if platform.registry.set_compression(topic, compression):
        say(f"new blocks of topic {topic!r} are {way} now; its present blocks stay as they are until they are merged")
    else:
        say(f"new blocks of topic {topic!r} are {way} already")


def _repartition(platform: EventSQL, topic: str, partitions: int) -> None:
    changed = platform.repartitioner.repartition(topic, partitions)
    if changed is None:
        say(f"topic {topic!r} has {counted(partitions, 'partition')} already")
        return
    # Each shard has its own offsets: `topic describe` shows them.
    after = f" after offset {changed.after:,}" if len(platform.shards) == 1 else " on every shard"
    say(f"topic {topic!r} has {counted(partitions, 'partition')}{after}; it had {changed.before:,}")
    if waiting := {name for shard in platform.shards for name in shard.layouts.unsettled(topic)}:
        say(
            f"consumers that finish the old partitions first: {', '.join(sorted(waiting))}; sensors and deployments "
            "that name partitions need the new number"
        )


def _register(platform: EventSQL, wanted: Topic, bounds: dict[str, Any]) -> None:
    before = _find(platform, wanted.name)
    retention = (None if before is None else before.retention) or Retention()
    platform.registry.register_topic(replace(wanted, retention=replace(retention, **bounds) if bounds else None))
    after = platform.registry.topic(wanted.name)
    if before is None:
        say(f"topic {after.name!r} created, {form(after)}")
    elif form(before) == form(after):
        say(f"topic {after.name!r} exists already, {form(after)}")
    else:
        for_ever = ", kept: for ever" if before.retention is not None and after.retention is None else ""
        say(f"topic {after.name!r} is changed: {form(after)}{for_ever}; it was: {form(before)}")


def _find(platform: EventSQL, name: str) -> Topic | None:
    try:
        return platform.registry.topic(name)
    except TopicNotFoundError:
        return None


@command(topic, "list")
def list_topics(context: CliContext, as_json: AsJson) -> None:
    """List the topics."""
    with context.platform() as platform:
        topics = platform.registry.topics()
    table: Columns = {
        "topic": "name", "partitions": lambda each: each.partitions if each.partitioned else None,
        "created": "created_at", "kept": lambda each: kept(each.retention),
    }  # fmt: skip
    context.show_items(topics, as_json=as_json, json=TOPIC, table=table)


@command(topic)
def describe(context: CliContext, topic: TopicName, as_json: AsJson) -> None:
    """Show TOPIC: its partitions, their events, and its consumers."""
    with context.platform() as platform:
        described = description(platform, topic)
    if as_json:
        write_json(described.as_json(context))
    else:
        described.show()


@command(topic)
def stats(context: CliContext, topics: TopicNames, as_json: AsJson) -> None:
    """Show the size and the rates of each TOPIC, or of all topics.

    Rates are events per second that entered the log in the last minute, hour and day. They and the size of an event are
    taken from offsets, without a scan, and an offset that was never used counts as an event. Buffered events wait for
    the transfer.
    """
    with context.platform() as platform:
        found = statistics(platform, topics)
    show_list(
        found,
        STATISTICS,
        as_json=as_json,
        json=lambda each: {**context.on_shard(each.shard), **without(each, "shard")},
        spare=("partitions", "bytes/event", "events/s, 1d", "events/s, 1h"),
    )


@command(topic)
def delete(
    context: CliContext, topic: TopicName, execute: Annotated[bool, executing("Delete it")],
    force: Annotated[bool, option("Delete it even with events, consumers or captured tables.")],
) -> None:  # fmt: skip
    """Delete TOPIC: a plan and, with --execute, the deletion.

    If it has events, consumers or captured tables, this needs --force.
    """
    with context.whole() as platform:
        if execute:
            platform.registry.unregister_topic(topic, force=force)
            say(f"topic {topic!r} deleted")
            for shard in platform.members():
                say_idle(each for each in lazy.Captures(shard).idle_triggers() if each[1] == topic)
            return
        events = sum(each.events + each.buffered for each in statistics(platform, [topic]))
        names = {state.name for state in platform.registry.consumers(topic)}
        captured = {each.table for each in _captures(platform) if each.topic == topic}
    # The windows of backfills are consumers of many names.
    held = [
        f"about {counted(events, 'event')}",
        *(f"consumer {name!r}" for name in sorted(names) if backfill_of(name) is None),
        *(f"the capture of table {table}" for table in sorted(captured)),
    ]
    needed = "--execute --force" if events or names or captured else "--execute"
    say_plan(f"topic {topic!r} would be deleted with {', '.join(held)}", needed)


def _captures(platform: EventSQL) -> list[Capture]:
    shards = [shard for shard in platform.members() if shard.down is None]
    return [each for shard in shards for each in lazy.Captures(shard).list()]


for _command in (erase, erasures, compact, retain):
    topic.add_command(_command)
