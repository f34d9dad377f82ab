"""The shards of a platform: which there are, which can be reached, and which one takes a key."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

import psycopg

from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    DatabaseUnavailableError,
    EventSQLError,
    RegistryError,
    SchemaOutdatedError,
    ShardPendingError,
    ShardSetError,
    ShardUnavailableError,
    WrongShardError,
)
from eventsql_orchestration.log.shard_store import ShardState
from eventsql_orchestration.sharded.asking import ask
from eventsql_orchestration.sharded.chores import Chores
from eventsql_orchestration.sharded.founding import found, judge, unreached
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.probing import probe
from eventsql_orchestration.sharding import ShardSet

if TYPE_CHECKING:
    from eventsql_orchestration.platform import EventSQL

logger = logging.getLogger(__name__)

OnShardDown: TypeAlias = Literal["fail", "wait"]

Given = TypeVar("Given")

PENDING_POLL: Final = 0.05
"""Seconds between two looks whether a shard that is being added takes events."""


class Members:
    """The shards that a platform was given, checked against what they have stored at the first use."""

    def __init__(self, platforms: Iterable[EventSQL], *, migrate: bool, on_down: OnShardDown, timeout: float) -> None:
        self._members = [Member(platform) for platform in platforms]
        self._migrate = migrate
        self._waits = on_down == "wait"
        self.timeout = timeout
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._state: ShardState | None = None
        self._shards: ShardSet | None = None
        self._turns = itertools.count()
        self._chores = Chores()
        self._stop = threading.Event()
        self._of_connections: weakref.WeakKeyDictionary[Connection, str] = weakref.WeakKeyDictionary()

    @property
    def platforms(self) -> tuple[EventSQL, ...]:
        return tuple(member.platform for member in self._members)

    # Opening

    def open(self) -> ShardSet:
        """Check once that the databases are the shards of one set; make them one where they are none, if they may.

        Gives the set. Nothing is written where they do not fit. Raises `ShardSetError`, and `DatabaseUnavailableError`
        where none can be reached.
        """
        shards = self._shards
        return shards if shards is not None else self._open()

    def _open(self) -> ShardSet:
        with self._lock:
            if self._shards is not None:
                return self._shards
            states = self._look(self._members)
            if not states:
                raise self._members[0].unavailable()
            verdict = judge(
                _called(states),
                [str(member.platform.database) for member in self._members if member.down is not None],
            )
            if verdict.found:
                if not self._migrate:
                    raise SchemaOutdatedError(
                        "these databases are no set of shards yet: run `eventsql migrate` with the URLs of all of them"
                    )
                found([member.platform for member in self._members])
                states = self._look(self._members)
                verdict = judge(_called(states))
            elif verdict.missing and len(verdict.missing) == 1:
                (lost,) = (member for member in self._members if member.down is not None)
                lost.platform.shard = next(iter(verdict.missing))
            for member in states:
                member.platform.database.ensure_schema()
                if states[member].generation == 1 and not states[member].active:
                    member.store.activate()
            return self._take_in(states)

    def _look(self, members: Iterable[Member]) -> dict[Member, ShardState]:
        """What those say of themselves that can be reached; the others are down."""
        states = {}
        for member, answer in ask(members).items():
            if isinstance(answer, ShardState):
                states[member] = answer
            else:
                self.lose(member, answer)
        return states

    def _take_in(self, states: dict[Member, ShardState]) -> ShardSet:
        """Go on with the newest generation that has begun; gives its shards."""
        with self._lock:
            for member, state in states.items():
                member.platform.shard, member.active = state.name, state.active
            if any(not state.active for state in states.values()):
                self.attend(self._settle_joining)
            newest = max(states.values(), key=lambda state: (state.active, state.generation))
            known = self._state
            if known is None or (newest.active and newest.generation > known.generation):
                self._state = newest
                assert newest.shards is not None, "it is one of a set"
                self._shards = replace(newest.shards, own="", active=True)
                self._changed.notify_all()
            assert self._shards is not None, "there is a state"
            return self._shards

    def refresh(self) -> ShardSet:
        """Read again which shards there are; gives them."""
        self.open()
        states = self._look([member for member in self._members if member.down is None])
        if states:
            judge(_called(states), unreached(states.values()))
            return self._take_in(states)
        return self.open()

    def _settle_joining(self) -> None:
        """Find out when a shard that joins takes events."""
        if all(member.active for member in self._members if member.down is None):
            self.neglect(self._settle_joining)
        else:
            self.refresh()

    def add(self, platform: EventSQL) -> None:
        """Take a further shard in. Raises `ShardSetError` for one that is not of the set."""
        shards, member = self.open(), Member(platform)
        state = member.store.state()
        if state.set != shards.id:
            raise ShardSetError(f"{platform.database} is no shard of this set: add it with `eventsql shard add`")
        if any(known.platform.shard == state.name for known in self._members):
            raise ShardSetError(f"shard {state.name!r} is known already, by another URL than {platform.database}")
        with self._lock:
            self._members.append(member)
        self._take_in({member: state})

    # Which shard

    @property
    def state(self) -> ShardState:
        """The newest state, with the names of all generations."""
        self.open()
        assert self._state is not None, "it is open"
        return self._state

    def named(self, name: str) -> Member:
        """The shard of a name. Raises `ShardSetError` where its URL is not known to this process."""
        for member in self._members:
            if member.platform.shard == name:
                return member
        raise ShardSetError(
            f"this process has no URL of shard {name!r}, which joined the others: open the platform with the URLs of "
            "all of them, or tell it with `platform.add_url(…)`"
        )

    def all(self) -> list[Member]:
        """All shards, those first that were there first. Raises `ShardSetError` where a URL is not known."""
        names, ordered = self.open().names, []
        for name in names:
            joined = self.state.before(name)
            ordered.append((0 if joined is None else joined[0], name))
        return [self.named(name) for _, name in sorted(ordered)]

    def known(self) -> list[Member]:
        """The shards that this process has URLs of, as `all`, up or down."""
        self.open()
        return sorted(self._members, key=lambda member: (self.generation_of(member), member.name))

    def generation_of(self, member: Member) -> int:
        """With which generation a shard came; 0 for one that was there from the beginning."""
        joined = None if member.platform.shard is None else self.state.before(member.platform.shard)
        return 0 if joined is None else joined[0]

    def up(self) -> list[Member]:
        """The shards that can be reached, as far as is known. Raises `DatabaseUnavailableError` where none can be."""
        found = [member for member in self.known() if member.down is None]
        if not found:
            raise self._members[0].unavailable()
        return found

    def reach(self, member: Member) -> None:
        """Make sure that a shard can be reached. Raises `ShardUnavailableError`."""
        if member.down is not None:
            raise member.unavailable()
        try:
            with member.platform.database.connection():
                pass
        except DatabaseUnavailableError as error:
            self.lose(member, error)
            raise member.unavailable() from error

    def keyed(self, key: str, action: Callable[[Member, ShardSet], Given], *, topic: str) -> Given:
        """Do something on the shard of a key, with the set by which it was chosen.

        Waits, at most for the platform's `shard_timeout`, for a shard that is being added, and for one that is down
        where the platform was told to. Raises `ShardUnavailableError`, `ShardPendingError`, `ShardSetError`.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            shards = self.open()
            member = self.named(shards.owner(key))
            try:
                self.reach_in_time(member, deadline)
                return action(member, shards)
            except WrongShardError as error:
                self.reconsider(error, [topic], deadline)

    def reconsider(self, error: RegistryError, topics: Iterable[str], deadline: float) -> None:
        """After a shard refused events: find out where they belong by now. Raises `error` when time is up."""
        if time.monotonic() > deadline:
            raise error
        for topic in topics:
            for member in self._members:
                member.platform.registry.forget(topic)
        if isinstance(error, ShardPendingError):
            self._stop.wait(PENDING_POLL)
        self.refresh()

    def reach_in_time(self, member: Member, deadline: float) -> None:
        """As `reach`; where the platform waits for shards that are down, until a time of `time.monotonic`."""
        while True:
            try:
                return self.reach(member)
            except ShardUnavailableError:
                if not self._waits:
                    raise
                with self._changed:
                    up = self._changed.wait_for(lambda: member.down is None, max(0.0, deadline - time.monotonic()))
                if not up:
                    raise

    def any(self) -> Member:
        """A shard that can be reached, another one each time. Raises `DatabaseUnavailableError` where none can be."""
        self.open()
        candidates = [member for member in self._members if member.active or member.down is not None]
        first = next(self._turns) % len(candidates)
        last: ShardUnavailableError | None = None
        for member in (*candidates[first:], *candidates[:first]):
            try:
                self.reach(member)
            except ShardUnavailableError as error:
                last = error
            else:
                return member
        assert last is not None, "there are shards"
        raise last

    def of_connection(self, connection: Connection) -> Member:
        """The shard that a caller's connection leads to. Raises `ShardSetError`."""
        self.open()
        name = self._of_connections.get(connection)
        if name is None:
            with suppress(psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName), connection.transaction():
                name = self._members[0].store.name(connection)
            if name is None:
                raise ShardSetError(f"the connection leads to {connection.info.dbname!r}, which is no shard")
            self._of_connections[connection] = name
        return self.named(name)

    # Down and up

    @contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """Takes note where the shard turns out to be down in the block."""
        try:
            yield
        except DatabaseUnavailableError as error:
            self.lose(member, error)
            raise

    def lose(self, member: Member, error: EventSQLError) -> None:
        """Take a shard for down until it can be reached again."""
        with self._lock:
            if member.down is not None:
                return
            member.down, member.down_since = error, time.monotonic()
        logger.warning("shard %s is down: %s", member.name, error)
        threading.Thread(target=self._probe, args=(member,), name="eventsql-shard-probe", daemon=True).start()

    def _probe(self, member: Member) -> None:
        if probe(member, self._stop, lambda state: self._check_returned(member, state)):
            with self._changed:
                member.down = None
                self._changed.notify_all()
            logger.warning("shard %s is back", member.name)

    def _check_returned(self, member: Member, state: ShardState) -> None:
        with self._lock:
            if self._shards is None:
                return
            taken = {other.platform.shard for other in self._members if other is not member}
            if state.set != self._shards.id or state.name is None or state.name in taken:
                raise ShardSetError(f"{member.platform.database} is none of the shards {', '.join(self._shards.names)}")
            self._take_in({member: state})

    def attend(self, chore: Callable[[], object]) -> None:
        """Call `chore` again and again while this platform is open."""
        self._chores.attend(chore)

    def neglect(self, chore: Callable[[], object]) -> None:
        """Call it no more."""
        self._chores.neglect(chore)

    def close(self) -> None:
        """End the threads."""
        self._stop.set()
        self._chores.close()
        self._stop = threading.Event()


def _called(states: dict[Member, ShardState]) -> list[tuple[str, ShardState]]:
    return [(str(member.platform.database), state) for member, state in states.items()]
