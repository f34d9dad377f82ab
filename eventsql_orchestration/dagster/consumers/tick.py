"""A tick of a sensor over all shards. It decides about each shard by itself. A shard that is down delays no other."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import dagster as dg

from eventsql_orchestration import Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.dagster.consumers.decision import RunState
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS, RunLimits, TickOptions
from eventsql_orchestration.database.notifications import LOG
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

    `own_runs` are the tags by which Dagster finds the runs of this code location. Another location may have a consumer
    or a queue of the same name in another database.
    """

    shard: Shard
    instance: dg.DagsterInstance
    log: logging.Logger
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

    def evaluate(self, tick: Tick, cursor: str | None) -> dg.SensorResult: ...


@dataclass(frozen=True)
class Watched:
    """A consumer whose events a sensor claims. `op_name` is the step of its asset in the runs that it requests."""

    topic: Topic
    consumer: Consumer
    op_name: str
    limits: RunLimits
    sensor: str
    options: TickOptions = DEFAULT_TICKS

    @property
    def notified_by(self) -> Collection[tuple[str, str]]:
        return ((LOG, self.topic.name),)


def evaluate(
    watch: Watch,
    platform: EventSQL,
    instance: dg.DagsterInstance,
    log: logging.Logger,
    cursor: str | None,
    *,
    own_runs: Mapping[str, str] = MappingProxyType({}),
) -> dg.SensorResult:
    """One tick, on the only database or on one shard after the other.

    The tick logs a shard's fault and goes on with the other shards. It fails only if no other shard requests a run. A
    shard that is down does not fail the tick, unless all shards are down. Raises the errors of `watch`, and
    `ShardSetError` if the databases are not the shards of one set.
    """
    budget = Budget(time.monotonic() + watch.options.budget, watch.options.max_requests)
    tick = Tick(platform.shards[0], instance, log, budget, own_runs=own_runs)
    if len(platform.shards) == 1:
        return watch.evaluate(tick, cursor)
    try:
        shards = {each.label: each for each in platform.opened()}
    except SchemaOutdatedError as error:
        return dg.SensorResult(skip_reason=error.message, cursor=cursor)

    before, after, results = _Cursor.parse(cursor), _Cursor(), _Results()
    for name in beginning_with(before.begin, sorted(shards)):
        after.of[name] = before.of.get(name)
        if budget.spent():
            after.begin = after.begin or name
            results.reasons[name] = "the next tick looks at it"
            continue
        try:
            result = watch.evaluate(replace(tick, shard=shards[name]), before.of.get(name))
        except EventSQLError as error:
            results.failed(name, error, log)
        else:
            after.of[name] = result.cursor
            results.add(name, result)
    return results.result(after.text(cursor))


@dataclass(slots=True)
class _Results:
    """The result of all shards: their requests, or the reasons why there is no run, by shard."""

    requests: list[dg.RunRequest] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: list[EventSQLError] = field(default_factory=list)
    yet: bool = False

    def add(self, name: str, result: dg.SensorResult) -> None:
        self.requests += result.run_requests or []
        self.reasons[name] = "" if result.skip_reason is None else str(result.skip_reason.skip_message)
        self.yet |= isinstance(result.skip_reason, NothingYet)

    def failed(self, name: str, error: EventSQLError, log: logging.Logger) -> None:
        is_down = isinstance(error, DatabaseUnavailableError)
        self.reasons[name] = f"it is down: {error.message}" if is_down else error.message
        self.errors.append(error)
        log.warning("shard %s: %s", name, self.reasons[name])

    def result(self, cursor: str | None) -> dg.SensorResult:
        if self.requests:
            return dg.SensorResult(run_requests=self.requests, cursor=cursor)
        for error in self.errors:
            if not isinstance(error, DatabaseUnavailableError) or len(self.errors) == len(self.reasons):
                raise error
        reason = "; ".join(f"{name}: {self.reasons[name]}" for name in sorted(self.reasons))
        yet = self.yet and not self.errors
        return dg.SensorResult(skip_reason=NothingYet(reason) if yet else reason, cursor=cursor)


@dataclass(slots=True)
class _Cursor:
    """The cursor of a tick for the next tick: the first shard, and the cursor of each shard."""

    begin: str | None = None
    of: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> _Cursor:
        """Parse a cursor's text. Another text, such as a cursor of a single database, gives an empty cursor."""
        try:
            content: Any = json.loads(text or "{}")
        except ValueError:
            return cls()
        if not isinstance(content, Mapping) or not isinstance(content.get("of"), Mapping):
            return cls()
        return cls(content.get("begin"), dict(content["of"]))

    def text(self, before: str | None) -> str | None:
        of = {name: cursor for name, cursor in self.of.items() if cursor is not None}
        if before is None and self.begin is None and not of:
            return None
        return json.dumps({"begin": self.begin, "of": of})


def beginning_with(cursor: str | None, each: Sequence[_T]) -> Sequence[_T]:
    """The elements of a sequence from the cursor's element on, then the elements before it."""
    first = next((n for n, one in enumerate(each) if str(one) == cursor), 0)
    return [*each[first:], *each[:first]]
