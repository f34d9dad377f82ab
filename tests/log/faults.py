"""The fault run: processes are killed and servers restart while keyed events flow; then all must be there once.

`python -m tests.log.faults --events 1000000 --seed 7` runs it on a server of its own whose settings are those that a
user gets, fsync among them. Publishers of every kind, transfers, consumers of every kind and a reader run as processes
of their own. By how many events are acknowledged, the seed decides which of them is killed when, when a server stops in
immediate mode or is killed (all of it, its postmaster or one session), and when the topic gets another number of
partitions. With `--pooled`, the processes reach the server through a PgBouncer, which is killed too. With `--standby`,
the server has a synchronous standby: the server is lost once, the standby is promoted, and the processes find it.

With `--shards 2`, it begins with two shards, one on each of two servers; every shard that is added goes to the server
with the fewer. The seed also decides when a shard is added, whether its operator is killed in the middle, and whether
the others hear of the new database before or after it takes events.

It prints what happened, and ends with 1 and the first violations when a promise of the log was broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Wire
from pathlib import Path
from typing import Any, Final, TypeAlias

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseError, ShardError
from eventsql_orchestration.model import STORAGES, Storage
from tests.fixtures import memory_disk
from tests.log import playing, verdict
from tests.log.numbered import TOPIC, Progress, replace
from tests.log.plan import (
    FORM,
    PARTITIONS,
    POOLER,
    PROMOTION,
    SERVER,
    SHARD,
    Player,
    Settings,
    faults,
    players,
    publishers,
)
from tests.log.playing import followed, make_tables
from tests.log.servers import WAYS, Pair
from tests.log.verdict import AS_A_QUEUE, CONSUMERS
from tests.poolers.pgbouncer import PgBouncer, running
from tests.waiting import PATIENCE

MOST_PARTITIONS: Final = 12

MOST_VIOLATIONS: Final = 20

AHEAD: Final = 0.1
"""How far publishers go on during a fault, as a share of all events: it takes its time and is to meet events."""

OPERATOR: Final = "operator"

OPERATION_SECONDS: Final = 120.0
"""The longest that an operator may take to add a shard."""

STEPS: Final = 6
"""An operator dies after one of this many steps of an addition, if there are as many."""


@dataclass(slots=True)
class Figures:
    """What came of a run; `moved` is how many keys moved to another shard in the middle of their events."""

    settings: Settings
    published_seconds: float = 0.0
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    changes: int = 0
    layouts: list[int] = field(default_factory=list)
    shards: int = 0
    moved: int = 0
    effects: int = 0
    violations: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """Label and figure."""
        settings = self.settings
        return [
            ("seed", str(settings.seed)),
            ("events", f"{settings.events:,}"),
            ("partitions", ", ".join(map(str, self.layouts or [settings.partitions]))),
            ("shards", f"{settings.shards} to {self.shards}"),
            ("keys that moved", f"{self.moved:,}"),
            *((f"kills: {kind}", str(count)) for kind, count in sorted(self.kills.items())),
            ("kills", str(self.kills.total())),
            *((f"server: {way.replace('_', ' ')}", str(count)) for way, count in sorted(self.restarts.items())),
            ("changes of the form", str(self.changes)),
            ("effects", f"{self.effects:,}"),
            ("seconds until published", f"{self.published_seconds:.1f}"),
            ("seconds until consumed", f"{self.seconds:.1f}"),
            ("events/s", f"{settings.events / self.seconds:,.0f}" if self.seconds else "-"),
            ("violations", f"{len(self.violations)}" if self.violations else "none"),
        ]


# The run


class RunEndedError(Exception):
    """The run cannot go on: a process ended by itself, or the deadline has come."""


_Playing: TypeAlias = "tuple[multiprocessing.context.ForkServerProcess, Wire[str, str]]"


class Cast:
    """The processes of a run; one that is killed is followed by another in its role."""

    def __init__(self, players: Sequence[Player], urls: Path, home: Path) -> None:
        self.players = {player.name: player for player in players}
        self._urls = urls
        self._home = home
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["eventsql_orchestration.shards.shard", playing.__name__])
        self._playing = {player.name: self._start(player) for player in players}

    def _start(self, player: Player) -> _Playing:
        wire, theirs = self._context.Pipe()
        log = self._home / f"{player.name}.log"
        process = self._context.Process(
            target=play, args=(theirs, log, player.role, str(self._urls), *map(str, player.arguments)), daemon=True
        )
        process.start()
        theirs.close()
        return process, wire

    def kill_and_follow(self, name: str) -> bool:
        """Kill a process and start another in its role; False when it had done its part and ended."""
        process, wire = self._playing[name]
        process.kill()
        process.join(60)
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
                raise RunEndedError(f"{name} ended by itself with {process.exitcode}: {self.last_words(name)}")

    def last_words(self, name: str, lines: int = 4) -> str:
        """The last lines that a process has written."""
        log = self._home / f"{name}.log"
        if not log.exists():
            return "it ended before it played its role, and said why on the standard error of this program"
        return " | ".join(log.read_text(errors="replace").splitlines()[-lines:]) or "it said nothing"

    def published(self) -> bool:
        return not any(
            process.is_alive() for name, (process, _) in self._playing.items() if self.players[name].role == "publish"
        )

    def end(self) -> None:
        """Tell all to end; raise `RunEndedError` when one does not, or fails."""
        for process, wire in self._playing.values():
            if process.is_alive():
                wire.send("end")
        for name, (process, _) in self._playing.items():
            process.join(PATIENCE)
            if process.exitcode != 0:
                raise RunEndedError(f"{name} was told to end and came to {process.exitcode}: {self.last_words(name)}")

    def close(self) -> None:
        for process, wire in self._playing.values():
            process.kill()
            process.join(60)
            process.close()
            wire.close()


def _say_to(log: Path) -> None:
    """Write this process's log to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable()


def play(wire: Wire[str, str], log: Path, role: str, urls: str, *arguments: str) -> None:
    """The whole life of a process."""
    _say_to(log)
    playing.play(wire, role, urls, *arguments)


def operate(log: Path, old: list[str], new: str, dies_after: int | None, only_prepare: bool) -> None:
    """The whole life of an operator, which says where it stands if it takes too long."""
    _say_to(log)
    faulthandler.dump_traceback_later(OPERATION_SECONDS * 0.4, repeat=True)
    playing.add(old, new, dies_after, only_prepare)


class Run:
    """One run from its tables to its verdict."""

    def __init__(
        self, settings: Settings, servers: Sequence[EmbeddedPostgres], poolers: Sequence[PgBouncer], pair: Pair | None,
        home: Path,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._servers = servers
        self._pair = pair
        self._poolers = poolers
        self._home = home
        self._urls = home / "urls"
        self._publishers = publishers(settings)
        self._drawn = random.Random(settings.seed)
        self._partitions = settings.partitions
        self._ways = itertools.cycle(self._drawn.sample(WAYS, len(WAYS)))
        self._started = time.monotonic()
        self.figures = Figures(settings)

    def play(self) -> Figures:
        dsns = [self._create() for _ in range(self._settings.shards)]
        replace(self._urls, "\n".join(dsns))
        with EventSQL(*dsns, transfer=False) as platform:
            self._prepare(platform)
            cast = Cast(players(self._settings, self._home), self._urls, self._home)
            try:
                self._break(cast, platform)
                self._until(cast, cast.published)
                self.figures.published_seconds = time.monotonic() - self._started
                self._until(cast, lambda: self._consumed(platform))
                self.figures.seconds = time.monotonic() - self._started
                cast.end()
            except RunEndedError as error:
                self.figures.violations.append(str(error))
                self.figures.violations.extend(_where_it_stands(platform))
            finally:
                cast.close()
            if not self.figures.violations:
                self._judge(platform)
        return self.figures

    def _create(self) -> str:
        """A database for one more shard."""
        number = self.figures.shards % len(self._servers)
        self.figures.shards += 1
        name = f"faults_{self.figures.shards}"
        dsn = self._servers[number].create_database(name)
        if self._pair is not None:
            return self._pair.url(name)
        return self._poolers[number].url(dsn) if self._poolers else dsn

    def _prepare(self, platform: EventSQL) -> None:
        platform.registry.register_topic(Topic(TOPIC, self._settings.partitions, storage=self._settings.storage))
        for role, consumer in self._settings.consumers.items():
            platform.registry.register_consumer(Consumer(TOPIC, consumer, partitioned=role != "consume_claims"))
        for dsn in self._urls.read_text().split():
            make_tables(dsn)
        self._progress = Progress(self._home / "progress")
        self._progress.set_limit(0.0)
        self._progress.create([(publisher.events, publisher.keys) for publisher in self._publishers])
        self._started = time.monotonic()

    def _break(self, cast: Cast, platform: EventSQL) -> None:
        names = {player.name: player.kind for player in cast.players.values()}
        for fault in faults(self._settings, names):
            self._progress.set_limit(fault.at / self._settings.events + AHEAD)
            self._until(cast, lambda at=fault.at: self._acknowledged() >= at)  # type: ignore[misc]  # bound
            if fault.name == SERVER:
                way = next(self._ways)
                way(self._drawn.choice(self._servers), self._drawn)
                self.figures.restarts[way.__name__] += 1
            elif fault.name == POOLER:
                pooler = self._drawn.choice(self._poolers)
                pooler.stop()
                pooler.start()
                self.figures.kills[POOLER] += 1
            elif fault.name == PROMOTION and self._pair is not None:
                self._pair.promote()
                self.figures.restarts[PROMOTION] += 1
            elif fault.name == PARTITIONS:
                self._repartition(cast, platform)
            elif fault.name == FORM:
                self._change_form(cast, platform)
            elif fault.name == SHARD:
                self._add_shard(cast, platform)
            elif cast.kill_and_follow(fault.name):
                self.figures.kills[names[fault.name]] += 1
        self._progress.set_limit(1.0)

    def _repartition(self, cast: Cast, platform: EventSQL) -> None:
        others = [each for each in range(1, MOST_PARTITIONS + 1) if each != self._partitions]
        self._partitions = partitions = self._drawn.choice(others)

        def repartitioned() -> bool:
            try:
                platform.repartitioner.repartition(TOPIC, partitions)
            except (DatabaseError, ShardError):
                # A shard was down a moment ago: it is done again, as its operator is told.
                return False
            return True

        self._until(cast, repartitioned)

    def _change_form(self, cast: Cast, platform: EventSQL) -> None:
        storage: Storage | None = None

        def changed() -> bool:
            nonlocal storage
            try:
                storage = storage or ("rows" if platform.registry.topic(TOPIC).storage == "blocks" else "blocks")
                platform.registry.set_storage(TOPIC, storage, timeout=5.0)
            except (DatabaseError, ShardError):
                # A batch or a lost server was in the way: it is done again, as its operator is told.
                return False
            return True

        self._until(cast, changed)
        self.figures.changes += 1

    def _add_shard(self, cast: Cast, platform: EventSQL) -> None:
        old, new = self._urls.read_text().split(), self._create()
        early, dies_after = self._drawn.random() < 0.5, self._drawn.randint(1, STEPS)
        self._operate(cast, old, new, dies_after if dies_after % 2 else None, only_prepare=True)
        make_tables(new)
        if early:
            replace(self._urls, "\n".join([*old, new]))
        self._operate(cast, old, new, dies_after, only_prepare=False)
        replace(self._urls, "\n".join([*old, new]))
        platform.add_url(new)

    def _operate(self, cast: Cast, old: list[str], new: str, dies_after: int | None, *, only_prepare: bool) -> None:
        """Add a shard by an operator that dies in between, and by as many others as it takes."""
        context = multiprocessing.get_context("forkserver")
        outcomes: list[int | None] = []

        def added() -> bool:
            first = dies_after if not outcomes else None
            process = context.Process(
                target=operate, args=(self._home / f"{OPERATOR}.log", old, new, first, only_prepare), daemon=True
            )
            process.start()
            process.join(OPERATION_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join(60)
                raise RunEndedError(f"the addition of a shard has not ended for {OPERATION_SECONDS:g} s")
            outcomes.append(process.exitcode)
            process.close()
            return outcomes[-1] == 0

        try:
            self._until(cast, added)
        except RunEndedError as error:
            came_to = ", ".join(map(str, outcomes))
            raise RunEndedError(f"{error}; operators came to {came_to}: {cast.last_words(OPERATOR, 40)}") from error

    def _until(self, cast: Cast, condition: Callable[[], bool]) -> None:
        while not condition():
            cast.check()
            if time.monotonic() - self._started > self._settings.deadline:
                done = f"{self._acknowledged():,} of {self._settings.events:,} events are acknowledged"
                raise RunEndedError(f"the run is not done after {self._settings.deadline:g} s: {done}")
            time.sleep(0.01)

    def _acknowledged(self) -> int:
        return sum(acknowledged for _, _, acknowledged in self._progress.all())

    def _consumed(self, platform: EventSQL) -> bool:
        """Whether all that there is was consumed and seen: events that are lost are not waited for."""
        time.sleep(0.1)
        try:
            return (
                not platform.held_back()
                and not platform.buffered()
                and not any(lag.events or lag.cause == "unreachable" for lag in platform.lag(TOPIC))
                and all(
                    followed(self._home, shard.name).stat().st_size // 8 >= shard.reader.count(TOPIC)
                    for shard in platform.shards
                )
            )
        except (DatabaseError, ShardError, FileNotFoundError):
            return False

    def _judge(self, platform: EventSQL) -> None:
        expected: dict[str, int] = {}
        for publisher in self._publishers:
            expected |= publisher.of_keys()
        violations = verdict.check(platform, expected, self._home, self._settings.consumers.values())
        self.figures.violations.extend(itertools.islice(violations, MOST_VIOLATIONS))
        self.figures.effects = self._settings.events * len(self._settings.consumers)
        self.figures.layouts = [each.partitions for each in platform.shards[0].layouts.of(TOPIC)]
        self.figures.moved = verdict.moved(platform)


def _where_it_stands(platform: EventSQL) -> Iterator[str]:
    try:
        yield f"held back: {platform.held_back()}; the buffers: {platform.buffered()}"
        for shard in platform.shards:
            yield f"{shard.name or 'the log'} has {shard.reader.count(TOPIC):,} events"
        for lag in platform.lag(TOPIC):
            if lag.events:
                where = f"{lag.consumer}[{lag.partition}] on {lag.shard} is at {lag.last_event_id}"
                yield f"{where}, {lag.events} behind: {lag.cause} {lag.detail}"
    except (DatabaseError, ShardError) as error:
        yield f"the databases do not say where it stands: {error}"


# The program


def run(settings: Settings, *, keep: bool = False) -> Figures:
    """Play a run on servers as a user gets them, in a directory of their own, of which nothing is left at the end.

    With `keep`, both stay where there were violations, to be looked at.
    """
    home = Path(tempfile.mkdtemp(prefix="eventsql-faults-", dir=memory_disk()))
    # The servers' account must get in.
    home.chmod(0o755)
    servers = [EmbeddedPostgres(home / f"postgres-{number}") for number in range(settings.shards)]
    standby = EmbeddedPostgres(home / "standby")
    kept = False
    try:
        with ExitStack() as stack:
            dsns = [server.start().dsn for server in servers]
            # As many connections to the server as there are processes: a consumer holds one while it handles.
            poolers = [stack.enter_context(running(dsn, servers=20)) for dsn in dsns if settings.pooled]
            pair = Pair(servers[0], standby) if settings.standby else None
            figures = Run(settings, servers, poolers, pair, home).play()
        if keep and figures.violations:
            kept = True
            figures.violations.append(f"look at the servers and the processes' words in {home}")
        return figures
    finally:
        if not kept:
            for server in (*servers, standby):
                server.destroy()
            shutil.rmtree(home, ignore_errors=True)


def settings_of(arguments: Sequence[str] | None) -> tuple[Settings, bool]:
    """The run that a command line asks for, and whether it keeps its servers."""
    parser = argparse.ArgumentParser(prog="python -m tests.log.faults", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--shards", type=int, default=1, help="each on a server of its own")
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--kills", type=int, default=None, help="by default one in 10,000 events, at least 20")
    parser.add_argument("--restarts", type=int, default=None, help="of servers; a tenth of the kills by default")
    parser.add_argument("--repartitionings", type=int, default=None, help="as many as restarts by default")
    parser.add_argument("--changes", type=int, default=None, help="of the log's form, as many as restarts by default")
    parser.add_argument("--additions", type=int, default=None, help="of shards; two by default if there are several")
    parser.add_argument("--deadline", type=float, default=1_200.0, help="seconds")
    parser.add_argument("--storage", choices=STORAGES, default="blocks", help="the form of the log")
    parser.add_argument("--queue", action="store_true", help="consume the topic as a queue, and in no other way")
    parser.add_argument("--pooled", action="store_true", help="have a PgBouncer before each server")
    parser.add_argument("--standby", action="store_true", help="lose the server once, and promote its standby")
    parser.add_argument("--keep", action="store_true", help="leave the servers as they are when there are violations")
    given = vars(parser.parse_args(arguments))
    keep = given.pop("keep")

    kills = given["kills"] if given["kills"] is not None else max(20, given["events"] // 10_000)
    defaults = {
        "kills": kills, "restarts": max(1, kills // 10), "additions": 2 if given["shards"] > 1 else 0,
    }  # fmt: skip
    chosen: dict[str, Any] = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    for name in ("repartitionings", "changes"):
        if chosen[name] is None:
            chosen[name] = chosen["restarts"]
    consumers = AS_A_QUEUE if chosen.pop("queue") else CONSUMERS
    return Settings(**chosen, consumers=consumers), keep


def main(arguments: Sequence[str] | None = None) -> int:
    settings, keep = settings_of(arguments)
    # Before it begins: a run that hangs must be repeatable too.
    say(f"seed {settings.seed}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures = run(settings, keep=keep)
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
