"""What processes of the tests of shards do; each is killed at some point."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from eventsql_orchestration import Event, EventSQL, Publication
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import EventSQLError, WrongShardError
from eventsql_orchestration.sharded import ShardedEventSQL
from eventsql_orchestration.sharded.addition import ShardAddition

KEYS = [f"key {number}" for number in range(24)]


def start(role: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process that plays a role, forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.shards.adding"])
    process = context.Process(target=role, args=arguments, daemon=True)
    process.start()
    return process


def add_shard(old: list[str], new: str, dies_after: str | None = None) -> None:
    """Add a shard; die for good, by SIGKILL, right after a step of which `dies_after` is a part."""

    def on_step(step: str) -> None:
        if dies_after is not None and dies_after in step:
            os.kill(os.getpid(), signal.SIGKILL)

    platforms = [EventSQL(dsn, transfer=False) for dsn in (*old, new)]
    ShardAddition(platforms[:-1], platforms[-1], on_step=on_step).execute()
    for platform in platforms:
        platform.close()


def publish(dsns: list[str], name: str, events: int, seed: int) -> None:
    """Publish numbered events of some keys, each with the note of its number, in one transaction on the key's shard.

    The second half of each key's events comes after the first shard was fenced.
    """
    chance = random.Random(seed)
    platform = EventSQL(*dsns, shard_timeout=60.0)
    assert isinstance(platform, ShardedEventSQL)
    left = {key: range(done(platform, f"{name} {key}"), events) for key in KEYS}
    begun = False
    while any(left.values()):
        open_to = events if begun else events // 2
        keys = [key for key, numbers in left.items() if numbers and numbers[0] < open_to]
        if not keys:
            begun = has_begun(platform)
            continue
        key = chance.choice(keys)
        number, own = left[key][0], f"{name} {key}"
        event = Publication("orders", b"%d" % number, key=own)
        try:
            with platform.shard_of(own).database.transaction() as connection:
                platform.publisher.publish(event, connection=connection)
                connection.execute("INSERT INTO noted (key, number) VALUES (%s, %s)", [own, number])
        except WrongShardError:
            # It was told; it asks again which shard it is.
            continue
        left[key] = left[key][1:]
    platform.close()


def has_begun(platform: EventSQL) -> bool:
    """Whether a shard that is added is known to the first that was there."""
    time.sleep(0.01)
    with platform.shards[0].database.connection() as connection:
        row = connection.execute("SELECT max(eql_generation) FROM eventsql.shard_layout").fetchone()
    return row is not None and int(row[0]) > 1


def done(platform: EventSQL, key: str) -> int:
    """How many events of a key were published, wherever it lived at the time."""
    counts = []
    for shard in platform.shards:
        with shard.database.connection() as connection:
            counts.append(connection.execute("SELECT count(*) FROM noted WHERE key = %s", [key]).fetchone())
    return sum(row[0] for row in counts if row is not None)


def note_effect(event: Event, connection: Connection) -> None:
    connection.execute(
        "INSERT INTO effect (key, number, at) VALUES (%s, %s, clock_timestamp())", [event.key, int(event.value)]
    )


def consume(dsns: list[str]) -> None:
    """Consume, with each event's effect in the database of its shard, until the end of the process."""
    platform = EventSQL(*dsns)
    platform.consumers.start("orders", "ledger", note_effect, polling_delay=0.05)
    threading.Event().wait()


def transfer(dsns: list[str]) -> None:
    """Transfer until the end of the process."""
    while True:
        try:
            EventSQL(*dsns).transfer.run(threading.Event(), polling_delay=0.02)
        except EventSQLError:
            continue
