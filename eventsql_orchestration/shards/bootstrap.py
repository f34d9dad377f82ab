"""Check that databases are the shards of one set, and turn databases that are not shards into a set."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eventsql_orchestration.errors import ShardSetError
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.shard_state import ShardState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The combined state of the databases that could be reached.

    `generations` are the names of the shards in each generation, the oldest first. `incomplete` says that the set is
    not made yet. `missing` are the names of the set's shards that are not among the databases.
    """

    set: str | None
    generations: tuple[frozenset[str], ...]
    incomplete: bool
    missing: frozenset[str]


def compare(states: Sequence[tuple[str, ShardState]], unreachable: Sequence[str] = ()) -> Comparison:
    """Compare the states of databases. The text beside each state names its database in errors.

    Raises `ShardSetError` if the databases are not all shards of one set.
    """
    _check_distinct(states)
    named = {where: state for where, state in states if state.shards is not None}
    blank = {where: state for where, state in states if state.shards is None}
    _check_one_set(named)
    for where, state in blank.items():
        if state.topics:
            raise ShardSetError(
                f"{where} has topics and is not a shard: make it the first shard with "
                "`eventsql shard add --dsn NEW --execute`"
            )
    # The set is made when its first database is active: that is written last. A prepared shard knows a generation that
    # has not begun yet.
    made = [state for state in named.values() if state.active]
    newest = max((state.generations for state in made or named.values()), key=len, default=())
    if blank and made:
        names = ", ".join(sorted(newest[-1]))
        raise ShardSetError(
            f"{next(iter(blank))} is none of the shards {names}: correct its URL, or add it with "
            "`eventsql shard add … --execute`"
        )
    for where, state in named.items():
        joining = not state.active and state.generations[:-1] == newest
        if state.generations != newest[: state.generation] and not joining:
            raise ShardSetError(
                f"{where} was prepared for a shard set that was never created, "
                f"{', '.join(sorted(state.generations[-1]))}: remove its URL"
            )
    if not made:
        if len(newest) > 1:
            raise ShardSetError(f"{next(iter(named))} was prepared to join a set of shards: name its shards, too")
        if unreachable:
            raise ShardSetError(f"{unreachable[0]} cannot be reached, so the set of shards cannot be made: try again")
        return Comparison(_set(named), newest, True, frozenset())
    missing = newest[-1] - {state.name for state in named.values()}
    if len(missing) > len(unreachable):
        raise unnamed(newest[-1], {state.name for state in named.values()})
    if len(missing) < len(unreachable):
        # A shard that is only prepared is not in the set yet.
        logger.warning(
            "%s cannot be reached, and only %d of the shards %s are missing: the others are prepared, or wrong URLs",
            ", ".join(unreachable), len(missing), ", ".join(sorted(newest[-1])),
        )  # fmt: skip
    return Comparison(_set(named), newest, False, frozenset(missing))


def unnamed(shards: Iterable[str], given: Collection[str | None]) -> ShardSetError:
    """The error for URLs that lead to the shards `given`, and not to each of `shards` once."""
    lacking = ", ".join(sorted(name for name in shards if name not in given))
    fault = f"no URL leads to {lacking}" if lacking else "the URLs lead to other shards, too"
    return ShardSetError(f"the shards are {', '.join(sorted(shards))}, and {fault}: name each once, --dsn URL for each")


def unreached(states: Iterable[ShardState]) -> list[str]:
    """Placeholders for the shards that were not asked: they are down, or this process has no URL of them."""
    states = list(states)
    newest = max((state.generations for state in states if state.active), key=len, default=())
    return [""] * len(newest[-1] - {state.name for state in states}) if newest else []


def _set(named: Mapping[str, ShardState]) -> str | None:
    return next((state.set for state in named.values()), None)


def _check_distinct(states: Sequence[tuple[str, ShardState]]) -> None:
    seen: dict[str, str] = {}
    for where, state in states:
        if (other := seen.get(state.identity)) is not None:
            raise ShardSetError(f"{other} and {where} are one database: name each shard once")
        seen[state.identity] = where
    names: dict[tuple[str | None, str], str] = {}
    for where, state in states:
        if state.name is not None:
            if (other := names.get((state.set, state.name))) is not None:
                raise ShardSetError(
                    f"{where} and {other} both say that they are shard {state.name!r}: one is a copy, leave it out"
                )
            names[state.set, state.name] = where


def _check_one_set(named: Mapping[str, ShardState]) -> None:
    sets = {state.set: where for where, state in named.items()}
    if len(sets) > 1:
        first, other, *_ = sets.values()
        raise ShardSetError(f"{other} belongs to another set of shards than {first}: name the shards of one set")


def bootstrap(shards: Sequence[Shard]) -> None:
    """Turn databases without topics into shards: `shard-1`, `shard-2` and so on, in the order of their URLs.

    Several processes may call this at once, with their URLs in any order. If a process dies, the next process finishes
    its work. Raises `ShardSetError`.
    """
    for shard in shards:
        shard.database.ensure_schema()
    identities = [shard.store.state().identity for shard in shards]
    # All processes begin with the same database, whatever the order of their URLs.
    first = min(range(len(shards)), key=identities.__getitem__)
    with shards[first].store.bootstrap() as (_, connection):
        states = [shard.store.state() for shard in shards]
        compared = compare([(str(shard.database), state) for shard, state in zip(shards, states, strict=True)])
        if compared.incomplete:
            set_id = compared.set or str(uuid.uuid4())
            names = _names(states, compared)
            generations = (frozenset(names),)
            for position, (shard, state) in enumerate(zip(shards, states, strict=True)):
                if state.name is None and position != first:
                    with shard.store.bootstrap() as (_, other):
                        shard.store.become(other, names[position], set_id, generations, active=False)
            shards[first].store.become(connection, names[first], set_id, generations, active=True)
    for shard in shards:
        shard.store.activate()


def _names(states: Sequence[ShardState], compared: Comparison) -> list[str]:
    """The names of the databases. A database without a name gets the next free name."""
    every = [f"shard-{number}" for number in range(1, len(states) + 1)]
    if compared.generations:
        every = sorted(compared.generations[-1])
    left = iter([name for name in every if name not in {state.name for state in states}])
    names = [state.name or next(left, None) for state in states]
    if None in names or len(every) != len(names):
        raise ShardSetError(
            f"making a set of {len(every)} shards was begun and not finished: name the same {len(every)} databases"
        )
    return [name for name in names if name is not None]
