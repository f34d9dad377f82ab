"""Adding a shard while events flow: each key that moves to it keeps its order.

1. *Prepared*: the new database gets its name, the topics and the consumers, and takes no events. No other process
   notices.
2. *Fenced*, one shard after the other: a transaction makes publishers wait, and notes where each log ends and the new
   generation. A publisher of the old generation finds out in its next transaction. Keys that move wait from then on;
   all other keys go on. A publication over several shards comes before the fence of each shard: there is no fence
   while a part of it is open (two_phase_coordinator.py).
3. *Active*, when all shards are fenced: one row in the new database decides. The keys that moved go on there.
4. *Held back*: each consumer gets the new shard's events after it has consumed the events before the fences.

Every step finds out what is done already. If the command dies, run it again. Run it again, too, after an older shard
was restored from a backup that does not know of the new shard: the older shard is fenced anew.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.errors import InvalidNameError, ShardSetError
from eventsql_orchestration.shards.bootstrap import unnamed
from eventsql_orchestration.shards.definitions import define
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.shard_state import ShardState
from eventsql_orchestration.shards.two_phase_coordinator import SUPERSEDED_SECONDS, TwoPhaseCoordinator
from eventsql_orchestration.validation import check_name

logger = logging.getLogger(__name__)

FIRST: Final = "shard-1"
"""The name of a database that becomes the first shard of a set."""


@dataclass(frozen=True, slots=True)
class Addition:
    """The addition of a shard, as it stands: `name` joins `names` with `generation`.

    `share` is the part of the keys that move to the shard. `prepared`, `fenced` (the fenced shards) and `active` say
    how far the addition is.
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
    """Adds the database of `new` to the shards `old`."""

    def __init__(
        self, old: Sequence[Shard], new: Shard,
        *, name: str | None = None, on_step: Callable[[str], None] = lambda _step: None,
    ) -> None:  # fmt: skip
        """`name` is the new shard's; by default the next free `shard-N`. `on_step` gets a text after each step."""
        self._old = list(old)
        self._new = new
        self._name = None if name is None else check_name("shard name", name)
        self._on_step = on_step

    def plan(self) -> Addition:
        """The steps that are done and the steps that are left; nothing is written.

        Raises `ShardSetError` if these databases cannot become one set, `DatabaseUnavailableError` if one cannot be
        reached.
        """
        new = self._new.store.state()
        found = [(shard, shard.store.state()) for shard in self._old]
        if new.name is not None and new.name not in new.generations[0]:
            # Every process gets the URL of a prepared shard beside the others, the operator's own environment too.
            found = [(shard, state) for shard, state in found if state.identity != new.identity]
            if not found:
                raise unnamed(new.generations[-1], {new.name})
        self._old, states = [shard for shard, _ in found], [state for _, state in found]
        before = self._before(states, new)
        generation, names = len(before) + 1, before[-1]
        name = self._named(names, new)
        self._check_new(states, new, before, name)
        fenced = tuple(state.name or FIRST for state in states if state.generation >= generation)
        registry = self._old[0].registry
        topics = registry.topics() if self._old[0].database.revision() is not None else []
        consumers = {(state.topic, state.name) for state in registry.consumers()} if topics else set()
        if topics and states[0].name is None:
            with self._old[0].database.pooled() as connection:
                self._old[0].store.refuse_captures(connection)
        return Addition(
            name, tuple(sorted(names)), generation, 1 / (len(names) + 1), len(topics), len(consumers),
            new.name is not None, fenced, new.active,
        )  # fmt: skip

    def execute(self, *, only_prepare: bool = False) -> Addition:
        """Add the shard, or continue an earlier attempt; with `only_prepare`, stop before other processes notice.

        Raises as `plan`, and `DatabaseBusyError` if publishers' transactions do not end: run it again.
        """
        plan = self.plan()
        if plan.active and len(plan.fenced) == len(plan.names):
            # An earlier attempt may have ended before this step.
            define(self._old[0].registry, self._new, active=True)
            return plan
        for shard in self._old:
            shard.database.ensure_schema()
        self._bootstrap(plan)
        self._prepare(plan)
        if only_prepare:
            return self.plan()
        named = {shard.store.state().name or "": shard for shard in self._old}
        decisions = TwoPhaseCoordinator(lambda: named)
        generations = self._new.store.state().generations
        for name, shard in sorted(named.items()):
            # A shard that was restored from an older backup may lack earlier generations, too.
            for generation in range(shard.store.state().generation + 1, len(generations) + 1):
                if shard.store.fence(
                    generation, sorted(generations[generation - 1]), shard.transfer,
                    finish=lambda: decisions.finish(abandoned_after=SUPERSEDED_SECONDS),
                ):  # fmt: skip
                    self._on_step(f"shard {name!r} is fenced")
        # Other processes may have registered topics and consumers meanwhile.
        define(self._old[0].registry, self._new, active=plan.active)
        self._new.store.activate()
        self._on_step(f"shard {plan.name!r} is active")
        return self.plan()

    # Looking

    def _before(self, states: Sequence[ShardState], new: ShardState) -> tuple[frozenset[str], ...]:
        """The generations before the new one. Raises `ShardSetError` if the old shards are not one set."""
        identities = [state.identity for state in (*states, new)]
        if len(set(identities)) < len(identities):
            raise ShardSetError("two of the URLs lead to one database: name each once")
        if all(state.shards is None for state in states):
            if len(states) > 1:
                raise ShardSetError("these databases are not a set of shards yet: make the set with `eventsql migrate`")
            return (frozenset({FIRST}),)
        if any(state.set != states[0].set or not state.active for state in states):
            raise ShardSetError("the other databases are not all active shards of one set: see `eventsql shard list`")
        newest = max((state.generations for state in states), key=len)
        # The newest generation is unfinished if it began on some shards only, or if it adds the new shard.
        unfinished = {state.generation for state in states} != {len(newest)} or (
            new.name in newest[-1] and new.generation == len(newest) and len(newest) > 1
        )
        before = newest[:-1] if unfinished else newest
        given = {state.name for state in states}
        if given != set(before[-1]):
            raise unnamed(before[-1], given)
        return before

    def _named(self, names: frozenset[str], new: ShardState) -> str:
        if new.name is not None:
            if self._name not in {None, new.name}:
                raise ShardSetError(f"{self._new.database} is shard {new.name!r} already, and keeps that name")
            return new.name
        if self._name in names:
            raise ShardSetError(f"there is a shard {self._name!r} already: use another name")
        if self._name is not None and self._name.isdecimal():
            # In the offsets of Spark, a number is a partition, and "0" stands for a database that is not a shard.
            raise InvalidNameError(f"shard name {self._name!r} is a number, as partitions are: use another name")
        free = (f"shard-{number}" for number in range(len(names) + 1, 2 * len(names) + 2))
        return self._name or next(name for name in free if name not in names)

    def _check_new(
        self, states: Sequence[ShardState], new: ShardState, before: tuple[frozenset[str], ...], name: str
    ) -> None:
        names = before[-1]
        wanted = names | {name}
        for state in states:
            # A shard that was restored from an older backup may lack some generations.
            if state.generation and state.generations[-1] not in (*before, wanted):
                others = state.generations[-1] - names
                raise ShardSetError(f"finish the addition of shard {', '.join(sorted(others))} first, with its URL")
        if new.name is None and new.topics:
            raise _not_empty(self._new, new)
        if new.name is None and any(len(state.generations) > 1 and name in state.generations[-1] for state in states):
            raise ShardSetError(f"shard {name!r} that is being added is another database: give its URL")
        if new.name is not None and (
            (new.generations[-1] != wanted and not new.active)
            or (states[0].set is not None and states[0].set != new.set)
        ):
            raise ShardSetError(
                f"{self._new.database} belongs to another set of shards: give the URL of an empty database"
            )

    # Doing

    def _bootstrap(self, plan: Addition) -> None:
        """Make a lone database the first shard of a set."""
        first = self._old[0].store
        if len(self._old) > 1 or first.state().name is not None:
            return
        with first.bootstrap() as (state, connection):
            if state.name is None:
                first.become(connection, FIRST, str(uuid.uuid4()), [frozenset(plan.names)], active=True)
        self._on_step(f"{self._old[0].database} is shard {FIRST!r}")

    def _prepare(self, plan: Addition) -> None:
        old = self._old[0].store.state()
        assert old.set is not None, "it is a shard"
        generations = [*old.generations[: plan.generation - 1], frozenset({*plan.names, plan.name})]
        self._new.database.ensure_schema()
        with self._new.store.bootstrap() as (state, connection):
            if state.name is None:
                if state.topics:
                    raise _not_empty(self._new, state)
                self._new.store.become(connection, plan.name, old.set, generations, active=False)
        define(self._old[0].registry, self._new, active=plan.active)
        self._on_step(f"shard {plan.name!r} is prepared")


def _not_empty(shard: Shard, state: ShardState) -> ShardSetError:
    return ShardSetError(f"{shard.database} has {state.topics} topics: add an empty database")
