"""A tick of a sensor over all shards: each is decided about by itself, and one that is down keeps no other waiting."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, SchemaOutdatedError

TICK_BUDGET: Final = 20.0
"""Seconds after which a tick over many partitions begins with no further one. With the statement under way and what
Dagster's own storage takes, that stays well below the 60 of a tick."""

MAX_REQUESTS: Final = 25
"""Runs that one tick requests at most: Dagster creates them one after the other, some 4 to 10 a second, and no further
tick of this sensor begins meanwhile."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Budget:
    """What is left to a tick: the time until when it begins with something, and the runs that it may request."""

    deadline: float
    requests: int

    def spent(self) -> bool:
        return self.requests <= 0 or time.monotonic() >= self.deadline


class NothingYet(dg.SkipReason):
    """No run is requested because too few events wait, or none: the next one that comes may change that."""


class Leased(NothingYet):
    """No run is requested because somebody leases the partition: what changes that is the end of the lease."""


class Watch(Protocol):
    """Decides what a tick does on one database."""

    @property
    def topics(self) -> Collection[str]:
        """Those whose events it waits for."""

    def evaluate(
        self,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
        cursor: str | None,
        budget: Budget,
    ) -> dg.SensorResult: ...


def evaluate(
    watch: Watch, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger, cursor: str | None
) -> dg.SensorResult:
    """One tick, on the only database, or on one shard after the other.

    What goes wrong on a shard is told, and the others have their turn: it fails the tick where no other requests a run,
    and a shard that is down does not even then, unless all are. Raises what `watch` raises, `ShardSetError` where the
    databases are not the shards of one set.
    """
    budget = Budget(time.monotonic() + TICK_BUDGET, MAX_REQUESTS)
    if len(platform.shards) == 1:
        return watch.evaluate(platform, instance, log, cursor, budget)
    try:
        shards = {each.shard or str(each.database): each for each in platform.open().shards}
    except SchemaOutdatedError as error:
        return dg.SensorResult(skip_reason=error.message, cursor=cursor)
    before, after = _Cursor.parse(cursor), _Cursor()
    tick = _Tick()
    for name in beginning_with(before.begin, sorted(shards)):
        after.of[name] = before.of.get(name)
        if budget.spent():
            after.begin = after.begin or name
            tick.reasons[name] = "it has its turn in the next tick"
            continue
        try:
            result = watch.evaluate(shards[name], instance, log, before.of.get(name), budget)
        except EventSQLError as error:
            tick.failed(name, error, log)
        else:
            after.of[name] = result.cursor
            tick.requests += result.run_requests or []
            tick.reasons[name] = "" if result.skip_reason is None else str(result.skip_reason.skip_message)
            tick.yet |= isinstance(result.skip_reason, NothingYet)
    return tick.result(after.text(cursor))


@dataclass(slots=True)
class _Tick:
    """What has come of a tick so far; why there is no run, by shard."""

    requests: list[dg.RunRequest] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: list[EventSQLError] = field(default_factory=list)
    yet: bool = False

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
    """What a tick leaves to the next one: the shard to begin with, and the cursor of each."""

    begin: str | None = None
    of: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> _Cursor:
        """A cursor's text; one from when there was one database counts for none."""
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
    """Those of a sequence in the order in which a tick looks at them."""
    first = next((n for n, one in enumerate(each) if str(one) == cursor), 0)
    return [*each[first:], *each[:first]]
