"""The processes of the tests: each publishes, transfers or consumes until it is told to end, or is killed."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Wire
from pathlib import Path
from typing import Final
from urllib.parse import quote

from eventsql_orchestration import BufferedPublisher, Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.consuming import worker_pool
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import ClaimLostError, DatabaseError, RedefinitionError
from eventsql_orchestration.publishing.transfer import Transfer

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
        except (DatabaseError, ClaimLostError, RedefinitionError):
            time.sleep(0.05)


class Progress:
    """How far the publishers of a fault run know themselves to be: a file that outlives their processes and the server.

    For each it holds how many events it is to publish, of how many keys, how many are acknowledged, and an offset which
    every later one comes after.
    """

    _SLOT: Final = struct.Struct("<qqqq")

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)

    def create(self, publishers: Sequence[tuple[int, int]]) -> None:
        """Begin, with the events and the keys of each publisher."""
        for slot, (total, keys) in enumerate(publishers):
            self._write(slot, total, keys, 0, 0)

    def _write(self, slot: int, *values: int) -> None:
        os.pwrite(self._file, self._SLOT.pack(*values), slot * self._SLOT.size)

    def all(self) -> list[tuple[int, int, int, int]]:
        """Events, keys, acknowledged events and offset of each."""
        return list(self._SLOT.iter_unpack(os.pread(self._file, 1_000 * self._SLOT.size, 0)))

    def acknowledge(self, slot: int, published: int, after: int) -> None:
        total, keys, _, _ = self.all()[slot]
        self._write(slot, total, keys, published, after)

    def far_ahead(self, slot: int) -> bool:
        """Whether this one should let the others catch up, so that there are publishers of every kind to the end."""
        shares = [published / total for total, _, published, _ in self.all()]
        return shares[slot] > min(shares) + 0.02

    def close(self) -> None:
        os.close(self._file)


class RolledBackError(Exception):
    """Ends a transaction that is not to be. psycopg's own gets through where its connection has broken meanwhile."""


class NumberedPublisher:
    """Publishes numbered events of keys of its own, each number once and in order, whatever is killed meanwhile.

    Event `n` is number `n // keys` of key `n % keys`. Where it is not known what became of a publication, the publisher
    looks which of its numbers are in the log or in the buffer before it goes on. A publication that was cut off is
    decided by then: the sessions of those who had this role before have ended.
    """

    LOOK: Final = 20
    """How many acknowledged publications go by before the offset that the next ones come after is noted anew."""

    def __init__(self, name: str, slot: int, progress: Progress, seed: str) -> None:
        self._kind = name.partition(" ")[0]
        self._name = name
        self._slot = slot
        self._progress = progress
        self._seed = seed
        self._total, self._keys, self._next, self._after = progress.all()[slot]
        self._found: set[int] = set()
        self._sure = False
        self._since_look = 0
        self._rolled_back = False
        self._buffered: BufferedPublisher | None = None

    @property
    def session(self) -> str:
        """How the database knows the sessions of this process."""
        return f"{self._name} {os.getpid()}"

    def work(self, platform: EventSQL) -> bool:
        """Publish one batch; False when all is published."""
        if not self._sure:
            self._find_out(platform)
        if self._next >= self._total:
            return False
        if self._progress.far_ahead(self._slot):
            time.sleep(0.002)
            return True
        drawn = random.Random(f"{self._seed} {self._name} {self._next}")
        upto = min(self._total, self._next + self._size(drawn))
        numbers = [n for n in range(self._next, upto) if n not in self._found]
        self._sure = False
        committed = self._publish(platform, drawn, [self._publication(n) for n in numbers], upto)
        self._sure = True
        if committed:
            self._acknowledge(platform, upto)
        return self._next < self._total

    def _size(self, drawn: random.Random) -> int:
        match self._kind:
            case "single":
                return 1
            case "small":
                return drawn.randint(2, 49)
            case "straight":
                return drawn.randint(50, 1_000)
            case "outbox":
                return drawn.choice((1, 3, 20, 200))
        # Each key once: events that share a key and are on their way together may come to be in another order, where
        # the first of them fails and its publisher gives it again.
        return self._keys - self._next % self._keys

    def _publication(self, number: int) -> Publication:
        return Publication("orders", b"%d" % (number // self._keys), key=f"{self._name}-{number % self._keys}")

    def _publish(self, platform: EventSQL, drawn: random.Random, publications: list[Publication], upto: int) -> bool:
        match self._kind:
            case "outbox":
                return self._publish_with_order(platform, drawn, publications, upto)
            case "buffered":
                self._publish_buffered(platform, publications)
            case "single":
                for publication in publications:
                    platform.publisher.publish(publication)
            case _:
                platform.publisher.publish_all(publications)
        return True

    def _publish_with_order(
        self, platform: EventSQL, drawn: random.Random, publications: list[Publication], upto: int
    ) -> bool:
        """In a transaction with what the events tell of; one in four is rolled back, and False."""
        # A transaction that was rolled back is tried again, and then commits.
        commits = self._rolled_back or drawn.random() < 0.75
        self._rolled_back = not commits
        try:
            self._publish_in_transaction(platform, drawn, publications, upto, commits=commits)
        except RolledBackError:
            return False
        return True

    def _publish_in_transaction(
        self, platform: EventSQL, drawn: random.Random, publications: list[Publication], upto: int, *, commits: bool
    ) -> None:
        with platform.database.transaction() as connection:
            connection.execute(
                "UPDATE outbox SET published = %s WHERE publisher = %s AND published <= %s",
                (upto, self._name, self._next),
            )
            half = drawn.randrange(len(publications) + 1) if publications else 0
            for publication in publications[:half][:20]:
                platform.publisher.publish(publication, connection=connection)
            # Others publish and commit meanwhile, with ids after those that this one has drawn.
            time.sleep(drawn.choice((0.0, 0.0, 0.002, 0.02)))
            platform.publisher.publish_all(publications[min(half, 20) :], connection=connection)
            if not commits:
                raise RolledBackError

    def _publish_buffered(self, platform: EventSQL, publications: list[Publication]) -> None:
        if self._buffered is None:
            # Flushes of both paths: fewer than fifty events go to the buffer.
            self._buffered = platform.buffered_publisher(max_events=80, max_age=0.002)
        try:
            given = [self._buffered.publish(publication) for publication in publications]
        finally:
            self._buffered.flush()
        for future in given:
            future.result()

    def _acknowledge(self, platform: EventSQL, upto: int) -> None:
        self._next = upto
        self._found = {number for number in self._found if number >= upto}
        self._progress.acknowledge(self._slot, self._next, self._after)
        self._since_look += 1
        if self._since_look >= self.LOOK and not self._found:
            self._since_look = 0
            self._after = platform.reader.end("orders")
            self._progress.acknowledge(self._slot, self._next, self._after)

    def _find_out(self, platform: EventSQL) -> None:
        with platform.database.connection() as connection:
            self._await_those_before(connection)
            if self._kind == "outbox":
                row = connection.execute("SELECT published FROM outbox WHERE publisher = %s", (self._name,)).fetchone()
                assert row is not None, "the run made it"
                # What was acknowledged and is gone is not published again: it is missed in the end.
                self._next = max(self._next, row[0])
            else:
                self._found = {number for number in self._published(connection) if number >= self._next}
        while self._next in self._found:
            self._next += 1
        self._progress.acknowledge(self._slot, self._next, self._after)
        self._sure = True

    def _await_those_before(self, connection: Connection) -> None:
        """Wait until the sessions of those who had this role before have ended."""
        while connection.execute(
            "SELECT 1 FROM pg_stat_activity WHERE starts_with(application_name, %s) AND application_name <> %s",
            (f"{self._name} ", self.session),
        ).fetchone():
            time.sleep(0.005)

    def _published(self, connection: Connection) -> Iterator[int]:
        """The numbers that lie in the buffer or, looked at after it, in the log."""
        buffer = "eventsql.event_buffer WHERE eql_topic = 'orders'"
        log = "eventsql.orders_event WHERE eql_id > %(after)s"
        for part in (buffer, log):
            statement = f"SELECT eql_key, eql_value FROM {part} AND starts_with(eql_key, %(keys)s)"
            for key, value in connection.execute(statement, {"keys": f"{self._name}-", "after": self._after}):
                yield int(value) * self._keys + int(key.rpartition("-")[2])


def publish(dsn: str, name: str, slot: str, progress: str, seed: str) -> None:
    """Publish numbered events in the way that the name begins with."""
    publisher = NumberedPublisher(name, int(slot), Progress(Path(progress)), seed)
    # Those who publish single events transfer too, as a program does that is told nothing else.
    named = f"{dsn}?application_name={quote(publisher.session)}"
    with EventSQL(named, transfer=name.startswith("single")) as platform:
        _until_told(publisher.work, platform)


def follow(dsn: str, path: str) -> None:
    """Write down the offsets of the log in the order in which they are seen, each after the last."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    seen = os.fstat(file).st_size // 8 * 8
    os.ftruncate(file, seen)
    last = array("q", os.pread(file, 8, seen - 8))[0] if seen else 0

    def work(platform: EventSQL) -> bool:
        nonlocal last
        ids = array("q", (event.id for event in platform.reader.read("orders", after=last, limit=2_000)))
        if ids:
            os.write(file, ids.tobytes())
            last = ids[-1]
        else:
            time.sleep(0.002)
        return True

    with EventSQL(dsn, transfer=False) as platform:
        _until_told(work, platform)


def transfer(dsn: str, batch: str) -> None:
    """Move events until the input ends, so many at a time, or with 0 as many as fits."""
    stop = threading.Event()
    with EventSQL(dsn, transfer=False) as platform:
        mover = Transfer(platform.database, batch=int(batch) or None)

        def move() -> None:
            mover.run(stop, polling_delay=0.02, on_moved=platform.announce)
            if not stop.is_set():
                os._exit(1)

        loop = threading.Thread(target=move)
        loop.start()
        wait_to_be_told()
        stop.set()
        loop.join()
        mover.close()


def consume(dsn: str, consumer: str, most: str = "40") -> None:
    """Consume with the threads of `start_batch`, until the input ends."""
    worker_pool.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people

    def start(platform: EventSQL) -> bool:
        platform.consumers.start_batch(
            "orders",
            consumer,
            lambda events, connection: record(events, connection, consumer),
            max_events=int(most),
            polling_delay=0.02,
        )
        wait_to_be_told()
        return False

    with EventSQL(dsn, transfer=False) as platform:
        # The server may be down while it starts.
        _through_restarts(start, platform)


def consume_leased(dsn: str, consumer: str, most: str) -> None:
    """The same under leases: the work is done outside of any transaction, its effects commit with the offset."""
    worker_pool.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            record(events, connection, consumer)

    def start(platform: EventSQL) -> bool:
        platform.consumers.start_leased("orders", consumer, handle, lease=1.0, max_events=int(most), polling_delay=0.02)
        wait_to_be_told()
        return False

    with EventSQL(dsn, transfer=False) as platform:
        _through_restarts(start, platform)


def consume_claims(dsn: str, consumer: str, most: str) -> None:
    """Consume every partition in turn by claims with short leases, until the input ends."""
    owner = f"process {os.getpid()}"

    def work(platform: EventSQL) -> bool:
        found = False
        for state in platform.registry.consumer("orders", consumer):
            claim = platform.claims.claim(
                "orders", consumer, state.partition, owner=owner, max_events=3 * int(most), lease=1.0
            )
            if isinstance(claim, Claim):
                found = True
                adopted = platform.claims.adopt(claim.id, owner=owner, lease=1.0)
                platform.claims.process(adopted, lambda e, c: record(e, c, consumer), batch=int(most), lease=1.0)
        if not found:
            time.sleep(0.02)
        return True

    with EventSQL(dsn, transfer=False) as platform:
        _until_told(work, platform)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role
    for role in (
        hold, hold_claim, hold_leased, migrate, register, publish, transfer,
        consume, consume_leased, consume_claims, follow,
    )
}  # fmt: skip


def attach(wire: Wire[str, str]) -> None:
    """Have this process hear its test, and tell it."""
    _wires.append(wire)


def play(wire: Wire[str, str], role: str, dsn: str, *arguments: str) -> None:
    """The whole life of a process."""
    attach(wire)
    ROLES[role](dsn, *arguments)
