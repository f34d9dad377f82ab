"""The shards of a platform: all shards, the shards that can be reached, and the shard of a key.

A platform that was opened with one URL has a cluster of one shard, and asks nothing about shards. Its callers ask for
`lone` first: `refresh`, `all`, `any`, `named` and `of_connection` need several shards.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Final, Literal, TypeAlias, TypeVar

import psycopg

from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    DatabaseUnavailableError,
    EventSQLError,
    RegistryError,
    SchemaOutdatedError,
    ShardError,
    ShardPendingError,
    ShardSetError,
    ShardUnavailableError,
    WrongShardError,
)
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.shards.background import Background
from eventsql_orchestration.shards.bootstrap import bootstrap, compare, unreached
from eventsql_orchestration.shards.health import Health, ask
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.shard_state import ShardState

OnShardDown: TypeAlias = Literal["fail", "wait"]

Given = TypeVar("Given")

ONE_SHARD: Final = "name one shard (--shard NAME, in Python platform.shards[i])"
"""The advice where only one shard can be meant."""

REPLACED_SECONDS: Final = 10.0
"""Seconds after its deadline in which an event is placed anew, if this process knew only an older set of shards."""

PENDING_POLL: Final = 0.05
"""Seconds between two checks whether a shard that is being added takes events."""


class Cluster:
    """One shard, or several. The first use checks several shards against their stored state."""

    def __init__(self, shards: Sequence[Shard], *, migrate: bool, on_down: OnShardDown, timeout: float) -> None:
        """`timeout` is how many seconds an event waits for a shard that is being added, or is down."""
        self._shards = list(shards)
        self.lone = self._shards[0] if len(self._shards) == 1 else None
        """The shard of a platform that was opened with one URL. It may be one of a set; the cluster does not ask."""
        self._migrate = migrate
        self.timeout = timeout
        self._lock = threading.RLock()
        self._state: ShardState | None = None
        self._set: ShardSet | None = None
        self._turns = itertools.count()
        self.background = Background()
        self.health = Health(wait=on_down == "wait", on_return=self._check_returned)
        self._of_connections: weakref.WeakKeyDictionary[Connection, str] = weakref.WeakKeyDictionary()
        after_fork(self, Cluster._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. The first use checks the shards again."""
        self._lock = threading.RLock()
        self._state = self._set = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Each shard, in the order of the URLs."""
        return tuple(self._shards)

    # Opening

    def open(self) -> None:
        """Connect, and check once that the databases are the shards of one set; if they are not shards, make the set.

        If they do not fit, nothing is written. Raises `ShardSetError`, and `DatabaseUnavailableError` if none can be
        reached.
        """
        if self.lone is not None:
            self.lone.database.ensure_schema()
        else:
            self.current()

    def current(self) -> ShardSet:
        """The set of the shards; opens them if needed. Raises as `open`."""
        return self._set or self._open()

    def _open(self) -> ShardSet:
        with self._lock:
            if self._set is not None:
                return self._set
            states = self._look(self._shards)
            if not states:
                raise self._shards[0].unavailable()
            down = [shard for shard in self._shards if shard.down is not None]
            compared = compare(_named(states), [str(shard.database) for shard in down])

            if compared.incomplete:
                if not self._migrate:
                    raise SchemaOutdatedError(
                        "these databases are not a set of shards yet: run `eventsql migrate` with the URLs of all of "
                        "them"
                    )
                bootstrap(self._shards)
                states = self._look(self._shards)
                compare(_named(states))
            elif len(compared.missing) == len(down) == 1:
                down[0].name = next(iter(compared.missing))

            for shard, state in states.items():
                shard.database.ensure_schema()
                if state.generation == 1 and not state.active:
                    shard.store.activate()
            return self._take_in(states)

    def _look(self, shards: Iterable[Shard]) -> dict[Shard, ShardState]:
        """The states of the shards that can be reached; the others are counted as down."""
        states = {}
        for shard, answer in ask(shards).items():
            if isinstance(answer, ShardState):
                states[shard] = answer
            else:
                self.health.lose(shard, answer)
        return states

    def _take_in(self, states: dict[Shard, ShardState]) -> ShardSet:
        """Use the newest generation that has begun; gives its shards."""
        with self._lock:
            for shard, state in states.items():
                shard.name, shard.active = state.name, state.active
            if any(not state.active for state in states.values()):
                self.background.add(self._await_joining)
            newest = max(states.values(), key=lambda state: (state.active, state.generation))
            known = self._state
            if known is None or (newest.active and newest.generation > known.generation):
                self._state = newest
                assert newest.shards is not None, "it is one of a set"
                self._set = replace(newest.shards, own="", active=True)
            assert self._set is not None, "there is a state"
            return self._set

    def refresh(self) -> None:
        """Read the set of shards again."""
        self.current()
        if states := self._look([shard for shard in self._shards if shard.down is None]):
            compare(_named(states), unreached(states.values()))
            self._take_in(states)

    def _await_joining(self) -> None:
        """Refresh until the shards that join take events."""
        if all(shard.active for shard in self._shards if shard.down is None):
            self.background.remove(self._await_joining)
        else:
            self.refresh()

    def _check_returned(self, shard: Shard, state: ShardState) -> None:
        with self._lock:
            if self._set is None:
                return
            taken = {other.name for other in self._shards if other is not shard}
            if state.set != self._set.id or state.name is None or state.name in taken:
                raise ShardSetError(
                    f"{shard.database} is none of the shards {', '.join(self._set.names)}: correct its URL"
                )
            self._take_in({shard: state})

    def add(self, shard: Shard) -> None:
        """Add a shard. Raises `ShardSetError` for a database that is not of the set."""
        if self.lone is not None:
            raise ShardSetError("this platform was opened with one URL: open it with the URLs of all shards")
        found, state = self.current(), shard.store.state()
        if state.set != found.id:
            raise ShardSetError(
                f"{shard.database} is not a shard of this set: add it with `eventsql shard add … --execute`"
            )
        with self._lock:
            if any(known.name == state.name for known in self._shards):
                raise ShardSetError(f"shard {state.name!r} is known already, by another URL than {shard.database}")
            self._shards.append(shard)
            self._take_in({shard: state})

    # Which shards

    @property
    def state(self) -> ShardState:
        """The newest state of the shards, with the names of all generations."""
        self.current()
        assert self._state is not None, "it is open"
        return self._state

    def named(self, name: str, deadline: float = 0.0) -> Shard:
        """The shard with this name. Raises `ShardSetError` if this process does not know its URL.

        If several shards were down when the platform was opened, their names are not known until they are back. Then
        this waits until `deadline` as `Health.reach` does, and raises `ShardUnavailableError`.
        """
        while True:
            nameless = None
            for shard in self._shards:
                if shard.name == name:
                    return shard
                if shard.name is None:
                    nameless = shard
            if nameless is None:
                raise ShardSetError(
                    f"this process has no URL of shard {name!r}: open the platform with it, or call "
                    "`platform.add_url(…)`"
                )
            self.health.reach(nameless, deadline)
            if nameless.name is None:
                # The platform was closed before the shard was back, and opened again.
                self.refresh()

    def owner(self, key: str, deadline: float = 0.0) -> Shard:
        """The shard of a key. Raises as `named`."""
        return self.lone or self.named(self.current().owner(key), deadline)

    def owner_if_up(self, key: str) -> Shard | None:
        """The shard of a key; None if it is not known to be up."""
        name = self.current().owner(key)
        return next((shard for shard in self._shards if shard.name == name and shard.down is None), None)

    def all(self) -> list[Shard]:
        """All shards, the oldest first. Raises as `named`."""
        return sorted(map(self.named, self.current().names), key=self._age)

    def known(self) -> list[Shard]:
        """The shards whose URLs this process has, the oldest first, up or down."""
        if self.lone is not None:
            return [self.lone]
        self.current()
        return sorted(self._shards, key=self._age)

    def _age(self, shard: Shard) -> tuple[int, str]:
        return self.generation_of(shard), shard.label

    def generation_of(self, shard: Shard) -> int:
        """The generation with which a shard joined; 0 for a shard of the first generation."""
        joined = None if shard.name is None or self.lone is not None else self.state.before(shard.name)
        return 0 if joined is None else joined[0]

    def members(self) -> list[Shard]:
        """The known shards except prepared shards, which may lack topics and consumers."""
        if self.lone is not None:
            return [self.lone]
        members: set[str | None] = {*self.current().names}
        if not members.issubset(shard.name for shard in self._shards):
            members.add(None)
        return [shard for shard in self.known() if shard.active or shard.name in members]

    def up(self) -> list[Shard]:
        """The members that are not known to be down. Raises `DatabaseUnavailableError` if all are down."""
        found = [shard for shard in self.members() if shard.down is None]
        if not found:
            raise self._shards[0].unavailable()
        return found

    def reachable(self) -> dict[str, Shard]:
        """The shards that are not known to be down, by name; there may be none."""
        return {shard.label: shard for shard in self.known() if shard.down is None}

    # Doing something on several

    def using(self, shard: Shard) -> AbstractContextManager[None]:
        """Count one of several shards as down if the block finds it down."""
        return nullcontext() if self.lone is not None else self.health.watching(shard)

    def each_up(self, action: Callable[[Shard], Given]) -> list[tuple[Shard, Given]]:
        """Call `action` on one member after the other, without shards that are down, or go down meanwhile.

        Raises the first error of another kind, and `DatabaseUnavailableError` if no shard is left.
        """
        done, lost = list[tuple[Shard, Given]](), None
        for shard in self.up():
            try:
                with self.using(shard):
                    done.append((shard, action(shard)))
            except DatabaseUnavailableError as error:
                lost = error
        if lost is not None and not done:
            raise lost
        return done

    def fan_out(self, action: Callable[[Shard], Given]) -> dict[Shard, Given]:
        """Call `action` on all shards, the oldest first; gives each result. A shard that joins meanwhile is included.

        Raises the first shard's error; `ShardUnavailableError` if a shard is down, before `action` is called;
        `ShardError` if a shard fails after another has succeeded.
        """
        if self.lone is not None:
            return {self.lone: action(self.lone)}
        done: dict[Shard, Given] = {}
        while True:
            self.refresh()
            left = [shard for shard in self.all() if shard not in done]
            if not left:
                return done
            for shard in left:
                self.health.reach(shard)
            for shard in left:
                try:
                    with self.using(shard):
                        done[shard] = action(shard)
                except EventSQLError as error:
                    if not done:
                        raise
                    names = ", ".join(each.label for each in done)
                    raise ShardError(
                        f"shard {shard.label!r} failed, after {names} succeeded: {error}; do it again"
                    ) from error

    # Which one of several

    def placed(self, key: str | None, action: Callable[[Shard, ShardSet], Given], *, topic: str) -> Given:
        """Call `action` with the shard of a key, or any shard without a key, and the set of the shards.

        Waits up to `timeout` for a shard that is being added; with `on_down="wait"`, also for a shard that is down.
        Raises `ShardUnavailableError`, `ShardPendingError`, `ShardSetError`.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            current = self.current()
            shard = self.any() if key is None else self.named(current.owner(key), deadline)
            try:
                if key is not None:
                    self.health.reach(shard, deadline)
                with self.using(shard):
                    return action(shard, current)
            except WrongShardError as error:
                self.reconsider(error, [topic], deadline)

    def reconsider(self, error: RegistryError, topics: Iterable[str], deadline: float) -> None:
        """Read the shards again after a shard refused events. Raises `error` if the deadline is over.

        A set of shards that was only old needs no waiting: for `REPLACED_SECONDS` after the deadline, the next attempt
        uses the new set, and so does the next call in any case.
        """
        replaced = isinstance(error, WrongShardError) and not isinstance(error, ShardPendingError)
        late = time.monotonic() > deadline + (REPLACED_SECONDS if replaced else 0.0)
        if late and not replaced:
            raise error
        for topic in topics:
            for shard in self._shards:
                shard.registry.forget(topic)
        if isinstance(error, ShardPendingError):
            self.health.stop.wait(PENDING_POLL)
        self.refresh()
        if late:
            raise error

    def any(self) -> Shard:
        """A shard that can be reached, in turns. Raises `DatabaseUnavailableError` if none can be reached."""
        self.current()
        candidates = [shard for shard in self._shards if shard.active or shard.down is not None]
        first = next(self._turns) % len(candidates)
        last: ShardUnavailableError | None = None
        for shard in (*candidates[first:], *candidates[:first]):
            try:
                # Do not wait for this shard: another can take the event.
                self.health.reach(shard)
            except ShardUnavailableError as error:
                last = error
            else:
                return shard
        assert last is not None, "there are shards"
        raise last

    def of_connection(self, connection: Connection) -> Shard:
        """The shard that a caller's connection leads to. Raises `ShardSetError`."""
        self.current()
        name = self._of_connections.get(connection)
        if name is None:
            with suppress(psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName), connection.transaction():
                name = self._shards[0].store.name(connection)
            if name is None:
                raise ShardSetError(
                    f"the connection leads to {connection.info.dbname!r}, which is not a shard: pass one to a shard"
                )
            self._of_connections[connection] = name
        return self.named(name)

    # Closing

    def close(self) -> None:
        """End the threads."""
        self.health.close(self._shards)
        self.background.close()


def _named(states: dict[Shard, ShardState]) -> list[tuple[str, ShardState]]:
    return [(str(shard.database), state) for shard, state in states.items()]
