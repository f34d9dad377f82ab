"""Where a write stages its events: one database, or each active shard when the write is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import ShardPendingError, ShardSetError, TopicNotFoundError
from eventsql_orchestration.model import Topic
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.sharding import pending
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.spark.encoder import Encoder
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import WriteTarget

PENDING_SECONDS: Final = 10.0
"""How long planning a write waits for a shard that is being added."""


def write_targets(
    shards: Mapping[str | None, Shard], topic: str | None, headers: Mapping[str, str]
) -> tuple[WriteTarget, ...]:
    """See `Publications.write_targets`. `shards` are by name, or by None for one database."""
    backoff = Backoff(PENDING_SECONDS)
    while True:
        topics = {name: _topics(shard, topic) for name, shard in shards.items()}
        try:
            names = _taking(topics, topic)
        except ShardPendingError:
            if not backoff.lasts():
                raise
        else:
            return tuple(_target(name, shards[name].database, topics[name], topic, headers) for name in names)


def _target(
    shard: str | None, database: Database, topics: Sequence[Topic], topic: str | None, headers: Mapping[str, str]
) -> WriteTarget:
    encoder = Encoder({each.name: each.partitions for each in topics}, topic, headers)
    source = Source(database.dsn, database.schema, str(database))
    return WriteTarget(source, encoder, {each.name: each.layout for each in topics}, shard)


def _topics(shard: Shard, name: str | None) -> list[Topic]:
    """All topics, or the topic of this name if it exists."""
    if name is None:
        return shard.registry.topics()
    with suppress(TopicNotFoundError):
        return [shard.registry.topic(name)]
    return []


def _taking(topics: Mapping[str | None, Sequence[Topic]], wanted: str | None) -> list[str | None]:
    """The shards that take events, by the shard sets of their topics; None for one database.

    Raises `TopicNotFoundError`, `ShardSetError`, `ShardPendingError`.
    """
    missing = TopicNotFoundError(
        f"option topic: topic {wanted!r} does not exist: create it with `eventsql topic create {wanted}`"
    )
    if None in topics:
        (alone,) = topics.values()
        if wanted is not None and not alone:
            raise missing
        shards = alone[0].shards if alone else None
        if shards is not None and len(shards.names) > 1:
            raise ShardSetError(
                f"option dsn: the database is shard {shards.own!r} of {len(shards.names)}, and a key may belong to "
                "another shard: give the URLs of all shards, with spaces between them"
            )
        return [None]
    sets = {name: of[0].shards for name, of in topics.items() if of}
    active = {name: shards for name, shards in sets.items() if shards is not None and shards.active}
    if not active:
        raise missing
    newest = max(active.values(), key=lambda shards: shards.generation)
    for name in newest.names:
        if name not in topics:
            raise ShardSetError(f"option dsn: no URL leads to shard {name!r} of the set: give the URLs of all shards")
        if name not in sets:
            raise missing
    for name in newest.names:
        if name not in active:
            raise pending(name)
        if active[name].generation != newest.generation:
            raise pending(", ".join(set(newest.names) - set(active[name].names)))
    return [name for name in topics if name in newest.names]
