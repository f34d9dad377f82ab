"""The processes of the fault run over shards: as those of one database, and each takes up the shards that join.

They are not told their databases but a file that names them, one URL in a line, and look into it again and again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Wire
from pathlib import Path
from urllib.parse import quote

import psycopg

from eventsql_orchestration import Event, EventSQL, Publication, Shard
from eventsql_orchestration.consuming import worker_pool
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ClaimLostError, DatabaseError, RedefinitionError, ShardError
from eventsql_orchestration.shards.add_shard import ShardAddition
from tests import worker
from tests.worker import NumberedPublisher, Progress, record


def limit_of(progress: Path) -> Path:
    """The file with the share of their events up to which publishers go, beside that of their progress."""
    return progress.with_suffix(".limit")


def set_limit(progress: Path, share: float) -> None:
    """Let publishers go on, up to a share of their events."""
    # At once, for those that read it just now.
    new = progress.with_suffix(".new")
    new.write_text(str(share))
    new.rename(limit_of(progress))


class Shards:
    """A platform on the databases that a file names, those included that it comes to name."""

    def __init__(self, urls: str, *, session: str = "", transfer: bool = False) -> None:
        self._urls = Path(urls)
        self._session = session
        self._known: list[str] = []
        self.platform = self._opened(transfer=transfer)

    def _opened(self, *, transfer: bool) -> EventSQL:
        while True:
            self._known = self._named()
            platform = EventSQL(*map(self._dsn, self._known), transfer=transfer)
            try:
                return platform.open()
            except (DatabaseError, ShardError):
                # The servers may be down; a shard may have joined, whose URL is named a moment later.
                platform.close()
                time.sleep(0.05)

    def _named(self) -> list[str]:
        return self._urls.read_text().split()

    def _dsn(self, url: str) -> str:
        return f"{url}?application_name={quote(self._session)}" if self._session else url

    def take_up(self) -> None:
        """Have the shards that have joined since."""
        for url in self._named():
            if url not in self._known:
                self.platform.add_url(self._dsn(url))
                self._known.append(url)

    def until_told(self, work: Callable[[EventSQL], bool]) -> None:
        """Go on with the work through restarts of servers and additions, until told to end or nothing is left to do."""
        told = threading.Event()

        def listen() -> None:
            worker.wait_to_be_told()
            told.set()

        threading.Thread(target=listen, daemon=True).start()
        with self.platform:
            while not told.is_set():
                try:
                    self.take_up()
                    if not work(self.platform):
                        return
                except (DatabaseError, ClaimLostError, RedefinitionError, ShardError):
                    time.sleep(0.05)


class ShardedNumberedPublisher(NumberedPublisher):
    """As `NumberedPublisher`, over shards, as far as the run lets it: an addition takes its time and is to meet events.

    Those of an outbox note each event in its transaction, on its shard.
    """

    def __init__(self, name: str, slot: int, progress: Path, seed: str) -> None:
        super().__init__(name, slot, Progress(progress), seed)
        self._limit = limit_of(progress)

    def work(self, platform: EventSQL) -> bool:
        if self._sure and self._next > self._total * float(self._limit.read_text()):
            time.sleep(0.005)
            return True
        return super().work(platform)

    def _publish_in_transaction(
        self, platform: EventSQL, drawn: random.Random, publications: list[Publication], upto: int, *, commits: bool
    ) -> None:
        of_shards: dict[Shard, list[Publication]] = {}
        for publication in publications:
            assert publication.key is not None
            of_shards.setdefault(platform.shard_of(publication.key), []).append(publication)
        for shard, group in of_shards.items():
            with shard.database.transaction() as connection:
                platform.publisher.publish(group[0], connection=connection)
                # Others publish and commit meanwhile, and a shard may be fenced.
                time.sleep(drawn.choice((0.0, 0.0, 0.002, 0.02)))
                platform.publisher.publish_all(group[1:], connection=connection)
                with connection.cursor() as cursor:
                    cursor.executemany(
                        "INSERT INTO noted (key, value) VALUES (%s, %s)", [(each.key, each.value) for each in group]
                    )
                if not commits:
                    raise worker.RolledBackError

    def _publish_buffered(self, platform: EventSQL, publications: list[Publication]) -> None:
        if self._buffered is None:
            self._buffered = platform.buffered_publisher(max_events=80, max_age=0.002)
        super()._publish_buffered(platform, publications)

    def _acknowledge(self, platform: EventSQL, upto: int) -> None:
        self._next = upto
        self._found = {number for number in self._found if number >= upto}
        self._progress.acknowledge(self._slot, self._next, 0)

    def _find_out(self, platform: EventSQL) -> None:
        found: set[int] = set()
        for shard in platform.shards:
            with shard.database.connection() as connection:
                self._await_those_before(connection)
                found.update(self._published(connection))
        self._found = {number for number in found if number >= self._next}
        while self._next in self._found:
            self._next += 1
        self._progress.acknowledge(self._slot, self._next, 0)
        self._sure = True


def publish(urls: str, name: str, slot: str, progress: str, seed: str) -> None:
    """Publish numbered events in the way that the name begins with."""
    publisher = ShardedNumberedPublisher(name, int(slot), Path(progress), seed)
    shards = Shards(urls, session=publisher.session, transfer=name.startswith("single"))
    shards.until_told(publisher.work)


def transfer(urls: str, _batch: str) -> None:
    """Move events on all shards until told to end."""
    stop = threading.Event()

    def work(platform: EventSQL) -> bool:
        thread = threading.Thread(
            target=platform.transfer.run, args=(stop,), kwargs={"polling_delay": 0.02}, daemon=True
        )
        thread.start()
        _attend(shards)
        stop.set()
        thread.join()
        return False

    shards = Shards(urls)
    with shards.platform as platform:
        _through_restarts(work, platform)


def _attend(shards: Shards) -> None:
    """Take up the shards that join, until told to end."""
    told = threading.Event()

    def listen() -> None:
        worker.wait_to_be_told()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    while not told.wait(0.05):
        try:
            shards.take_up()
        except (DatabaseError, ShardError):
            continue


def _through_restarts(start: Callable[[EventSQL], bool], platform: EventSQL) -> None:
    while True:
        try:
            if not start(platform):
                return
        except (DatabaseError, ShardError):
            time.sleep(0.05)


def consume(urls: str, consumer: str, most: str) -> None:
    """Consume with the threads of `start_batch`, until told to end."""
    worker_pool.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people

    def start(platform: EventSQL) -> bool:
        platform.consumers.start_batch(
            "orders",
            consumer,
            lambda events, connection: record(events, connection, consumer),
            max_events=int(most),
            polling_delay=0.02,
        )
        _attend(shards)
        return False

    shards = Shards(urls)
    with shards.platform as platform:
        _through_restarts(start, platform)


def consume_leased(urls: str, consumer: str, most: str) -> None:
    """The same under leases."""
    worker_pool.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            record(events, connection, consumer)

    def start(platform: EventSQL) -> bool:
        platform.consumers.start_leased("orders", consumer, handle, lease=1.0, max_events=int(most), polling_delay=0.02)
        _attend(shards)
        return False

    shards = Shards(urls)
    with shards.platform as platform:
        _through_restarts(start, platform)


def consume_claims(urls: str, consumer: str, most: str) -> None:
    """Consume every partition of every shard in turn by claims with short leases, until told to end."""
    owner = f"process {os.getpid()}"

    def effects(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection, consumer)

    def work(platform: EventSQL) -> bool:
        found = False
        for shard in platform.shards:
            for state in shard.registry.consumer("orders", consumer):
                claim = shard.claims.claim(
                    "orders", consumer, state.partition, owner=owner, max_events=3 * int(most), lease=1.0
                )
                if isinstance(claim, Claim):
                    found = True
                    adopted = shard.claims.adopt(claim.id, owner=owner, lease=1.0)
                    shard.claims.process(adopted, effects, batch=int(most), lease=1.0)
        if not found:
            time.sleep(0.02)
        return True

    Shards(urls).until_told(work)


def follow(urls: str, home: str) -> None:
    """Write down the offsets of each shard's log in the order in which they are seen, each after the last."""
    files: dict[str, int] = {}
    last: dict[str, int] = {}

    def work(platform: EventSQL) -> bool:
        found = False
        for shard in platform.shards:
            if shard.name is None:
                # It is down, and nobody knows yet which one it is.
                continue
            name = shard.name
            if name not in files:
                files[name], last[name] = _reopened(Path(home) / f"followed-{name}")
            ids = array("q", (event.id for event in shard.reader.read("orders", after=last[name], limit=2_000)))
            if ids:
                os.write(files[name], ids.tobytes())
                last[name], found = ids[-1], True
        if not found:
            time.sleep(0.002)
        return True

    Shards(urls).until_told(work)


def _reopened(path: Path) -> tuple[int, int]:
    """A file of offsets to go on with, and the last that is in it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    seen = os.fstat(file).st_size // 8 * 8
    os.ftruncate(file, seen)
    return file, array("q", os.pread(file, 8, seen - 8))[0] if seen else 0


def add(old: list[str], new: str, dies_after: int | None, only_prepare: bool) -> None:
    """Add a shard; die for good, by SIGKILL, right after step number `dies_after`."""
    steps = 0

    def on_step(_step: str) -> None:
        nonlocal steps
        steps += 1
        if steps == dies_after:
            os.kill(os.getpid(), 9)

    shards = [Shard(dsn, transfer=False) for dsn in (*old, new)]
    try:
        ShardAddition(shards[:-1], shards[-1], on_step=on_step).execute(only_prepare=only_prepare)
    finally:
        for shard in shards:
            shard.close()


def make_tables(dsn: str) -> None:
    """The tables of effects and of the outbox, in one shard's database."""
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE effects (id bigserial PRIMARY KEY, consumer text, partition int, key text, event_id bigint, "
            "value bytea, at timestamptz DEFAULT clock_timestamp())"
        )
        connection.execute("CREATE TABLE noted (key text, value bytea, PRIMARY KEY (key, value))")


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (publish, transfer, consume, consume_leased, consume_claims, follow)
}


def play(wire: Wire[str, str], role: str, urls: str, *arguments: str) -> None:
    """The whole life of a process."""
    worker.attach(wire)
    ROLES[role](urls, *arguments)
