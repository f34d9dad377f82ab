"""The publishers of the fault run: numbered events, and how far each publisher has come."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from eventsql_orchestration import BufferedPublisher, EventSQL, Publication, Shard
from eventsql_orchestration.database import Connection
from tests.forms import BUFFERED

TOPIC: Final = "orders"


def replace(path: Path, text: str) -> None:
    """Write a file at once, for those that read it just now."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


class Progress:
    """How far the publishers of a fault run know themselves to be: a file that outlives their processes and the server.

    For each it holds how many events it is to publish, of how many keys, and how many are acknowledged.
    """

    _SLOT: Final = struct.Struct("<qqq")

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._limit = path.with_suffix(".limit")

    def create(self, publishers: Sequence[tuple[int, int]]) -> None:
        """Begin, with the events and the keys of each publisher."""
        for slot, (total, keys) in enumerate(publishers):
            self._write(slot, total, keys, 0)

    def _write(self, slot: int, *values: int) -> None:
        os.pwrite(self._file, self._SLOT.pack(*values), slot * self._SLOT.size)

    def all(self) -> list[tuple[int, int, int]]:
        """Events, keys and acknowledged events of each."""
        return list(self._SLOT.iter_unpack(os.pread(self._file, 1_000 * self._SLOT.size, 0)))

    def acknowledge(self, slot: int, published: int) -> None:
        total, keys, _ = self.all()[slot]
        self._write(slot, total, keys, published)

    def set_limit(self, share: float) -> None:
        """Let publishers go on, up to a share of their events."""
        replace(self._limit, str(share))

    def must_wait(self, slot: int) -> bool:
        """Whether this one is to wait for a fault, or for the others: there are publishers of every kind to the end."""
        shares = [published / total for total, _, published in self.all()]
        return shares[slot] > min(float(self._limit.read_text()), min(shares) + 0.02)

    def close(self) -> None:
        os.close(self._file)


class RolledBackError(Exception):
    """Ends a transaction that is not to be. psycopg's own gets through where its connection has broken meanwhile."""


class NumberedPublisher:
    """Publishes numbered events of keys of its own, each number once and in order, whatever is killed meanwhile.

    Event `n` is number `n // keys` of key `n % keys`. Where it is not known what became of a publication, the publisher
    looks which of its numbers are in a log or in a buffer before it goes on. A publication that was cut off is decided
    by then: the sessions of those who had this role before have ended.
    """

    def __init__(self, name: str, slot: int, progress: Progress, seed: str) -> None:
        self._kind = name.partition(" ")[0]
        self._name = name
        self._slot = slot
        self._progress = progress
        self._seed = seed
        self._total, self._keys, self._next = progress.all()[slot]
        self._found: set[int] = set()
        self._sure = False
        self._rolled_back = False
        self._buffered: BufferedPublisher | None = None

    @property
    def session(self) -> str:
        """How the databases know the sessions of this process."""
        return f"{self._name} {os.getpid()}"

    def work(self, platform: EventSQL) -> bool:
        """Publish one batch; False when all is published."""
        if not self._sure:
            self._find_out(platform)
        if self._next >= self._total:
            return False
        if self._progress.must_wait(self._slot):
            time.sleep(0.02)
            return True

        drawn = random.Random(f"{self._seed} {self._name} {self._next}")
        upto = min(self._total, self._next + self._size(drawn))
        numbers = [n for n in range(self._next, upto) if n not in self._found]
        self._sure = False
        committed = self._publish(platform, drawn, [self._publication(n) for n in numbers])
        self._sure = True

        if committed:
            self._acknowledge(upto)
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
        return Publication(TOPIC, b"%d" % (number // self._keys), key=f"{self._name}-{number % self._keys}")

    def _publish(self, platform: EventSQL, drawn: random.Random, publications: list[Publication]) -> bool:
        match self._kind:
            case "outbox":
                return self._publish_with_notes(platform, drawn, publications)
            case "buffered":
                self._publish_buffered(platform, publications)
            case "single":
                for publication in publications:
                    platform.publisher.publish(publication)
            case _:
                platform.publisher.publish_all(publications)
        return True

    def _publish_with_notes(self, platform: EventSQL, drawn: random.Random, publications: list[Publication]) -> bool:
        """In a transaction that notes the events, on the shard of each; one in four is rolled back, and False."""
        # A transaction that was rolled back is tried again, and then commits.
        commits = self._rolled_back or drawn.random() < 0.75
        self._rolled_back = not commits
        of_shards: dict[Shard, list[Publication]] = {}
        for publication in publications:
            of_shards.setdefault(platform.shard_of(publication.key or ""), []).append(publication)
        try:
            for shard, group in of_shards.items():
                self._publish_in_transaction(platform, shard, drawn, group, commits=commits)
        except RolledBackError:
            return False
        return True

    def _publish_in_transaction(
        self, platform: EventSQL, shard: Shard, drawn: random.Random, publications: list[Publication], *, commits: bool
    ) -> None:
        half = drawn.randint(1, 20)
        with shard.database.transaction() as connection:
            for publication in publications[:half]:
                platform.publisher.publish(publication, connection=connection)
            # Others publish and commit meanwhile, with ids after those that this one has drawn; a shard may be fenced.
            time.sleep(drawn.choice((0.0, 0.0, 0.002, 0.02)))
            platform.publisher.publish_all(publications[half:], connection=connection)
            with connection.cursor() as cursor:
                cursor.executemany(
                    "INSERT INTO noted (key, value) VALUES (%s, %s)", [(each.key, each.value) for each in publications]
                )
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

    def _acknowledge(self, upto: int) -> None:
        self._next = upto
        self._found = {number for number in self._found if number >= upto}
        self._progress.acknowledge(self._slot, self._next)

    def _find_out(self, platform: EventSQL) -> None:
        found: set[int] = set()
        for shard in platform.shards:
            with shard.database.connection() as connection:
                self._await_those_before(connection)
                found.update(self._published(connection))
        upto = self._next
        while upto in found:
            upto += 1
        self._found = found
        self._acknowledge(upto)
        self._sure = True

    def _await_those_before(self, connection: Connection) -> None:
        """Wait until the sessions of the earlier processes of this role have ended."""
        while connection.execute(
            "SELECT 1 FROM pg_stat_activity WHERE starts_with(application_name, %s) AND application_name <> %s",
            (f"{self._name} ", self.session),
        ).fetchone():
            time.sleep(0.005)

    def _published(self, connection: Connection) -> Iterator[int]:
        """The numbers from the next one on that lie in the buffer or, looked at after it, in the log."""
        for part in (BUFFERED, "SELECT eql_key, eql_value FROM eventsql.orders_event"):
            statement = (
                f"SELECT eql_key, eql_value FROM ({part}) AS published WHERE starts_with(eql_key, %s) "
                "AND convert_from(eql_value, 'UTF8')::bigint >= %s"
            )
            for key, value in connection.execute(statement, (f"{self._name}-", self._next // self._keys)):
                number = int(value) * self._keys + int(key.rpartition("-")[2])
                if number >= self._next:
                    yield number
