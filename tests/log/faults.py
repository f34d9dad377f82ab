"""The fault run: processes are killed and the server restarts while keyed events flow; then all must be there once.

`python -m tests.log.faults --events 1000000 --seed 7` runs it on a server of its own whose settings are those that a
user gets, fsync among them. Publishers of every kind, transfers, consumers of every kind and a reader run as processes
of their own; the seed decides which of them is killed when, that the server is stopped in immediate mode, or that the
topic gets another number of partitions, by how many events are acknowledged. It prints what happened, and ends with 1
and the first violations when a promise of the log was broken.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Wire
from pathlib import Path
from typing import Final, TypeAlias

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.topics.layouts import Layout
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests import worker
from tests.fixtures import memory_disk

TOPIC: Final = "orders"

SHARES: Final = {"single": 0.02, "small": 0.08, "outbox": 0.10, "buffered": 0.30, "straight": 0.50}
"""What each kind of publisher publishes of all events; each kind has two processes."""

CONSUMERS: Final = {"consume": "mailer", "consume_leased": "ledger", "consume_claims": "fares"}
"""What each kind of consumer is called; each has two processes. The last one is not partitioned."""

SERVER: Final = "server"
PARTITIONS: Final = "partitions"
SHARD: Final = "shard"

MOST_PARTITIONS: Final = 12

MOST_VIOLATIONS: Final = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """A run: how many events, in how many partitions, how many faults, and the seconds after which it is given up.

    `additions` are of shards, in the run that has some.
    """

    events: int
    seed: int
    partitions: int = 8
    kills: int = 100
    restarts: int = 10
    repartitionings: int = 10
    additions: int = 0
    deadline: float = 1_200.0


@dataclass(frozen=True, slots=True)
class Player:
    """A process of the run: its role in `worker.py` and its arguments."""

    name: str
    kind: str
    role: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens once so many events are acknowledged: the process of this name is killed, the server restarts, the
    topic is repartitioned, or a shard is added.
    """

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Publisher:
    """A publisher of the run: event `n` is number `n // keys` of its key `n % keys`."""

    name: str
    events: int
    keys: int

    def of_keys(self) -> dict[str, int]:
        """Its keys and how many events each gets."""
        return {f"{self.name}-{key}": len(range(key, self.events, self.keys)) for key in range(self.keys)}


@dataclass(slots=True)
class Figures:
    """What came of a run."""

    settings: Settings
    published_seconds: float = 0.0
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    layouts: list[int] = field(default_factory=list)
    effects: int = 0
    violations: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """Label and figure."""
        settings = self.settings
        return [
            ("seed", str(settings.seed)),
            ("events", f"{settings.events:,}"),
            ("partitions", ", ".join(map(str, self.layouts or [settings.partitions]))),
            *((f"kills: {kind}", str(count)) for kind, count in sorted(self.kills.items())),
            ("kills", str(self.kills.total())),
            ("server restarts", str(self.restarts)),
            ("effects", f"{self.effects:,}"),
            ("seconds until published", f"{self.published_seconds:.1f}"),
            ("seconds until consumed", f"{self.seconds:.1f}"),
            ("events/s", f"{settings.events / self.seconds:,.0f}" if self.seconds else "-"),
            ("violations", f"{len(self.violations)}" if self.violations else "none"),
        ]


# The plan, by the seed alone


def publishers(settings: Settings) -> list[Publisher]:
    found = []
    for kind, share in SHARES.items():
        for number in range(2):
            events = max(1, round(settings.events * share / 2))
            keys = max(20, min(400, settings.events // 100)) if kind == "buffered" else 50
            found.append(Publisher(f"{kind} {number}", events, keys))
    # Shares are rounded; the last one makes up for it.
    missing = settings.events - sum(publisher.events for publisher in found)
    last = found.pop()
    return [*found, Publisher(last.name, last.events + missing, last.keys)]


def players(settings: Settings, home: Path) -> list[Player]:
    most = max(40, min(1_000, settings.events // 200))
    return [
        *(
            Player(
                each.name, each.name.partition(" ")[0], "publish", (each.name, slot, home / "progress", settings.seed)
            )
            for slot, each in enumerate(publishers(settings))
        ),
        *(Player(f"transfer {number}", "transfer", "transfer", (batch,)) for number, batch in enumerate((100, 0))),
        *(
            Player(f"{role} {number}", role, role, (consumer, most))
            for role, consumer in CONSUMERS.items()
            for number in range(2)
        ),
        Player("follow 0", "follow", "follow", (home / "followed",)),
    ]


def faults(settings: Settings, names: Mapping[str, str]) -> list[Fault]:
    """The faults in order: every kind of process is killed about as often. `names` has the kind of each process."""
    drawn = random.Random(settings.seed)
    of_kind: dict[str, list[str]] = {}
    for name, kind in names.items():
        of_kind.setdefault(kind, []).append(name)
    kinds = itertools.islice(itertools.cycle(drawn.sample(sorted(of_kind), len(of_kind))), settings.kills)
    others = [SERVER] * settings.restarts + [PARTITIONS] * settings.repartitionings + [SHARD] * settings.additions
    targets = [*(drawn.choice(of_kind[kind]) for kind in kinds), *others]
    drawn.shuffle(targets)
    moments = sorted(drawn.sample(range(settings.events // 50, settings.events * 9 // 10), len(targets)))
    return [Fault(at, name) for at, name in zip(moments, targets, strict=True)]


# The run


class RunEndedError(Exception):
    """The run cannot go on: a process ended by itself, or the deadline has come."""


class Cast:
    """The processes of a run; one that is killed is followed by another in its role."""

    def __init__(
        self, players: Sequence[Player], dsn: str, home: Path, roles: Callable[..., None] = worker.play
    ) -> None:
        """`roles` is the whole life of a process: it is called with a wire, a role, `dsn` and the arguments."""
        self.players = {player.name: player for player in players}
        self._dsn = dsn
        self._home = home
        self._roles = roles
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["eventsql_orchestration.shards.shard", roles.__module__])
        self._playing = {player.name: self._start(player) for player in players}

    def _start(self, player: Player) -> _Playing:
        wire, theirs = self._context.Pipe()
        log = self._home / f"{player.name}.log"
        process = self._context.Process(
            target=play,
            args=(self._roles, theirs, log, player.role, self._dsn, *map(str, player.arguments)),
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, wire

    def kill_and_follow(self, name: str) -> bool:
        """Kill a process and start another in its role; False when it had done its part and ended."""
        process, wire = self._playing[name]
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            self.check()
            return False
        process.close()
        wire.close()
        self._playing[name] = self._start(self.players[name])
        return True

    def check(self) -> None:
        """Raise `RunEndedError` when a process failed."""
        for name, (process, _) in self._playing.items():
            if process.exitcode:
                raise RunEndedError(f"{name} ended by itself with {process.exitcode}: {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        log = self._home / f"{name}.log"
        return " | ".join(log.read_text(errors="replace").splitlines()[-4:]) if log.exists() else "it said nothing"

    def published(self) -> bool:
        return not any(
            process.is_alive() for name, (process, _) in self._playing.items() if self.players[name].role == "publish"
        )

    def end(self, patience: float) -> None:
        """Tell all to end; raise `RunEndedError` when one does not, or fails."""
        for process, wire in self._playing.values():
            if process.is_alive():
                wire.send("end")
        for name, (process, _) in self._playing.items():
            process.join(patience)
            if process.exitcode != 0:
                raise RunEndedError(f"{name} was told to end and came to {process.exitcode}: {self._last_words(name)}")

    def close(self) -> None:
        for process, wire in self._playing.values():
            process.kill()
            process.join()
            process.close()
            wire.close()


_Playing: TypeAlias = "tuple[multiprocessing.context.ForkServerProcess, Wire[str, str]]"


def play(roles: Callable[..., None], wire: Wire[str, str], log: Path, role: str, dsn: str, *arguments: str) -> None:
    """The whole life of a process, which says what it has to say to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    roles(wire, role, dsn, *arguments)


class Run:
    """One run from its tables to its verdict."""

    def __init__(self, settings: Settings, server: EmbeddedPostgres, home: Path) -> None:
        self._settings = settings
        self._server = server
        self._home = home
        self._publishers = publishers(settings)
        self._started = time.monotonic()
        self.figures = Figures(settings)

    def play(self) -> Figures:
        with EventSQL(self._server.create_database("faults"), transfer=False) as platform:
            self._prepare(platform)
            cast = Cast(players(self._settings, self._home), platform.database.dsn, self._home)
            try:
                self._break(cast, platform)
                self._until(cast, cast.published)
                self.figures.published_seconds = time.monotonic() - self._started
                self._until(cast, lambda: self._consumed(platform))
                self.figures.seconds = time.monotonic() - self._started
                cast.end(patience=30.0)
            except RunEndedError as error:
                self.figures.violations.append(str(error))
                self.figures.violations.extend(_where_it_stands(platform))
            finally:
                cast.close()
            if not self.figures.violations:
                verdict = check(platform, self._publishers, self._home / "followed")
                self.figures.effects = self._settings.events * len(CONSUMERS)
                self.figures.layouts = [layout.partitions for layout in platform.layouts.of(TOPIC)]
                self.figures.violations.extend(itertools.islice(verdict, MOST_VIOLATIONS))
        return self.figures

    def _prepare(self, platform: EventSQL) -> None:
        platform.registry.register_topic(Topic(TOPIC, self._settings.partitions))
        for role, consumer in CONSUMERS.items():
            platform.registry.register_consumer(Consumer(TOPIC, consumer, partitioned=role != "consume_claims"))
        with platform.database.connection() as connection:
            connection.execute(
                "CREATE TABLE effects (id bigserial PRIMARY KEY, consumer text, partition int, key text, "
                "event_id bigint, value bytea)"
            )
            connection.execute("CREATE TABLE outbox (publisher text PRIMARY KEY, published bigint)")
            for publisher in self._publishers:
                connection.execute("INSERT INTO outbox VALUES (%s, 0)", (publisher.name,))
        self._progress = worker.Progress(self._home / "progress")
        self._progress.create([(publisher.events, publisher.keys) for publisher in self._publishers])
        self._started = time.monotonic()

    def _break(self, cast: Cast, platform: EventSQL) -> None:
        drawn = random.Random(self._settings.seed)
        names = {player.name: player.kind for player in cast.players.values()}
        for fault in faults(self._settings, names):
            self._until(cast, lambda at=fault.at: self._acknowledged() >= at)  # type: ignore[misc]  # bound
            if fault.name == SERVER:
                self._server.stop(mode="immediate")
                self._server.start()
                self.figures.restarts += 1
            elif fault.name == PARTITIONS:
                platform.repartitioner.repartition(TOPIC, drawn.randint(1, MOST_PARTITIONS))
            elif cast.kill_and_follow(fault.name):
                self.figures.kills[names[fault.name]] += 1

    def _until(self, cast: Cast, condition: Callable[[], bool]) -> None:
        while not condition():
            cast.check()
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
                not platform.buffered()
                and not any(lag.events for lag in platform.lag(TOPIC))
                and (self._home / "followed").stat().st_size // 8 >= platform.reader.count(TOPIC)
            )
        except DatabaseError:
            return False


def _where_it_stands(platform: EventSQL) -> Iterator[str]:
    try:
        yield f"the log has {platform.reader.count(TOPIC):,} events, the buffer {platform.buffered()}"
        for lag in platform.lag(TOPIC):
            where = f"{lag.consumer}[{lag.partition}] is at {lag.last_event_id}"
            yield f"{where}, {lag.events} behind: {lag.cause} {lag.detail}"
    except DatabaseError as error:
        yield f"the database does not say where it stands: {error}"


# The verdict

Row: TypeAlias = tuple[str, int, int, int]
"""Key, number, partition and offset of an event."""


def check(platform: EventSQL, publishers: Iterable[Publisher], followed: Path) -> Iterator[str]:
    """What is wrong with the log, with what was seen of it while it was written, and with the effects."""
    expected: dict[str, int] = {}
    for publisher in publishers:
        expected |= publisher.of_keys()
    log: dict[int, array[int]] = {}
    strays: list[str] = []
    yield from wrong_order("the log", log_of(platform, log, strays), expected)
    yield from strays
    seen = array("q")
    seen.frombytes(followed.read_bytes())
    yield from difference("the reader", seen, log[NOT_PARTITIONED])
    for consumer in CONSUMERS.values():
        yield from _check_consumer(platform, consumer, expected, log)
    if buffered := platform.buffered():
        yield f"the buffer is not empty: {buffered}"


def log_of(platform: EventSQL | Shard, log: dict[int, array[int]], strays: list[str]) -> Iterator[Row]:
    """The rows of one database's log; their offsets are put into `log`, by partition and all together.

    Those that lie in another partition than their key's are named in `strays`.
    """
    layouts = platform.layouts.of(TOPIC)
    partitions = platform.registry.topic(TOPIC).partitions
    log[NOT_PARTITIONED] = array("q")
    for row in _log(platform):
        key, _, partition, offset = row
        log[NOT_PARTITIONED].append(offset)
        log.setdefault(partition, array("q")).append(offset)
        if partition != (home := partition_of_key(key, _partitions_at(layouts, offset) or partitions)):
            strays.append(f"the log: {key} at offset {offset} is in partition {partition}, and belongs in {home}")
        yield row


def _check_consumer(
    platform: EventSQL, consumer: str, expected: Mapping[str, int], log: Mapping[int, array[int]]
) -> Iterator[str]:
    yield from wrong_order(f"effects of {consumer}", _effects(platform, consumer), expected)
    yield from check_offsets(platform, consumer, log)


def check_offsets(platform: EventSQL | Shard, consumer: str, log: Mapping[int, array[int]]) -> Iterator[str]:
    """What of one database's log has no effect there, or more than one, or is not counted as consumed."""
    states = {state.partition: state for state in platform.registry.consumer(TOPIC, consumer)}
    whole = NOT_PARTITIONED in states
    kept = whole or not platform.layouts.of(TOPIC)
    handled: dict[int, array[int]] = {partition: array("q") for partition in (states if kept else log)}
    for _, _, partition, offset in _effects(platform, consumer):
        handled[NOT_PARTITIONED if whole else partition].append(offset)
    for partition in handled.keys() - ({NOT_PARTITIONED} - states.keys()):
        own = log.get(partition, array("q"))
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
    for lag in platform.lag(TOPIC):
        if lag.consumer == consumer and (lag.events or lag.seconds):
            yield f"{consumer}[{lag.partition}] has a lag of {lag.events} events and {lag.seconds:.1f} s"


def _partitions_at(layouts: Sequence[Layout], offset: int) -> int:
    """How many partitions the topic had at an offset; 0 where they never changed."""
    return next((layout.partitions for layout in reversed(layouts) if layout.after < offset), 0)


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


def _log(platform: EventSQL | Shard) -> Iterator[Row]:
    for events in platform.reader.stream(TOPIC, batch=20_000):
        for event in events:
            yield event.key or "", int(event.value), event.partition, event.id


def _effects(platform: EventSQL | Shard, consumer: str) -> Iterator[Row]:
    with platform.database.transaction() as connection, connection.cursor("effects") as cursor:
        cursor.itersize = 20_000
        cursor.execute(
            "SELECT key, convert_from(value, 'UTF8')::bigint, partition, event_id FROM effects "
            "WHERE consumer = %s ORDER BY id",
            (consumer,),
        )
        yield from cursor


# The program


def run(settings: Settings, *, keep: bool = False) -> Figures:
    """Play a run on a server as a user gets it, in a directory of its own, of which nothing is left at the end.

    With `keep`, both stay where there were violations, to be looked at.
    """
    home = Path(tempfile.mkdtemp(prefix="eventsql-faults-", dir=memory_disk()))
    # The server's account must get in.
    home.chmod(0o755)
    server = EmbeddedPostgres(home / "postgres")
    kept = False
    try:
        server.start()
        figures = Run(settings, server, home).play()
        if keep and figures.violations:
            kept = True
            figures.violations.append(f"look at the server in {server.directory} and the processes' words in {home}")
        return figures
    finally:
        if not kept:
            server.destroy()
            shutil.rmtree(home, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.log.faults", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="another one each time by default")
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--kills", type=int, default=None, help="by default one in 10,000 events, at least 20")
    parser.add_argument("--restarts", type=int, default=None, help="of the server; a tenth of the kills by default")
    parser.add_argument("--repartitionings", type=int, default=None, help="as many as restarts by default")
    parser.add_argument("--deadline", type=float, default=1_200.0, help="seconds")
    parser.add_argument("--keep", action="store_true", help="leave the server as it is when there are violations")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    kills = max(20, given.events // 10_000) if given.kills is None else given.kills
    restarts = max(1, kills // 10) if given.restarts is None else given.restarts
    settings = Settings(
        events=given.events,
        seed=seed,
        partitions=given.partitions,
        kills=kills,
        restarts=restarts,
        repartitionings=restarts if given.repartitionings is None else given.repartitionings,
        deadline=given.deadline,
    )
    # Before it begins: a run that hangs must be repeatable too.
    say(f"seed {seed}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures = run(settings, keep=given.keep)
    for label, figure in figures.rows():
        say(f"{label:<28}{figure:>14}")
    for violation in figures.violations:
        say(f"VIOLATION {violation}")
    return 1 if figures.violations else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
