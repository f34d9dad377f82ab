"""The processes of the tests: each waits at a certain place until it is told to go on, or is killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Wire

from eventsql_orchestration import Consumer, Event, EventSQL, Topic
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.store import RecordedChange, Store

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
    with (
        connection.cursor() as cursor,
        cursor.copy("COPY effects (consumer, partition, key, event_id, value) FROM STDIN") as copy,
    ):
        for event in events:
            copy.write_row((consumer, event.partition, event.key, event.id, event.value))


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


def hold_subscription(dsn: str, after: str) -> None:
    """Run a subscription, and stay for ever inside its batch, behind `after` changes."""
    done = 0

    def handle(change: RecordedChange, connection: Connection) -> None:
        nonlocal done
        connection.execute("INSERT INTO public.effects (n) VALUES (%s)", [change.data["n"]])
        done += 1
        if done == int(after):
            say(f"in mid-batch after {done}")
            wait_to_be_told()

    Store(Database(dsn)).subscribe("mailer", handle, background=False).run_once()


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


def hold_leased(dsn: str, topic: str, consumer: str, lease: str, where: str) -> None:
    """Consume under a lease, and stay for ever at work on the events, or `where` they are about to be committed."""

    def handle(events: Sequence[Event], lease: Lease) -> None:
        if where == "at work":
            say(f"at work on {len(events)} events")
            wait_to_be_told()
        try:
            with lease.transaction() as connection:
                record(events, connection, consumer)
                if where == "committing":
                    say(f"committing {len(events)} events")
                    wait_to_be_told()
        except ClaimLostError as error:
            say(f"lost: {error}")
            raise

    with EventSQL(dsn, transfer=False) as platform:
        platform.consumers.start_leased(topic, consumer, handle, lease=float(lease), polling_delay=0.02)
        wait_to_be_told()


def hold_delivery(dsn: str, topic: str, consumer: str, lease: str) -> None:
    """Consume a topic as a queue, and stay for ever at work on each event."""

    def handle(_event: Event) -> None:
        say("at work")
        wait_to_be_told()

    with EventSQL(dsn, transfer=False) as platform:
        platform.consumers.start_queue(topic, consumer, handle, lease=float(lease), polling_delay=0.02)
        wait_to_be_told()


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


def consume(dsn: str, consumer: str) -> None:
    """Consume with the threads of `start_batch`, until told to end."""
    with EventSQL(dsn, transfer=False) as platform:
        platform.consumers.start_batch(
            "orders",
            consumer,
            lambda events, connection: record(events, connection, consumer),
            max_events=40,
            polling_delay=0.02,
        )
        wait_to_be_told()


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role
    for role in (hold, hold_subscription, hold_claim, hold_leased, hold_delivery, migrate, register, consume)
}


def attach(wire: Wire[str, str]) -> None:
    """Have this process hear its test, and tell it."""
    _wires.append(wire)


def play(wire: Wire[str, str], role: str, dsn: str, *arguments: str) -> None:
    """The whole life of a process."""
    attach(wire)
    ROLES[role](dsn, *arguments)
