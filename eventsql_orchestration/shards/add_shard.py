"""Adding a shard while events flow: each key that moves to it keeps its order.

1. *Prepared*: the new database gets its name, the topics and the consumers, and takes no events. Nobody else notices.
2. *Fenced*, one shard after the other: a transaction that keeps its publishers waiting notes where each log ends and
   the new generation. Whoever published by the old one finds out in his next transaction. Keys that move wait from
   then on; all others go on. What is published over several shards at once comes to lie before the fence of each
   (decisions.py): there is no fence while a part of it is open.
3. *Active*, when all are fenced: one row in the new database decides. The keys that moved go on, there.
4. *Held back*: each consumer gets the new shard's events once it has consumed what lies before the fences.

Every step finds out what is done already, so whoever dies in between runs the same again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.errors import InvalidNameError, ShardSetError
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.shard_store import ShardState, ShardStore
from eventsql_orchestration.model import NOT_PARTITIONED, Consumer, Retention, Topic
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.rules import check_name
from eventsql_orchestration.sharded.decisions import Decisions

logger = logging.getLogger(__name__)

FIRST: Final = "shard-1"
"""The name that a database gets which had no other shards beside it until now."""

ABANDONED_SECONDS: Final = 5.0
"""After so long, a publication over several shards that is announced and not decided is given up for a fence. It could
not take place after that in any case: its events were placed by the generation before."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What adding a shard takes, as it stands: `name` joins `names` with `generation`.

    `share` is the part of the keys that move to it. `prepared`, `fenced` (the shards that are) and `active` say how far
    it is.
    """

    name: str
    names: tuple[str, ...]
    generation: int
    share: float
    topics: int
    consumers: int
    prepared: bool
    fenced: tuple[str, ...]
    active: bool


class ShardAddition:
    """Adds the database of `new` to the shards of `old`, each a platform on one database."""

    def __init__(
        self,
        old: Sequence[EventSQL],
        new: EventSQL,
        *,
        name: str | None = None,
        on_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        """`name` is the new shard's; by default the next free `shard-N`. `on_step` is told what was done."""
        self._old = list(old)
        self._new = new
        self._stores = {id(platform): ShardStore(platform.database) for platform in (*old, new)}
        self._name = None if name is None else check_name("shard name", name)
        self._on_step = on_step

    def plan(self) -> Addition:
        """What is to be done and what is done; nothing is written.

        Raises `ShardSetError` where these databases cannot become one set, `DatabaseUnavailableError` where one cannot
        be reached.
        """
        states = [self._state(platform) for platform in self._old]
        new = self._state(self._new)
        before = self._before(states, new)
        generation = len(before) + 1
        names = before[-1] if before else frozenset({FIRST})
        generation = max(generation, 2)
        name = self._named(names, new)
        self._check_new(states, new, names, name)
        fenced = tuple(state.name or FIRST for state in states if state.generation >= generation)
        registry = self._old[0].registry
        topics = registry.topics() if self._old[0].database.revision() is not None else []
        consumers = {(state.topic, state.name) for state in registry.consumers()} if topics else set()
        return Addition(
            name, tuple(sorted(names)), generation, 1 / (len(names) + 1), len(topics), len(consumers),
            new.name is not None, fenced, new.active,
        )  # fmt: skip

    def execute(self, *, only_prepare: bool = False) -> Addition:
        """Add it, or go on where an attempt before this one ended; with `only_prepare`, not so far that others notice.

        Raises as `plan`, and `DatabaseBusyError` where publishers' transactions do not end: run it again.
        """
        plan = self.plan()
        if plan.active:
            # What an operator before this one may not have come to.
            self._define()
            return plan
        self._found(plan)
        self._prepare(plan)
        if only_prepare:
            return self.plan()
        names = [*plan.names, plan.name]
        named = {self._state(platform).name or "": platform for platform in self._old}
        decisions = Decisions(lambda: named)
        for name, platform in sorted(named.items()):
            if self._store(platform).fence(
                plan.generation, names, platform.transfer,
                finish=lambda: decisions.finish(abandoned_after=ABANDONED_SECONDS),
            ):  # fmt: skip
                self._on_step(f"shard {name!r} is fenced")
        # What was registered meanwhile, by those who did not know of it.
        self._define()
        self._store(self._new).activate()
        self._on_step(f"shard {plan.name!r} is active")
        return self.plan()

    def _store(self, platform: EventSQL) -> ShardStore:
        return self._stores[id(platform)]

    def _state(self, platform: EventSQL) -> ShardState:
        return self._store(platform).state()

    # Looking

    def _before(self, states: Sequence[ShardState], new: ShardState) -> tuple[frozenset[str], ...]:
        """The generations without the one that is to begin. Raises `ShardSetError` where the old are not one set."""
        identities = [state.identity for state in (*states, new)]
        if len(set(identities)) < len(identities):
            raise ShardSetError("two of the URLs lead to one database: name each once")
        if all(state.shards is None for state in states):
            if len(states) > 1:
                raise ShardSetError("these databases are no set of shards yet: make it with `eventsql migrate`")
            return ()
        if any(state.set != states[0].set or not state.active for state in states):
            raise ShardSetError(
                "the databases before it are not all shards of one set that is made: `eventsql shard list`"
            )
        newest = max((state.generations for state in states), key=len)
        # The newest one is to be finished where it began on some of them only, or its shard is this one.
        unfinished = {state.generation for state in states} != {len(newest)} or (
            new.name in newest[-1] and new.generation == len(newest) and len(newest) > 1
        )
        before = newest[:-1] if unfinished else newest
        given = {state.name for state in states}
        if given != set(before[-1]):
            lacking, further = set(before[-1]) - given, newest[-1] - before[-1]
            if not lacking and not further:
                raise ShardSetError(f"the shards are {', '.join(sorted(before[-1]))}: name each of them once")
            raise ShardSetError(
                f"the shards are {', '.join(sorted(before[-1]))}, and no URL leads to "
                f"{', '.join(sorted(lacking)) or 'all of them'}: name them all before the command, --dsn URL for each"
            )
        return before

    def _named(self, names: frozenset[str], new: ShardState) -> str:
        if new.name is not None:
            if self._name not in {None, new.name}:
                raise ShardSetError(f"{self._new.database} is shard {new.name!r} already, and keeps that name")
            return new.name
        if self._name in names:
            raise ShardSetError(f"there is a shard {self._name!r} already: take another name")
        if self._name is not None and self._name.isdecimal():
            # Offsets of Spark's tell shards from partitions, and "0" stands there for a database that is no shard.
            raise InvalidNameError(f"shard name {self._name!r} is a number, as partitions are: take another name")
        free = (f"shard-{number}" for number in range(len(names) + 1, 2 * len(names) + 2))
        return self._name or next(name for name in free if name not in names)

    def _check_new(self, states: Sequence[ShardState], new: ShardState, names: frozenset[str], name: str) -> None:
        wanted = names | {name}
        for state in states:
            if state.generation and state.generations[-1] not in (names, wanted):
                others = state.generations[-1] - names
                raise ShardSetError(
                    f"shard {', '.join(sorted(others))} is being added: finish that first, with its URL"
                )
        if new.name is None and new.topics:
            raise ShardSetError(
                f"{self._new.database} has {new.topics} topics of its own: a database that is added has to be empty"
            )
        if new.name is None and any(len(state.generations) > 1 and name in state.generations[-1] for state in states):
            raise ShardSetError(f"shard {name!r} is being added and is not {self._new.database}: give its URL")
        if new.name is not None and (
            (new.generations[-1] != wanted and not new.active)
            or (states[0].set is not None and states[0].set != new.set)
        ):
            raise ShardSetError(f"{self._new.database} belongs to another set of shards")

    # Doing

    def _found(self, plan: Addition) -> None:
        """Make a database that had no shards beside it the first of a set."""
        if len(self._old) > 1 or self._state(self._old[0]).name is not None:
            return
        self._old[0].database.ensure_schema()
        with self._store(self._old[0]).founding() as (state, founding):
            if state.name is None:
                founding.become(FIRST, str(uuid.uuid4()), [frozenset(plan.names)], active=True)
        self._on_step(f"{self._old[0].database} is shard {FIRST!r}")

    def _prepare(self, plan: Addition) -> None:
        old = self._state(self._old[0])
        assert old.set is not None, "it is a shard"
        generations = [*old.generations[: plan.generation - 1], frozenset({*plan.names, plan.name})]
        self._new.database.ensure_schema()
        with self._store(self._new).founding() as (state, founding):
            if state.name is None:
                if state.topics:
                    raise ShardSetError(f"{self._new.database} got topics meanwhile: a database that is added is empty")
                founding.become(plan.name, old.set, generations, active=False)
        self._define()
        self._on_step(f"shard {plan.name!r} is prepared")

    def _define(self) -> None:
        """Give the new shard the topics and consumers that all others have."""
        registry = self._old[0].registry
        existing = {topic.name: topic for topic in self._new.registry.topics()}
        for topic in registry.topics():
            if topic.name not in existing:
                self._new.registry.register_topic(
                    Topic(topic.name, topic.partitions, retention=topic.retention or Retention())
                )
            elif existing[topic.name].partitions != topic.partitions:
                self._repartition(topic)
        known = {(state.topic, state.name) for state in self._new.registry.consumers()}
        for state in registry.consumers():
            if (state.topic, state.name) not in known:
                known.add((state.topic, state.name))
                _register(self._new.registry, state.topic, state.name, registry)

    def _repartition(self, topic: Topic) -> None:
        if topic.partitioned:
            self._new.repartitioner.repartition(topic.name, topic.partitions)


def _register(new: Registry, topic: str, name: str, old: Registry) -> None:
    state = old.consumer(topic, name)[0]
    consumer = Consumer(topic, name, partitioned=state.partition != NOT_PARTITIONED)
    new.register_consumer(consumer, max_attempts=state.max_attempts, filter=state.filter, held=True)
    if state.paused:
        new.pause(topic, name)


__all__ = ["Addition", "ShardAddition"]
