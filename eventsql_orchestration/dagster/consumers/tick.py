"""A tick of a sensor over all shards. It decides about each shard by itself. A shard that is down delays no other."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

import dagster as dg

from eventsql_orchestration import EventSQL, Shard
from eventsql_orchestration.dagster.consumers.decision import RunState
from eventsql_orchestration.dagster.consumers.options import TickOptions
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, SchemaOutdatedError

_T = TypeVar("_T")


@dataclass(slots=True)
class Budget:
    """Limits of a tick: it begins nothing after `deadline` (monotonic), and requests at most `requests` runs."""

    deadline: float
    requests: int

    def spent(self) -> bool:
        return self.requests <= 0 or time.monotonic() >= self.deadline


@dataclass(frozen=True)
class Tick:
    """One evaluation of a sensor on a shard: the shard, Dagster, and the clock, in seconds since 1970.

    Dagster's log of a tick is a file, which stays. So `open_log` gives the log to a tick that has something to say.

    `own_runs` are the tags by which Dagster finds the runs of this code location. Another location may have a consumer
    or a queue of the same name in another database.
    """

    shard: Shard
    instance: dg.DagsterInstance
    open_log: Callable[[], logging.Logger]
    budget: Budget
    clock: Callable[[], float] = time.time
    own_runs: Mapping[str, str] = field(default_factory=dict)

    def state(self, run: dg.RunRecord, *, patience: float = math.inf) -> RunState:
        """The state of a run. After `patience` seconds without a change, a started run may be waiting for a pool."""
        now, found = self.clock(), run.dagster_run
        state = RunState(
            found.run_id,
            found.status,
            found.tags,
            age=0.0 if run.start_time is None else now - run.start_time,
            unchanged=now - _seconds(run.update_timestamp),
        )
        if not state.started or state.unchanged <= patience:
            return state
        places = _places(found.run_id, self.instance)
        gotten = [now - _seconds(place) for place in places if place is not None]
        return replace(state, waits=bool(places) and not gotten, unchanged=min([state.unchanged, *gotten]))


def _places(run_id: str, instance: dg.DagsterInstance) -> list[datetime | None]:
    """When each step of a run got its place in a pool; None for a step that waits for its place.

    With `granularity: run`, the run waits in Dagster's queue, and its steps do not wait.
    """
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return []
    pools = [storage.get_concurrency_info(pool) for pool in storage.get_concurrency_keys()]
    return [step.assigned_timestamp for pool in pools for step in pool.pending_steps if step.run_id == run_id]


def _seconds(moment: datetime) -> float:
    """Seconds since 1970. Dagster's storages leave out the zone, which is UTC."""
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


class NothingYet(dg.SkipReason):
    """No run is requested because no events or too few events wait. The next event may change that."""


class Leased(NothingYet):
    """No run is requested because the partition is leased. The end of the lease changes that."""


Answer: TypeAlias = list[dg.RunRequest] | dg.SkipReason
"""What a tick requests, or why it requests nothing."""


class Watch(Protocol):
    """Decides what a tick of the sensor with the name `sensor` does on one database.

    The sensor waits for the notifications in `notified_by`: pairs of a kind and the name of a topic or queue.
    """

    @property
    def sensor(self) -> str: ...

    @property
    def options(self) -> TickOptions: ...

    @property
    def description(self) -> str: ...

    @property
    def notified_by(self) -> Collection[tuple[str, str]]: ...

    def evaluate(self, tick: Tick) -> Answer: ...


def evaluate(
    watch: Watch,
    platform: EventSQL,
    instance: dg.DagsterInstance,
    open_log: Callable[[], logging.Logger],
    *,
    own_runs: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """One tick, on the only database or on one shard after the other.

    The tick logs a shard's fault and goes on with the other shards. It fails only if no other shard requests a run. A
    shard that is down does not fail the tick, unless all shards are down. Raises the errors of `watch`, and
    `ShardSetError` if the databases are not the shards of one set.
    """
    budget = Budget(time.monotonic() + watch.options.budget, watch.options.max_requests)
    tick = Tick(platform.shards[0], instance, open_log, budget, own_runs=own_runs)
    if len(platform.shards) == 1:
        return watch.evaluate(tick)
    try:
        shards = platform.opened()
    except SchemaOutdatedError as error:
        return dg.SkipReason(error.message)

    requests: dict[str, list[dg.RunRequest]] = {}
    reasons: dict[str, dg.SkipReason] = {}
    errors: list[EventSQLError] = []
    for shard in in_random_order(shards):
        if budget.spent():
            reasons[shard.label] = dg.SkipReason("a later tick looks at it")
            continue
        try:
            answer = watch.evaluate(replace(tick, shard=shard))
        except EventSQLError as error:
            errors.append(error)
            is_down = isinstance(error, DatabaseUnavailableError)
            answer = dg.SkipReason(f"it is down: {error.message}" if is_down else error.message)
            open_log().warning("shard %s: %s", shard.label, answer.skip_message)
        if isinstance(answer, dg.SkipReason):
            reasons[shard.label] = answer
        else:
            requests[shard.label] = answer

    if requests:
        return [request for label in sorted(requests) for request in requests[label]]
    for each in errors:
        if not isinstance(each, DatabaseUnavailableError) or len(errors) == len(shards):
            raise each
    may_change = not errors and any(isinstance(reason, NothingYet) for reason in reasons.values())
    kind = NothingYet if may_change else dg.SkipReason
    return kind("; ".join(f"{label}: {reasons[label].skip_message}" for label in sorted(reasons)))


def in_random_order(each: Collection[_T]) -> list[_T]:
    """The elements in random order. A tick may not reach all of them, and its successors begin with others."""
    return random.sample(list(each), len(each))
