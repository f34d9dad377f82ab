"""A backfill over all shards: planned, registered and ended on each of them, with offsets and windows of its own.

It has one id everywhere. On one database it is that database's, and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.backfills import Backfills
from eventsql_orchestration.dagster.windows import MAX_RUNS, Backfill, Plan, PlannedRun, Replayed
from eventsql_orchestration.errors import RegistryError, ValidationError
from eventsql_orchestration.log.positions import AtOffset, Place
from eventsql_orchestration.log.seek import Move


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """What a backfill would replay, by shard; of one database, whose name is None, that of it alone."""

    of: Mapping[str | None, Plan]

    @property
    def topic(self) -> str:
        return next(iter(self.of.values())).topic

    @property
    def consumer(self) -> str:
        return next(iter(self.of.values())).consumer

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        return tuple(run for plan in self.of.values() for run in plan.runs)

    @property
    def events(self) -> int:
        return sum(plan.events for plan in self.of.values())

    @property
    def range(self) -> tuple[int, int] | None:
        """The offsets of one database; those of several have nothing to do with one another."""
        if len(self.of) > 1:
            return None
        (plan,) = self.of.values()
        return plan.after, plan.upto

    @property
    def times(self) -> tuple[datetime | None, datetime | None]:
        """When the first and the last event entered the log."""
        first = [plan.first_at for plan in self.of.values() if plan.first_at is not None]
        last = [plan.last_at for plan in self.of.values() if plan.last_at is not None]
        return min(first, default=None), max(last, default=None)

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(
            remark if shard is None else f"{shard}: {remark}"
            for shard, plan in self.of.items()
            for remark in plan.remarks
        )


@dataclass(frozen=True, slots=True)
class ShardedBackfill:
    """A backfill that is registered, on the shards where a part of it is left."""

    of: Mapping[str | None, Backfill]

    @property
    def _first(self) -> Backfill:
        return next(iter(self.of.values()))

    @property
    def id(self) -> str:
        return self._first.id

    @property
    def topic(self) -> str:
        return self._first.topic

    @property
    def consumer(self) -> str:
        return self._first.consumer

    @property
    def into(self) -> str | None:
        return self._first.into

    @property
    def created_at(self) -> datetime:
        return min(each.created_at for each in self.of.values())

    @property
    def parts(self) -> tuple[Replayed, ...]:
        return tuple(part for each in self.of.values() for part in each.parts)

    @property
    def range(self) -> tuple[int, int] | None:
        """The offsets of one database; those of several have nothing to do with one another."""
        return None if len(self.of) > 1 else (self._first.range.after, self._first.range.upto)


class ShardedBackfills:
    """Plans, registers, lists and deletes backfills on all shards of a set, or on the only database."""

    def __init__(self, shards: Sequence[EventSQL]) -> None:
        self._of = {shard.shard: Backfills(shard) for shard in shards}

    def plan(
        self,
        topic: str,
        consumer: str,
        *,
        start: Place,
        end: Place,
        window_events: int | None = None,
        window: timedelta | None = None,
        partition: int | None = None,
    ) -> ShardedPlan:
        """What a backfill would do on each shard; nothing is changed.

        Raises as `Backfills.plan`, and `ValidationError` for a range that several shards' offsets would name.
        """
        if len(self._of) > 1 and (isinstance(start, AtOffset) or isinstance(end, AtOffset)):
            raise ValidationError(
                "offsets are each shard's own: name the shard with --shard, or the range by times, earliest and latest"
            )
        plans = {
            shard: backfills.plan(
                topic, consumer, start=start, end=end, window_events=window_events, window=window, partition=partition
            )
            for shard, backfills in self._of.items()
        }
        plan = ShardedPlan(plans)
        if len(plan.runs) > MAX_RUNS:
            raise ValidationError(f"{len(plan.runs):,} runs are too many ({MAX_RUNS:,} at most): take larger windows")
        return plan

    def check_into(self, into: str | None) -> None:
        """Raises `ValidationError` for a consumer to leave behind, where there are several shards."""
        if into is not None and len(self._of) > 1:
            raise ValidationError(
                "a consumer that a backfill leaves behind would not be on all shards at once: register it first, with "
                "`eventsql consumer create`, and replay through that one"
            )

    def register(self, plan: ShardedPlan, backfill_id: str, *, into: str | None = None) -> ShardedBackfill:
        """Create the windows of a plan on each shard where it has some: on all of them, or on none.

        Raises as `Backfills.register`, and `ValidationError` for `into` on several shards, where a consumer has to be
        on all of them at once.
        """
        self.check_into(into)
        planned = {shard: each for shard, each in plan.of.items() if each.runs}
        if not planned:
            raise ValidationError("the range holds no events: there is nothing to replay")
        if len(self._of) > 1 and self.find(plan.topic, backfill_id, plan.consumer) is not None:
            raise RegistryError(f"consumer {plan.consumer!r} has a backfill {backfill_id} already: give another --id")
        registered: dict[str | None, Backfill] = {}
        try:
            for shard, each in planned.items():
                registered[shard] = self._of[shard].register(each, backfill_id, into=into)
        except BaseException:
            for shard, backfill in registered.items():
                self._of[shard].delete(backfill)
            raise
        return ShardedBackfill(registered)

    def registered(self, topic: str | None = None) -> list[ShardedBackfill]:
        """The backfills that are registered, of one topic or of all: those that are not done."""
        found: dict[tuple[str, str, str], dict[str | None, Backfill]] = {}
        for shard, backfills in self._of.items():
            for each in backfills.registered(topic):
                found.setdefault((each.topic, each.consumer, each.id), {})[shard] = each
        return [ShardedBackfill(of) for of in found.values()]

    def find(self, topic: str, backfill_id: str, consumer: str | None = None) -> ShardedBackfill | None:
        """One of them; None where it is done, was deleted or never was."""
        found = {shard: backfills.find(topic, backfill_id, consumer) for shard, backfills in self._of.items()}
        left = {shard: each for shard, each in found.items() if each is not None}
        return ShardedBackfill(left) if left else None

    def get(self, topic: str, backfill_id: str, consumer: str | None = None) -> ShardedBackfill:
        """The same. Raises `TopicNotFoundError`, and `RegistryError` where there is none."""
        found = self.find(topic, backfill_id, consumer)
        if found is not None:
            return found
        shard, backfills = next(iter(self._of.items()))
        # It says what there is not.
        return ShardedBackfill({shard: backfills.get(topic, backfill_id, consumer)})

    def runs_of(self, backfill: ShardedBackfill) -> tuple[PlannedRun, ...]:
        """The runs of what is left of a backfill, those that are done among them."""
        return tuple(run for shard, each in backfill.of.items() for run in self._of[shard].runs_of(each))

    def renew(self, backfill: ShardedBackfill) -> None:
        """Give the windows that an event blocks, or that are paused, a fresh set of attempts."""
        for shard, each in backfill.of.items():
            self._of[shard].renew(each)

    def finish(self, backfill: ShardedBackfill) -> bool:
        """Delete what is done, on each shard by itself; False where a part is left."""
        finished = [self._of[shard].finish(each) for shard, each in backfill.of.items()]
        return all(finished)

    def delete(self, backfill: ShardedBackfill) -> None:
        """Delete a backfill, done or not. Raises as `Backfills.delete`; then the rest of it can be deleted again."""
        for shard, each in backfill.of.items():
            self._of[shard].delete(each)

    def take_over(self, backfill: ShardedBackfill) -> Iterator[Move]:
        """Move the consumer's own offsets to the end of the range, on one shard after the other; gives what has moved.

        Raises as `Backfills.take_over` at the first shard that fails; those before it have moved.
        """
        for shard, each in backfill.of.items():
            yield from self._of[shard].take_over(each)
