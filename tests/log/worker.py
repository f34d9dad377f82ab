"""The processes of the tests: each publishes, transfers or consumes until it is told to end, or is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Wire

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import ClaimLostError, DatabaseError
from eventsql_orchestration.log import consumer as consumer_module
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.log.transfer import Transfer

_wires: list[Wire[str, str]] = []
"""To the test; one in each process."""


def say(line: str) -> None:
    _wires[0].send(line)


def wait_to_be_told() -> None:
    # Not told, it ends with the test.
    with suppress(EOFError):
        _wires[0].recv()


def record(events: Sequence[Event], connection: Connection, consumer: str) -> None:
    """The effects of a consumer: one row for each event."""
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO effects (consumer, partition, key, event_id, value) VALUES (%s, %s, %s, %s, %s)",
            [(consumer, event.partition, event.key, event.id, event.value) for event in events],
        )


def hold(dsn: str, topic: str, consumer: str, partition: str, after: str) -> None:
    """Consume a partition, and stay for ever inside the batch that comes after `after` batches."""
    done = 0

    def handle(events: Sequence[Event], connection: Connection) -> None:
        nonlocal done
        record(events, connection, consumer)
        if done == int(after):
            say(f"in mid-batch after {len(events)} events")
            wait_to_be_told()
        done += 1

    with EventSQL(dsn, transfer=False) as platform:
        while platform.consumers.consume_once(topic, consumer, handle, partition=int(partition), max_events=10):
            pass
    say("ended")


def hold_claim(dsn: str, claim_id: str, batch: str, lease: str) -> None:
    """Take over a claim, process it, and stay for ever inside its second batch."""
    done = 0

    def handle(events: Sequence[Event], connection: Connection) -> None:
        nonlocal done
        record(events, connection, "claims")
        if done == 1:
            say("in mid-batch")
            wait_to_be_told()
        done += 1

    with EventSQL(dsn, transfer=False) as platform:
        claim = platform.claims.adopt(int(claim_id), owner="process", lease=float(lease))
        try:
            platform.claims.process(claim, handle, batch=int(batch), lease=float(lease))
        except ClaimLostError as error:
            say(f"lost: {error}")


def migrate(dsn: str) -> None:
    """Bring the schema up to date when told to, at the same time as others."""
    with Database(dsn) as database:
        say("ready")
        wait_to_be_told()
        database.ensure_schema()
        say(str(database.revision()))


def register(dsn: str, partitions: str, topics: str) -> None:
    """Register topics and consumers when told to, at the same time as others."""
    with EventSQL(dsn, transfer=False) as platform:
        say("ready")
        wait_to_be_told()
        for number in range(int(topics)):
            name = f"topic_{number}"
            platform.registry.register_topic(Topic(name, int(partitions)))
            platform.registry.register_consumer(Consumer(name, "mailer", partitioned=True))
    say("registered")


def _until_told(work: Callable[[EventSQL], bool], platform: EventSQL) -> None:
    """Go on with the work through restarts of the server, until the input ends or there is nothing left to do."""
    told = threading.Event()

    def listen() -> None:
        wait_to_be_told()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    _through_restarts(lambda platform: not told.is_set() and work(platform), platform)


def _through_restarts(work: Callable[[EventSQL], bool], platform: EventSQL) -> None:
    while True:
        try:
            if not work(platform):
                return
        except (DatabaseError, ClaimLostError):
            time.sleep(0.05)


def publish(dsn: str, publisher: str, events: str, keys: str) -> None:
    """Publish numbered events over `keys` keys of its own, each number once whatever happens: an outbox.

    How far it came is committed with the events, so that its successor knows.
    """

    def work(platform: EventSQL) -> bool:
        with platform.database.transaction() as connection:
            row = connection.execute(
                "SELECT published FROM progress WHERE publisher = %s FOR UPDATE", (publisher,)
            ).fetchone()
            assert row is not None, "the test made it"
            published = int(row[0])
            # Now one, now many, by the number alone: a run is repeated from its seed.
            count = min((1, 7, 50)[published % 3], int(events) - published)
            publications = [
                Publication("orders", str(number).encode(), key=f"{publisher}-{number % int(keys)}")
                for number in range(published, published + count)
            ]
            if count == 1:
                platform.publisher.publish(publications[0], connection=connection)
            else:
                platform.publisher.publish_all(publications, connection=connection)
            connection.execute(
                "UPDATE progress SET published = %s WHERE publisher = %s", (published + count, publisher)
            )
        return published + count < int(events)

    with EventSQL(dsn, transfer=False) as platform:
        _until_told(work, platform)


def transfer(dsn: str, batch: str) -> None:
    """Move events, in small batches, until the input ends."""
    stop = threading.Event()
    with EventSQL(dsn, transfer=False) as platform:
        loop = threading.Thread(
            target=Transfer(platform.database, batch=int(batch)).run, args=(stop,), kwargs={"polling_delay": 0.02}
        )
        loop.start()
        wait_to_be_told()
        stop.set()
        loop.join()


def consume(dsn: str, consumer: str) -> None:
    """Consume with the threads of `start_batch`, until the input ends."""
    consumer_module.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people

    def start(platform: EventSQL) -> bool:
        platform.consumers.start_batch(
            "orders",
            consumer,
            lambda events, connection: record(events, connection, consumer),
            max_events=40,
            polling_delay=0.02,
        )
        wait_to_be_told()
        return False

    with EventSQL(dsn, transfer=False) as platform:
        # The server may be down while it starts.
        _through_restarts(start, platform)


def consume_claims(dsn: str, consumer: str, owner: str) -> None:
    """Consume every partition in turn by claims with short leases, until the input ends."""

    def work(platform: EventSQL) -> bool:
        found = False
        for state in platform.registry.consumer("orders", consumer):
            claim = platform.claims.claim("orders", consumer, state.partition, owner=owner, max_events=120, lease=1.0)
            if isinstance(claim, Claim):
                found = True
                adopted = platform.claims.adopt(claim.id, owner=owner, lease=1.0)
                platform.claims.process(adopted, lambda e, c: record(e, c, consumer), batch=40, lease=1.0)
        if not found:
            time.sleep(0.02)
        return True

    with EventSQL(dsn, transfer=False) as platform:
        _until_told(work, platform)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (hold, hold_claim, migrate, register, publish, transfer, consume, consume_claims)
}


def play(wire: Wire[str, str], role: str, dsn: str, *arguments: str) -> None:
    """The whole life of a process."""
    _wires.append(wire)
    ROLES[role](dsn, *arguments)
