"""The processes of the fault run: each publishes, transfers or consumes until it is told to end, or is killed.

They are not told their databases but a file that names them, one URL in a line. They look into it again and again, and
take up the shards that join.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Wire
from pathlib import Path
from urllib.parse import quote

import psycopg

from eventsql_orchestration import Event, EventSQL, Shard
from eventsql_orchestration.consuming import queue_consumption, worker_pool
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.leases import Lease
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ClaimLostError, DatabaseError, RedefinitionError, RegistryError, ShardError
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.storage import compacting
from tests import worker
from tests.log.numbered import TOPIC, NumberedPublisher, Progress
from tests.worker import record

POLLING_DELAY = 0.1
"""Seconds between two looks of a process that finds nothing. Looks cost processor time, which the others need."""


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
        return f"{url}{'&' if '?' in url else '?'}application_name={quote(self._session)}" if self._session else url

    def take_up(self) -> None:
        """Have the shards that have joined since."""
        for url in self._named():
            if url not in self._known:
                self.platform.add_url(self._dsn(url))
                self._known.append(url)

    def until_told(self, work: Callable[[EventSQL], bool], end: Callable[[], object] = lambda: None) -> None:
        """Go on with the work through restarts of servers and additions, until told to end or nothing is left to do.

        `end` is called before the platform is closed.
        """
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
            end()

    def attend(self, start: Callable[[], object], end: Callable[[], object] = lambda: None) -> None:
        """Start work that goes on by itself; take up the shards that join, until told to end."""
        started: list[object] = []

        def work(_platform: EventSQL) -> bool:
            if not started:
                start()
                started.append(True)
            time.sleep(0.05)
            return True

        # A process that begins at the end of the run is told to end before it has started anything.
        self.until_told(work, lambda: end() if started else None)


# Roles


def publish(urls: str, name: str, slot: str, progress: str, seed: str) -> None:
    """Publish numbered events in the way that the name begins with."""
    publisher = NumberedPublisher(name, int(slot), Progress(Path(progress)), seed)
    # Those that publish one by one transfer too, as a program does that is told nothing else.
    shards = Shards(urls, session=publisher.session, transfer=name.startswith("single"))
    shards.until_told(publisher.work)


def transfer(urls: str) -> None:
    """Move events on all shards until told to end."""
    stop = threading.Event()
    shards = Shards(urls)

    def move() -> None:
        try:
            shards.platform.transfer.run(stop, polling_delay=POLLING_DELAY)
        except BaseException:  # noqa: BLE001 - a thread that ends alone would not be noticed
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def end() -> None:
        stop.set()
        thread.join()

    thread = threading.Thread(target=move)
    shards.attend(thread.start, end)


def compact(urls: str) -> None:
    """Merge small blocks again and again, in windows that are small enough for the run, until told to end."""
    compacting.WINDOW_IDS = 500  # type: ignore[misc]  # most runs have fewer events than a window
    shards = Shards(urls)

    def work(platform: EventSQL) -> bool:
        # A log without events gets another form as a whole.
        with suppress(RegistryError):
            platform.compactor.execute(TOPIC)
        time.sleep(POLLING_DELAY)
        return True

    shards.until_told(work)


def consume(urls: str, consumer: str, most: str) -> None:
    """Consume with the threads of `start_batch`, until told to end."""
    worker_pool.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people
    shards = Shards(urls)

    def handle(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection, consumer)

    shards.attend(
        lambda: shards.platform.consumers.start_batch(
            TOPIC, consumer, handle, max_events=int(most), polling_delay=POLLING_DELAY
        )
    )


def consume_leased(urls: str, consumer: str, most: str) -> None:
    """The same under leases: the work is done outside of any transaction, its effects commit with the offset."""
    worker_pool.FAULT_DELAY = 0.1  # type: ignore[misc]  # five seconds are for people
    shards = Shards(urls)

    def handle(events: Sequence[Event], lease: Lease) -> None:
        with lease.transaction() as connection:
            record(events, connection, consumer)

    shards.attend(
        lambda: shards.platform.consumers.start_leased(
            TOPIC, consumer, handle, lease=1.0, max_events=int(most), polling_delay=POLLING_DELAY
        )
    )


def consume_queue(urls: str, consumer: str, _most: str) -> None:
    """Consume the topic as a queue: each event is acknowledged by itself, together with its effect."""
    queue_consumption.FAULT_DELAY = 0.1  # type: ignore[attr-defined]  # five seconds are for people
    shards = Shards(urls)

    def handle(event: Event, connection: Connection) -> None:
        record([event], connection, consumer)

    shards.attend(
        lambda: shards.platform.consumers.start_queue(
            TOPIC, consumer, handle, workers=4, lease=1.0, polling_delay=POLLING_DELAY
        )
    )


def consume_claims(urls: str, consumer: str, most: str) -> None:
    """Consume every partition of every shard in turn by claims with short leases, until told to end."""
    owner = f"process {os.getpid()}"

    def effects(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection, consumer)

    def work(platform: EventSQL) -> bool:
        found = False
        for shard in platform.shards:
            for state in shard.registry.consumer(TOPIC, consumer):
                claim = shard.claims.claim(
                    TOPIC, consumer, state.partition, owner=owner, max_events=3 * int(most), lease=1.0
                )
                if isinstance(claim, Claim):
                    found = True
                    adopted = shard.claims.adopt(claim.id, owner=owner, lease=1.0)
                    shard.claims.process(adopted, effects, batch=int(most), lease=1.0)
        if not found:
            time.sleep(POLLING_DELAY)
        return True

    Shards(urls).until_told(work)


def followed(home: Path, shard: str | None) -> Path:
    """The file of the offsets that a reader has seen of a shard's log; a database alone has no name."""
    return home / f"followed-{shard or ''}"


def follow(urls: str, home: str) -> None:
    """Write down the offsets of each log in the order in which they are seen, each after the last."""
    files: dict[str | None, int] = {}
    last: dict[str | None, int] = {}

    def work(platform: EventSQL) -> bool:
        found = False
        for shard in platform.shards:
            if shard.name is None and len(platform.shards) > 1:
                # It is down, and nobody knows yet which one it is.
                continue
            name = shard.name
            if name not in files:
                files[name], last[name] = _reopened(followed(Path(home), name))
            ids = array("q", (event.id for event in shard.reader.read(TOPIC, after=last[name], limit=2_000)))
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
    role.__name__: role
    for role in (publish, transfer, compact, consume, consume_leased, consume_queue, consume_claims, follow)
}


def play(wire: Wire[str, str], role: str, urls: str, *arguments: str) -> None:
    """The whole life of a process."""
    worker.attach(wire)
    ROLES[role](urls, *arguments)
