"""Whether the databases that were named are the shards of one set, and making one of those that are none yet."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventsql_orchestration.errors import ShardSetError
from eventsql_orchestration.log.shard_store import ShardState, ShardStore

if TYPE_CHECKING:
    from eventsql_orchestration.platform import EventSQL


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the databases that could be reached say together.

    `generations` are the names of the shards, of each generation, oldest first; `found` says that databases which are
    no shards yet are to be made some. `missing` are the names of shards that none of them is.
    """

    set: str | None
    generations: tuple[frozenset[str], ...]
    found: bool
    missing: frozenset[str]


def judge(states: Sequence[tuple[str, ShardState]], unreachable: Sequence[str] = ()) -> Verdict:
    """Compare what databases say of themselves, each with what it is called in messages.

    Raises `ShardSetError` where they are not all shards of one set.
    """
    _check_distinct(states)
    named = {where: state for where, state in states if state.shards is not None}
    blank = {where: state for where, state in states if state.shards is None}
    _check_one_set(named)
    for where, state in blank.items():
        if state.topics:
            raise ShardSetError(
                f"{where} has topics already and is no shard: give its URL alone to `eventsql shard add --dsn NEW`, "
                "which makes it the first shard of a set"
            )
    # The set is founded when the first of its databases says so, as the last to be written. One that is prepared to
    # join knows of a generation before the others do, which is none yet.
    founded = [state for state in named.values() if state.active]
    newest = max((state.generations for state in founded or named.values()), key=len, default=())
    if blank and founded:
        names = ", ".join(sorted(newest[-1]))
        raise ShardSetError(
            f"{next(iter(blank))} is none of the shards {names}: correct its URL, or add it with `eventsql shard add`"
        )
    for where, state in named.items():
        joining = not state.active and state.generations[:-1] == newest
        if state.generations != newest[: state.generation] and not joining:
            raise ShardSetError(
                f"{where} is to be a shard beside {', '.join(sorted(state.generations[-1]))}, which never came about: "
                "leave out its URL"
            )
    if not founded:
        if len(newest) > 1:
            raise ShardSetError(
                f"{next(iter(named))} is to join a set of shards, and none of those was named: name them all"
            )
        if unreachable:
            raise ShardSetError(f"{unreachable[0]} cannot be reached, and the set of shards is yet to be made")
        return Verdict(_set(named), newest, True, frozenset())
    missing = newest[-1] - {state.name for state in named.values()}
    if len(missing) > len(unreachable):
        raise ShardSetError(
            f"the shards are {', '.join(sorted(newest[-1]))}, and no URL leads to {', '.join(sorted(missing))}: name "
            "all of them, --dsn URL for each"
        )
    if len(missing) < len(unreachable):
        raise ShardSetError(
            f"{', '.join(unreachable)} cannot be reached, and of the shards {', '.join(sorted(newest[-1]))} no "
            f"more than {len(missing)} are missing: correct the URLs"
        )
    return Verdict(_set(named), newest, False, frozenset(missing))


def unreached(states: Iterable[ShardState]) -> list[str]:
    """Stands for the shards that were not asked, because they are down or this process has no URL of them."""
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


def found(platforms: Sequence[EventSQL]) -> None:
    """Make shards of databases without topics: `shard-1`, `shard-2` and so on, in the order of their URLs.

    Safe from several processes at once, whatever the order of their URLs, and finished by the next where one dies.
    Raises `ShardSetError`.
    """
    for platform in platforms:
        platform.database.ensure_schema()
    stores = [ShardStore(platform.database) for platform in platforms]
    identities = [store.state().identity for store in stores]
    # Whichever URL comes first, all processes begin with one and the same database.
    first = min(range(len(stores)), key=identities.__getitem__)
    with stores[first].founding() as (_, first_founding):
        states = [store.state() for store in stores]
        verdict = judge([(str(each.database), state) for each, state in zip(platforms, states, strict=True)])
        if verdict.found:
            set_id = verdict.set or str(uuid.uuid4())
            names = _names(states, verdict)
            generations = (frozenset(names),)
            for position, (store, state) in enumerate(zip(stores, states, strict=True)):
                if state.name is None and position != first:
                    with store.founding() as (_, founding):
                        founding.become(names[position], set_id, generations, active=False)
            first_founding.become(names[first], set_id, generations, active=True)
    for store in stores:
        store.activate()


def _names(states: Sequence[ShardState], verdict: Verdict) -> list[str]:
    """The names of the databases: what they have, and what is left over, in order."""
    every = [f"shard-{number}" for number in range(1, len(states) + 1)]
    if verdict.generations:
        every = sorted(verdict.generations[-1])
    left = iter([name for name in every if name not in {state.name for state in states}])
    names = [state.name or next(left, None) for state in states]
    if None in names or len(every) != len(names):
        raise ShardSetError(
            f"making a set of {len(every)} shards was begun and not finished: name the same {len(every)} databases"
        )
    return [name for name in names if name is not None]
