"""The verdict on a fault run: faults of the logs, of the events that a reader saw, and of the effects."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, Shard
from eventsql_orchestration.topics.layouts import Layout
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests.log.numbered import TOPIC
from tests.log.playing import followed
from tests.shard_keys import shard_of_key

CONSUMERS: Final = {"consume": "mailer", "consume_leased": "ledger", "consume_claims": "fares"}
"""The consumer of each role; each role has two processes. The last consumer is not partitioned."""

QUEUE: Final = "pictures"
"""A consumer with `start_queue`, which keeps the order of keys and not that of partitions."""

AS_A_QUEUE: Final = {"consume_queue": QUEUE}
"""The consumer of a run where each event is a transaction of its own."""

Row: TypeAlias = tuple[str, int, int, int]
"""Key, number, partition and offset of an event."""


def check(
    platform: EventSQL, expected: Mapping[str, int], home: Path, consumers: Collection[str] = tuple(CONSUMERS.values())
) -> Iterator[str]:
    """The violations of a run; `expected` is how many events each key has."""
    generations = _generations(platform)
    of_keys: dict[str, list[tuple[int, list[int]]]] = {key: [] for key in expected}
    for shard in sorted(platform.shards, key=lambda each: _joined(generations, each.name or "")):
        name = shard.name or ""
        rows: dict[str, list[int]] = {}
        yield from (f"{name}: {violation}" for violation in _check_shard(shard, home, rows, consumers))
        for key, numbers in rows.items():
            of_keys.setdefault(key, []).append((_joined(generations, name), numbers))
            if not any(shard_of_key(key, sorted(names)) == name for names in generations):
                yield f"{name}: {key} never belonged to this shard"
    yield from wrong_keys(of_keys, expected)
    for consumer in consumers:
        yield from wrong_order(f"effects of {consumer}", _effects(platform.shards, consumer), expected)
    yield from (f"still held back: {each}" for each in platform.held_back())
    if buffered := platform.buffered():
        yield f"the buffer is not empty: {buffered}"


def moved(platform: EventSQL) -> int:
    """How many keys have events on more than one shard."""
    keys: Counter[str] = Counter()
    for shard in platform.shards:
        with shard.database.connection() as connection:
            rows = connection.execute("SELECT DISTINCT eql_key FROM eventsql.orders_event").fetchall()
        keys.update(key for (key,) in rows)
    return sum(count > 1 for count in keys.values())


def _generations(platform: EventSQL) -> list[frozenset[str]]:
    """The names of the shards, as often as they changed; a database alone has no name."""
    with platform.shards[0].database.connection() as connection:
        rows = connection.execute("SELECT eql_shards FROM eventsql.shard_layout ORDER BY eql_generation").fetchall()
    return [frozenset(names) for (names,) in rows] or [frozenset([""])]


def _joined(generations: Sequence[frozenset[str]], name: str) -> int:
    return next(number for number, names in enumerate(generations) if name in names)


def _check_shard(shard: Shard, home: Path, rows: dict[str, list[int]], consumers: Collection[str]) -> Iterator[str]:
    """The violations on one shard; `rows` gets the numbers in its log, by key."""
    log: dict[int, array[int]] = {}
    strays: list[str] = []
    for key, number, _, _ in _log_of(shard, log, strays):
        rows.setdefault(key, []).append(number)
    yield from strays

    seen = array("q")
    seen.frombytes(followed(home, shard.name).read_bytes())
    yield from difference("the reader", seen, log[NOT_PARTITIONED])

    for consumer in consumers:
        yield from _check_offsets(shard, consumer, log)

    with shard.database.connection() as connection:
        noted = connection.execute(
            "SELECT key, array_agg(convert_from(value, 'UTF8')::int ORDER BY convert_from(value, 'UTF8')::int) "
            "FROM noted GROUP BY key"
        ).fetchall()
    if dict(noted) != {key: numbers for key, numbers in rows.items() if key.startswith("outbox")}:
        yield "the outbox noted other events than it published"


def _log_of(shard: Shard, log: dict[int, array[int]], strays: list[str]) -> Iterator[Row]:
    """The rows of one database's log; their offsets are put into `log`, by partition and all together.

    Those that lie in another partition than their key's are named in `strays`.
    """
    layouts = shard.layouts.of(TOPIC)
    partitions = shard.registry.topic(TOPIC).partitions
    log[NOT_PARTITIONED] = array("q")
    for event in itertools.chain.from_iterable(shard.reader.stream(TOPIC, batch=20_000)):
        log[NOT_PARTITIONED].append(event.id)
        log.setdefault(event.partition, array("q")).append(event.id)
        key = event.key or ""
        if event.partition != (home := partition_of_key(key, _partitions_at(layouts, event.id) or partitions)):
            strays.append(f"the log: {key} at offset {event.id} is in partition {event.partition} instead of {home}")
        yield key, int(event.value), event.partition, event.id


def _check_offsets(shard: Shard, consumer: str, log: Mapping[int, array[int]]) -> Iterator[str]:
    """The events of one database's log that have no effect there, or more than one, or do not count as consumed."""
    states = {state.partition: state for state in shard.registry.consumer(TOPIC, consumer)}
    whole = NOT_PARTITIONED in states
    kept = whole or not shard.layouts.of(TOPIC)
    handled: dict[int, array[int]] = {partition: array("q") for partition in (states if kept else log)}
    for _, _, (_, _, partition, offset) in _effects_on(0, shard, consumer):
        handled[NOT_PARTITIONED if whole else partition].append(offset)
    for partition in handled.keys() - ({NOT_PARTITIONED} - states.keys()):
        own = log.get(partition, array("q"))
        if consumer == QUEUE:
            handled[partition] = array("q", sorted(handled[partition]))
        yield from difference(f"effects of {consumer}[{partition}]", handled[partition], own)
    for partition, state in states.items():
        if not kept:
            # Of the partitions that come and go, what was counted goes with them.
            if state.until is not None:
                yield f"{consumer}[{partition}] waits at offset {state.until} for the next layout"
            continue
        own = log.get(partition, array("q"))
        if state.last_event_id != (own[-1] if own else 0):
            yield f"{consumer}[{partition}] is at offset {state.last_event_id}, its log ends at {own[-1] if own else 0}"
        if state.consumed_events != len(own):
            yield f"{consumer}[{partition}] has counted {state.consumed_events} events, its log has {len(own)}"
    for lag in shard.lag(TOPIC):
        if lag.consumer == consumer and (lag.events or lag.seconds):
            yield f"{consumer}[{lag.partition}] has a lag of {lag.events} events and {lag.seconds:.1f} s"


def _partitions_at(layouts: Sequence[Layout], offset: int) -> int:
    """How many partitions the topic had at an offset; 0 where they never changed."""
    return next((layout.partitions for layout in reversed(layouts) if layout.after < offset), 0)


def wrong_keys(of_keys: Mapping[str, list[tuple[int, list[int]]]], expected: Mapping[str, int]) -> Iterator[str]:
    """Each key's events lie on its shards one after the other, from the oldest shard to the newest."""
    for key, parts in of_keys.items():
        numbers = [number for _, part in parts for number in part]
        if numbers != list(range(expected.get(key, 0))):
            lie = "; ".join(f"generation {joined + 1}: {part[0]} to {part[-1]}" for joined, part in parts)
            yield f"the logs: {key} has {len(numbers)} of {expected.get(key)} events, or out of order: {lie}"


def wrong_order(where: str, rows: Iterable[Row], expected: Mapping[str, int]) -> Iterator[str]:
    """Numbers of a key that are missing, come again, or come too early; `expected` is how many each key has."""
    counts = dict.fromkeys(expected, 0)
    for key, number, _, offset in rows:
        if (due := counts.get(key)) is None:
            yield f"{where}: nobody publishes key {key!r}, which is at offset {offset}"
            continue
        if number < due:
            yield f"{where}: number {number} of {key} comes again or late, at offset {offset}, after {due - 1}"
            continue
        if number > due:
            yield f"{where}: number {number} of {key} at offset {offset} comes before {due}, or {due} is lost"
        counts[key] = number + 1
    for key, count in counts.items():
        if count != expected[key]:
            yield f"{where}: {key} ends with {count} of {expected[key]} events"


def difference(where: str, seen: array[int], log: array[int]) -> Iterator[str]:
    """Where offsets that were seen first differ from those of the log."""
    if seen == log:
        return
    for place, (theirs, ours) in enumerate(itertools.zip_longest(seen, log)):
        if theirs != ours:
            counts = f"{len(seen)} were seen of {len(log)}"
            yield f"{where}: at place {place} is offset {theirs}, in the log {ours}; {counts}"
            return


def _effects(shards: Sequence[Shard], consumer: str) -> Iterator[Row]:
    """The effects of all shards in the order in which they came: one machine, one clock."""
    merged = heapq.merge(*(_effects_on(place, shard, consumer) for place, shard in enumerate(shards)))
    return (row for _, _, row in merged)


def _effects_on(place: int, shard: Shard, consumer: str) -> Iterator[tuple[float, int, Row]]:
    """The effects on one shard in their order, each with its time and the shard's place."""
    with shard.database.transaction() as connection, connection.cursor("effects") as cursor:
        cursor.itersize = 20_000
        cursor.execute(
            "SELECT extract(epoch FROM at)::float8, key, convert_from(value, 'UTF8')::bigint, partition, event_id "
            "FROM effects WHERE consumer = %s ORDER BY at, id",
            (consumer,),
        )
        for at, *row in cursor:
            yield at, place, (row[0], row[1], row[2], row[3])
