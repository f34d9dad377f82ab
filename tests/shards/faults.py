"""The fault run over shards: what `tests.log.faults` does, on several servers, while shards are added.

`python -m tests.shards.faults --events 400000 --seed 7` runs it on two servers of its own, whose settings are those
that a user gets. It begins with two shards, one on each; every shard that is added goes to the server with the fewer.
Publishers of every kind, transfers, consumers of every kind and a reader run as processes of their own; the seed
decides which of them is killed when, which server is stopped in immediate mode, when the topic gets another number of
partitions, when a shard is added, whether its operator is killed in the middle, and whether the others hear of the new
database before or after it takes events. It ends with 1 and the first violations when a promise was broken.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from eventsql_orchestration import Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseError, ShardError
from eventsql_orchestration.sharding import shard_of_key
from tests import worker
from tests.fixtures import memory_disk
from tests.log.faults import (
    CONSUMERS,
    MOST_PARTITIONS,
    MOST_VIOLATIONS,
    PARTITIONS,
    SERVER,
    SHARD,
    TOPIC,
    Cast,
    Figures,
    Player,
    Row,
    RunEndedError,
    Settings,
    check_offsets,
    difference,
    faults,
    log_of,
    players,
    publishers,
    say,
    wrong_order,
)
from tests.shards import playing

FIRST: Final = 2
"""The shards that there are from the beginning, each on a server of its own."""

AHEAD: Final = 0.1
"""How far publishers go on during a fault, as a share of all events."""

STEPS: Final = 6
"""An operator dies after one of this many steps of an addition, if there are as many."""


def cast(settings: Settings, home: Path) -> list[Player]:
    """The processes: as on one database, and the reader follows all logs."""
    one = [player for player in players(settings, home) if player.kind != "follow"]
    return [*one, Player("follow 0", "follow", "follow", (home,))]


class ShardedRun:
    """One run from its tables to its verdict."""

    def __init__(self, settings: Settings, servers: Sequence[EmbeddedPostgres], home: Path) -> None:
        self._settings = settings
        self._servers = servers
        self._home = home
        self._urls = home / "urls"
        self._publishers = publishers(settings)
        self._drawn = random.Random(settings.seed)
        self._started = time.monotonic()
        self.figures = Figures(settings)
        self.shards = 0
        self.moved = 0

    def play(self) -> Figures:
        dsns = [self._create() for _ in range(FIRST)]
        self._name(dsns)
        opened = EventSQL(*dsns, transfer=False)
        with opened as platform:
            self._prepare(platform)
            running = Cast(cast(self._settings, self._home), str(self._urls), self._home, playing.play)
            try:
                self._break(running, platform)
                self._until(running, running.published)
                self.figures.published_seconds = time.monotonic() - self._started
                self._until(running, lambda: self._consumed(platform))
                self.figures.seconds = time.monotonic() - self._started
                running.end(patience=30.0)
            except RunEndedError as error:
                self.figures.violations.append(str(error))
                self.figures.violations.extend(_where_it_stands(platform))
            finally:
                running.close()
            if not self.figures.violations:
                expected: dict[str, int] = {}
                for publisher in self._publishers:
                    expected |= publisher.of_keys()
                verdict = check(platform, expected, self._home)
                self.figures.effects = self._settings.events * len(CONSUMERS)
                self.figures.layouts = [each.partitions for each in platform.shards[0].layouts.of(TOPIC)]
                self.figures.violations.extend(itertools.islice(verdict, MOST_VIOLATIONS))
                self.moved = _moved(platform)
        return self.figures

    def _create(self) -> str:
        """A database for one more shard."""
        server = self._servers[self.shards % len(self._servers)]
        self.shards += 1
        return server.create_database(f"faults_{self.shards}")

    def _name(self, dsns: Sequence[str]) -> None:
        """Tell all processes of these databases."""
        # At once, for those that read it just now.
        new = self._urls.with_suffix(".new")
        new.write_text("\n".join(dsns))
        new.rename(self._urls)

    def _prepare(self, platform: EventSQL) -> None:
        platform.registry.register_topic(Topic(TOPIC, self._settings.partitions))
        for role, consumer in CONSUMERS.items():
            platform.registry.register_consumer(Consumer(TOPIC, consumer, partitioned=role != "consume_claims"))
        for dsn in self._urls.read_text().split():
            playing.make_tables(dsn)
        playing.set_limit(self._home / "progress", 0.0)
        self._progress = worker.Progress(self._home / "progress")
        self._progress.create([(publisher.events, publisher.keys) for publisher in self._publishers])
        self._started = time.monotonic()

    def _break(self, running: Cast, platform: EventSQL) -> None:
        names = {player.name: player.kind for player in running.players.values()}
        for fault in faults(self._settings, names):
            playing.set_limit(self._home / "progress", fault.at / self._settings.events + AHEAD)
            self._until(running, lambda at=fault.at: self._acknowledged() >= at)  # type: ignore[misc]  # bound
            if fault.name == SERVER:
                server = self._drawn.choice(self._servers)
                server.stop(mode="immediate")
                server.start()
                self.figures.restarts += 1
            elif fault.name == PARTITIONS:
                self._repartition(running, platform)
            elif fault.name == SHARD:
                self._add_shard(running, platform)
            elif running.kill_and_follow(fault.name):
                self.figures.kills[names[fault.name]] += 1
        playing.set_limit(self._home / "progress", 1.0)

    def _repartition(self, running: Cast, platform: EventSQL) -> None:
        partitions = self._drawn.randint(1, MOST_PARTITIONS)

        def repartitioned() -> bool:
            try:
                platform.repartitioner.repartition(TOPIC, partitions)
            except (DatabaseError, ShardError):
                # A shard was down a moment ago: it is done again, as its operator is told.
                return False
            return True

        self._until(running, repartitioned)

    def _add_shard(self, running: Cast, platform: EventSQL) -> None:
        old, new = self._urls.read_text().split(), self._create()
        early, dies_after = self._drawn.random() < 0.5, self._drawn.randint(1, STEPS)
        self._operate(running, old, new, dies_after if dies_after % 2 else None, only_prepare=True)
        playing.make_tables(new)
        if early:
            self._name([*old, new])
        self._operate(running, old, new, dies_after, only_prepare=False)
        self._name([*old, new])
        platform.add_url(new)

    def _operate(self, running: Cast, old: list[str], new: str, dies_after: int | None, *, only_prepare: bool) -> None:
        """Add a shard by an operator that dies in between, and by as many others as it takes."""
        context = multiprocessing.get_context("forkserver")
        outcomes: list[int | None] = []

        def added() -> bool:
            first = dies_after if not outcomes else None
            process = context.Process(target=playing.add, args=(old, new, first, only_prepare), daemon=True)
            process.start()
            process.join()
            outcomes.append(process.exitcode)
            process.close()
            return outcomes[-1] == 0

        self._until(running, added)

    def _until(self, running: Cast, condition: Callable[[], bool]) -> None:
        while not condition():
            running.check()
            if time.monotonic() - self._started > self._settings.deadline:
                raise RunEndedError(f"the run is not done after {self._settings.deadline:g} s")
            time.sleep(0.002)

    def _acknowledged(self) -> int:
        return sum(acknowledged for _, _, acknowledged, _ in self._progress.all())

    def _consumed(self, platform: EventSQL) -> bool:
        """Whether all that there is was consumed and seen: events that are lost are not waited for."""
        time.sleep(0.1)
        try:
            return (
                not platform.held_back()
                and not platform.buffered()
                and not any(lag.events or lag.cause == "unreachable" for lag in platform.lag(TOPIC))
                and all(_followed(self._home, shard) >= shard.reader.count(TOPIC) for shard in platform.shards)
            )
        except (DatabaseError, ShardError):
            return False


def _followed(home: Path, shard: Shard) -> int:
    path = home / f"followed-{shard.name}"
    return path.stat().st_size // 8 if path.exists() else 0


def _where_it_stands(platform: EventSQL) -> Iterator[str]:
    try:
        yield f"held back: {platform.held_back()}; the buffers: {platform.buffered()}"
        for shard in platform.shards:
            yield f"{shard.name} has {shard.reader.count(TOPIC):,} events"
        for lag in platform.lag(TOPIC):
            if lag.events:
                where = f"{lag.consumer}[{lag.partition}] on {lag.shard} is at {lag.last_event_id}"
                yield f"{where}, {lag.events} behind: {lag.cause} {lag.detail}"
    except (DatabaseError, ShardError) as error:
        yield f"the databases do not say where it stands: {error}"


# The verdict


def check(platform: EventSQL, expected: Mapping[str, int], home: Path) -> Iterator[str]:
    """What is wrong with the logs, with what was seen of them while they were written, and with the effects."""
    generations = _generations(platform)
    of_keys: dict[str, list[tuple[int, list[int]]]] = {key: [] for key in expected}
    for shard in sorted(platform.shards, key=lambda each: _joined(generations, each.name or "")):
        name = shard.name or ""
        rows: dict[str, list[int]] = {}
        log: dict[int, array[int]] = {}
        strays: list[str] = []
        for key, number, _, _ in log_of(shard, log, strays):
            rows.setdefault(key, []).append(number)
        yield from (f"{name}: {stray}" for stray in strays)
        seen = array("q")
        seen.frombytes((home / f"followed-{name}").read_bytes())
        yield from difference(f"{name}: the reader", seen, log[-1])
        for consumer in CONSUMERS.values():
            yield from (f"{name}: {each}" for each in check_offsets(shard, consumer, log))
        yield from _check_notes(shard, rows)
        for key, numbers in rows.items():
            of_keys.setdefault(key, []).append((_joined(generations, name), numbers))
            if not any(shard_of_key(key, sorted(names)) == name for names in generations):
                yield f"{name}: {key} never belonged to this shard"
    yield from wrong_keys(of_keys, expected)
    for consumer in CONSUMERS.values():
        yield from wrong_order(f"effects of {consumer}", effects(platform.shards, consumer), expected)
    yield from (f"still held back: {each}" for each in platform.held_back())


def _moved(platform: EventSQL) -> int:
    """How many keys have events on more than one shard."""
    keys: Counter[str] = Counter()
    for shard in platform.shards:
        with shard.database.connection() as connection:
            rows = connection.execute("SELECT DISTINCT eql_key FROM eventsql.orders_event").fetchall()
        keys.update(key for (key,) in rows)
    return sum(count > 1 for count in keys.values())


def _generations(platform: EventSQL) -> list[frozenset[str]]:
    with platform.shards[0].database.connection() as connection:
        rows = connection.execute("SELECT eql_shards FROM eventsql.shard_layout ORDER BY eql_generation").fetchall()
    return [frozenset(names) for (names,) in rows]


def _joined(generations: Sequence[frozenset[str]], name: str) -> int:
    return next(number for number, names in enumerate(generations) if name in names)


def wrong_keys(of_keys: Mapping[str, list[tuple[int, list[int]]]], expected: Mapping[str, int]) -> Iterator[str]:
    """Each key's events lie on its shards one after the other, from the oldest shard to the newest."""
    for key, parts in of_keys.items():
        numbers = [number for _, part in parts for number in part]
        if numbers != list(range(expected.get(key, 0))):
            lie = "; ".join(f"generation {joined + 1}: {part[0]} to {part[-1]}" for joined, part in parts)
            yield f"the logs: {key} has {len(numbers)} of {expected.get(key)} events, or out of order: {lie}"


def _check_notes(shard: Shard, rows: Mapping[str, list[int]]) -> Iterator[str]:
    """What the outbox noted with its events is there exactly where they are."""
    with shard.database.connection() as connection:
        noted = connection.execute(
            "SELECT key, array_agg(convert_from(value, 'UTF8')::int ORDER BY convert_from(value, 'UTF8')::int) "
            "FROM noted GROUP BY key"
        ).fetchall()
    found = {key: numbers for key, numbers in rows.items() if key.startswith("outbox")}
    if dict(noted) != found:
        yield f"{shard.name}: the outbox noted other events than it published"


Effect: TypeAlias = tuple[float, int, Row]


def effects(shards: Sequence[Shard], consumer: str) -> Iterator[Row]:
    """The effects of all shards in the order in which they came: one machine, one clock."""
    merged = heapq.merge(*(_effects(place, shard, consumer) for place, shard in enumerate(shards)))
    return (row for _, _, row in merged)


def _effects(place: int, shard: Shard, consumer: str) -> Iterator[Effect]:
    with shard.database.transaction() as connection, connection.cursor("effects") as cursor:
        cursor.itersize = 20_000
        cursor.execute(
            "SELECT extract(epoch FROM at)::float8, key, convert_from(value, 'UTF8')::bigint, partition, event_id "
            "FROM effects WHERE consumer = %s ORDER BY at, id",
            (consumer,),
        )
        for at, *row in cursor:
            yield at, place, (row[0], row[1], row[2], row[3])


# The program


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run, how many shards there were in the end, and how many keys moved in the middle of theirs."""

    figures: Figures
    shards: int
    moved: int


def run(settings: Settings, *, keep: bool = False) -> Outcome:
    """Play a run on servers as a user gets them, of which nothing is left at the end.

    With `keep`, they stay where there were violations, to be looked at.
    """
    home = Path(tempfile.mkdtemp(prefix="eventsql-faults-", dir=memory_disk()))
    # The servers' account must get in.
    home.chmod(0o755)
    servers = [EmbeddedPostgres(home / f"postgres-{number}") for number in range(1, FIRST + 1)]
    kept = False
    try:
        for server in servers:
            server.start()
        played = ShardedRun(settings, servers, home)
        figures = played.play()
        if keep and figures.violations:
            kept = True
            figures.violations.append(f"look at the servers and the processes' words in {home}")
        return Outcome(figures, played.shards, played.moved)
    finally:
        if not kept:
            for server in servers:
                server.destroy()
            shutil.rmtree(home, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shards.faults", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="another one each time by default")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--repartitionings", type=int, default=4)
    parser.add_argument("--additions", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=1_200.0, help="seconds")
    parser.add_argument("--keep", action="store_true", help="leave the servers as they are when there are violations")
    given = vars(parser.parse_args(arguments))
    keep = given.pop("keep")
    if given["seed"] is None:
        given["seed"] = random.SystemRandom().randrange(2**31)
    # Before it begins: a run that hangs must be repeatable too.
    say(f"seed {given['seed']}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = run(Settings(**given), keep=keep)
    own = [("shards", f"{FIRST} to {outcome.shards}"), ("keys that moved", f"{outcome.moved:,}")]
    for label, figure in [*own, *outcome.figures.rows()]:
        say(f"{label:<28}{figure:>14}")
    for violation in outcome.figures.violations:
        say(f"VIOLATION {violation}")
    return 1 if outcome.figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
