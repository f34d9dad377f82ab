"""Backfills: replaying a range of a topic through a consumer, in windows, without moving the consumer's own offset.

Every window is a side consumer. Its name tells the window: `<consumer>__backfill_<id>_<after>_<upto>`, the offsets
from `after` (exclusive) to `upto` (inclusive). So the guarantees of consuming hold for it: its offset moves in the
transaction of the effects, claims and their epochs keep a second run out, events that fail are retried and become dead
letters, and retention keeps the events that are left to replay. The windows of a backfill are registered in one
statement and deleted together when all are done. Until then, their offsets are the only record of the events that are
left. The transaction that deletes the windows of a finished backfill records that it is done: windows that were given
up leave no record.

Offsets belong to one log, so a backfill has windows of its own on each shard, under one id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from eventsql_orchestration import NOT_PARTITIONED, Shard
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.database import Connection, Queries, driver_connection
from eventsql_orchestration.errors import RegistryError, ValidationError
from eventsql_orchestration.maintenance.seek import Move
from eventsql_orchestration.orchestration.backfills.planning import LogPlanner, layouts_within
from eventsql_orchestration.orchestration.backfills.windows import (
    MAX_RUNS,
    Backfill,
    LogPlan,
    Plan,
    PlannedRun,
    Replayed,
    ReplayRange,
    Window,
    check_id,
    resume_command,
)
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics import layouts
from eventsql_orchestration.topics.catalog import consumer_states, find_topic, lock_registry
from eventsql_orchestration.topics.positions import AtOffset
from eventsql_orchestration.topics.side_consumers import MARK, SIDE_CONSUMER
from eventsql_orchestration.validation import check_name


class Backfills:
    """Plans, registers, lists and deletes backfills on the shards of a platform; one database is one shard."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._logs = {shard.name: _LogBackfills(shard) for shard in shards}

    # Registering

    def plan(self, topic: str, consumer: str, wanted: ReplayRange) -> Plan:
        """Plan a backfill of a range as it would run now. Changes nothing.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `PartitionOutOfRangeError`; `ValidationError` for a range
        that ends before it begins, for more than 1,000 runs, and for offsets over several shards.
        """
        if MARK in consumer:
            raise ValidationError(f"{consumer!r} is a window of a backfill: name the consumer that it belongs to")
        if len(self._logs) > 1 and (isinstance(wanted.start, AtOffset) or isinstance(wanted.end, AtOffset)):
            raise ValidationError(
                "each shard has its own offsets: name the shard with --shard, or give times, earliest or latest as the "
                "bounds of the range"
            )
        plan = Plan(topic, consumer, tuple(log.planner.plan(topic, consumer, wanted) for log in self._logs.values()))
        if len(plan.runs) > MAX_RUNS:
            raise ValidationError(f"{len(plan.runs):,} runs are too many ({MAX_RUNS:,} at most): use larger windows")
        return plan

    def check_into(self, into: str | None) -> None:
        """Check the name of a consumer to leave at the end of the range. Raises `ValidationError`."""
        if into is None:
            return
        if len(self._logs) > 1:
            raise ValidationError(
                f"consumer {into!r} would not be on all shards at once: create it with `eventsql consumer create`, and "
                "replay the range through it"
            )
        if MARK in check_name("consumer name", into):
            raise ValidationError(f"{into!r} looks like a window of a backfill: choose a name without {MARK!r}")

    def register(self, plan: Plan, backfill_id: str, *, into: str | None = None) -> Backfill:
        """Create the side consumers of a plan's windows, all or none. They keep retention off the range.

        With `into`, a consumer of that name is left at the end of the range when the backfill is done. Raises
        `RegistryError` if a backfill of the consumer has the id, if `into` exists, and if the topic was created anew or
        retention dropped a part of the range meanwhile; `ValidationError` for an empty plan, and for `into` over
        several shards or with some of the partitions of a topic that was repartitioned.
        """
        check_id(backfill_id)
        self.check_into(into)
        if not plan.runs:
            raise ValidationError("the range holds no events: there is nothing to replay")
        if self.find(plan.topic, backfill_id, plan.consumer) is not None:
            raise _taken(plan, backfill_id)

        registered: dict[str | None, Backfill] = {}
        try:
            for log in [log for log in plan.logs if log.runs]:
                registered[log.shard] = self._logs[log.shard].register(plan, log, backfill_id, into)
        except BaseException:
            for backfill in registered.values():
                self.delete(backfill)
            raise
        return Backfill.merge(list(registered.values()))

    # Looking

    def registered(self, topic: str | None = None) -> list[Backfill]:
        """The backfills that are not done, of one topic or of all."""
        if topic is not None:
            self._shards[0].registry.topic(topic)
        return self._find(topic)

    def find(self, topic: str, backfill_id: str, consumer: str | None = None) -> Backfill | None:
        """A backfill that is not done; None if it is done, was deleted or never existed."""
        return next(iter(self._find(topic, consumer, backfill_id)), None)

    def get(self, topic: str, backfill_id: str, consumer: str | None = None) -> Backfill:
        """A backfill that is not done. Raises `TopicNotFoundError`, and `RegistryError` if it does not exist."""
        backfill = self.find(topic, backfill_id, consumer)
        if backfill is None:
            self._shards[0].registry.topic(topic)
            of = "" if consumer is None else f" of consumer {consumer!r}"
            raise RegistryError(
                f"topic {topic!r} has no backfill {backfill_id!r}{of}: it is done, was deleted or never existed; "
                f"`eventsql backfill list {topic}` shows the backfills that are left"
            )
        return backfill

    def finished(self, topic: str, backfill_id: str, consumer: str) -> set[str | None]:
        """The shards on which a backfill was replayed to its end, in the last 30 days."""
        return {name for name, log in self._logs.items() if log.finished(topic, consumer, backfill_id)}

    def is_finished(self, topic: str, backfill_id: str, consumer: str) -> bool:
        """Whether a backfill was replayed to its end on all shards, in the last 30 days."""
        ended = self.finished(topic, backfill_id, consumer) == self._logs.keys()
        return ended and self.find(topic, backfill_id, consumer) is None

    def left(self, topic: str, part: Replayed, limit: int) -> int:
        """How many events a window has left in a partition, counted up to `limit`."""
        return self._logs[part.window.shard].count(topic, part.partition, part.offset, part.window.upto, limit=limit)

    def runs_of(self, backfill: Backfill) -> tuple[PlannedRun, ...]:
        """The runs of a backfill, including those that are done."""
        runs: list[PlannedRun] = []
        for shard, each in backfill.by_shard().items():
            windows, partitions = {part.window for part in each.parts}, {part.partition for part in each.parts}
            runs += self._logs[shard].planner.contents(each.topic, sorted(windows), sorted(partitions))[0]
        return tuple(runs)

    def _find(self, topic: str | None, consumer: str | None = None, backfill_id: str | None = None) -> list[Backfill]:
        found: dict[tuple[str, str, str], list[Backfill]] = {}
        for log in self._logs.values():
            for each in log.registered(topic, consumer, backfill_id):
                found.setdefault((each.topic, each.consumer, each.id), []).append(each)
        return [Backfill.merge(each) for each in found.values()]

    # Ending

    def renew(self, backfill: Backfill) -> None:
        """Count failures anew, and give fresh attempts to windows that are paused or that an event blocks."""
        for shard, each in backfill.by_shard().items():
            self._logs[shard].renew(each)

    def finish(self, backfill: Backfill) -> bool:
        """Delete a backfill where it is done, shard by shard, and leave its `into` consumer there, if it has one.

        A second call finds nothing left to do. False if a part is left, and if the backfill was deleted meanwhile.
        """
        ended = [self._logs[shard].end(each, only_done=True) for shard, each in backfill.by_shard().items()]
        return all(ended)

    def delete(self, backfill: Backfill) -> None:
        """Delete a backfill, done or not: its effects stay, the rest is not replayed.

        Its runs lose their claims. Waits at most 10 seconds for a batch, then raises `DatabaseBusyError`; the rest can
        be deleted again.
        """
        for shard, each in backfill.by_shard().items():
            self._logs[shard].end(each, only_done=False)

    def take_over(self, backfill: Backfill) -> Iterator[Move]:
        """Move the consumer's own offset to the end of the range, so that only the backfill handles these events.

        Goes from shard to shard and gives each move. Partitions beyond the end stay. Raises `RegistryError` if a
        partition stands before the range, because the events in between would be skipped, and `PartitionLeasedError`
        while a partition is leased; then no partition of that shard has moved.
        """
        for shard, each in backfill.by_shard().items():
            yield from self._logs[shard].take_over(each)


def _taken(plan: Plan, backfill_id: str) -> RegistryError:
    return RegistryError(
        f"consumer {plan.consumer!r} has a backfill {backfill_id} already: "
        f"`{resume_command(plan.topic, plan.consumer, backfill_id)}` runs the rest of it"
    )


class _LogBackfills:
    """The windows of backfills on the logs of one shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._database = shard.database
        self._queries = Queries("backfills", shard.database.schema)
        self._ranges = LogRanges(shard.database.schema)
        self._log = LogReader(shard.database.schema)
        self.planner = LogPlanner(shard)

    def register(self, plan: Plan, log: LogPlan, backfill_id: str, into: str | None) -> Backfill:
        windows = log.windows
        names = [window.consumer(plan.consumer, backfill_id, into) for window in windows]
        partitions = {run.partition for run in log.runs}
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            if into is not None and consumer_states(connection, plan.topic, into):
                raise RegistryError(f"topic {plan.topic!r} has a consumer {into!r} already: name a new consumer")
            if self._registered(driver, plan.topic, plan.consumer, backfill_id):
                raise _taken(plan, backfill_id)
            topic = find_topic(connection, plan.topic)
            if topic is None or topic.created_at != log.topic_created_at:
                raise _changed(f"topic {plan.topic!r} was deleted or created again")
            states = consumer_states(connection, plan.topic, plan.consumer)
            # After a repartitioning, older events can be in partitions that the consumer does not have any more.
            if not states or (states[0].partition == NOT_PARTITIONED) != (log.partitions == (NOT_PARTITIONED,)):
                raise _changed(f"consumer {plan.consumer!r} of topic {plan.topic!r} was deleted or registered again")
            # Retention drops a log from its beginning.
            if self._ranges.first(driver, plan.topic, after=log.after, upto=log.upto) != log.first_event:
                raise _changed("retention dropped a part of the range")

            if into is not None:
                _check_whole(plan.topic, log, layouts.layouts(driver, self._database.schema, plan.topic))

            values = {"topic": plan.topic, "consumer": plan.consumer}
            driver.execute(self._queries("forget_finished"), {**values, "id": backfill_id})
            register, afters = self._queries("register"), [window.after for window in windows]
            driver.execute(register, {**values, "names": names, "afters": afters, "partitions": sorted(partitions)})
            if into is not None:
                # `into` goes on with all partitions, including those without events in the range.
                rest = sorted({*log.partitions} - partitions)
                driver.execute(register, {**values, "names": names[:1], "afters": afters[:1], "partitions": rest})
            (backfill,) = self._registered(driver, plan.topic, plan.consumer, backfill_id)
        return backfill

    def finished(self, topic: str, consumer: str, backfill_id: str) -> bool:
        with self._database.connection() as connection:
            return self._finished(connection, topic, consumer, backfill_id)

    def _finished(self, connection: Connection, topic: str, consumer: str, backfill_id: str) -> bool:
        values = {"topic": topic, "consumer": consumer, "id": backfill_id}
        return connection.execute(self._queries("finished"), values).fetchone() == (True,)

    def registered(self, topic: str | None, consumer: str | None, backfill_id: str | None) -> list[Backfill]:
        with self._database.connection() as connection:
            return self._registered(connection, topic, consumer, backfill_id)

    def _registered(
        self, connection: Connection, topic: str | None, consumer: str | None, backfill_id: str | None
    ) -> list[Backfill]:
        found: list[Backfill] = []
        for row in connection.execute(self._queries("windows"), {"mark": MARK, "topic": topic}).fetchall():
            match = SIDE_CONSUMER.fullmatch(row[1])
            # A user's own consumer can have the mark in its name, without the rest.
            if match and consumer in {None, match["consumer"]} and backfill_id in {None, match["id"]}:
                window = Window(int(match["after"]), int(match["upto"]), self._shard.name)
                part = _replayed(window, row)
                found.append(Backfill(match["id"], row[0], match["consumer"], match["into"], row[12], (part,)))

        def key(backfill: Backfill) -> tuple[str, str, str]:
            return backfill.topic, backfill.consumer, backfill.id

        return [
            self._with_done(connection, Backfill.merge(list(parts)))
            for _, parts in groupby(sorted(found, key=key), key)
        ]

    def _with_done(self, connection: Connection, backfill: Backfill) -> Backfill:
        """Mark also those windows as done that have no event between their offset and their end."""
        parts = sorted(backfill.parts, key=lambda part: (part.window, part.partition))
        left = [number for number, part in enumerate(parts) if not part.done]
        unfinished = set[int]()
        whole = [number for number in left if parts[number].partition == NOT_PARTITIONED]
        for chosen in (whole, [number for number in left if number not in whole]):
            ranges = [(parts[each].partition, parts[each].offset, parts[each].window.upto) for each in chosen]
            if ranges:
                unfinished |= {chosen[each] for each in self._ranges.occupied(connection, backfill.topic, ranges)}
        done = (replace(part, done=number not in unfinished) for number, part in enumerate(parts))
        return replace(backfill, parts=tuple(done))

    def count(self, topic: str, partition: int, after: int, upto: int, *, limit: int) -> int:
        with self._database.connection() as connection:
            return self._log.count(connection, topic, partition=partition, after=after, upto=upto, most=limit)

    def renew(self, backfill: Backfill) -> None:
        for name in sorted({part.name for part in backfill.parts if not part.done and (part.spent or part.paused)}):
            self._shard.registry.resume(backfill.topic, name)
        with self._database.connection() as connection:
            connection.execute(self._queries("count_anew"), {"topic": backfill.topic, "names": backfill.names})

    def end(self, backfill: Backfill, *, only_done: bool) -> bool:
        topic = backfill.topic
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            for name in backfill.names:
                consumer_states(connection, topic, name, lock=True)
            found = self._registered(driver, topic, backfill.consumer, backfill.id)
            if not found:
                return self._finished(driver, topic, backfill.consumer, backfill.id)
            (current,) = found
            if only_done and not current.done:
                return False

            names = {"topic": topic, "names": current.names}
            if only_done and current.into is not None:
                end = max(part.window.upto for part in current.parts)
                driver.execute(self._queries("keep_side_consumer"), {**names, "into": current.into, "upto": end})
                if any(part.partition != NOT_PARTITIONED for part in current.parts):
                    layouts.move(driver, self._database.schema, topic, current.into, offset=end, until=end)
            if only_done:
                ended = {"topic": topic, "consumer": current.consumer, "id": current.id}
                driver.execute(self._queries("note_finished"), ended)
            driver.execute(self._queries("delete_windows"), names)
        return True

    def take_over(self, backfill: Backfill) -> list[Move]:
        begin = min(part.window.after for part in backfill.parts)
        end = max(part.window.upto for part in backfill.parts)
        wanted = {part.partition for part in backfill.parts}

        def behind(states: Sequence[ConsumerState]) -> Sequence[ConsumerState]:
            chosen = [state for state in states if state.partition in wanted and state.last_event_id < end]
            for state in chosen:
                if self.count(backfill.topic, state.partition, state.last_event_id, begin, limit=1):
                    raise RegistryError(
                        f"consumer {backfill.consumer!r} stands at offset {state.last_event_id}, before the range: the "
                        "events in between would be skipped; begin the range there"
                    )
            return chosen

        return self._shard.seeker.execute(backfill.topic, backfill.consumer, AtOffset(end + 1), choose=behind)


def _replayed(window: Window, row: Any) -> Replayed:
    _, name, partition, offset, consumed, paused, failed, attempts, most, failure, owner, lease, _, due, given_up = row
    return Replayed(
        window, partition, name, offset, consumed,
        done=offset >= window.upto, paused=paused, owner=owner, lease_ends_at=lease,
        failed_event=failed, spent=failed is not None and attempts >= most,
        failure=failure if failed is not None else None, retry_in=due, given_up=given_up,
    )  # fmt: skip


def _changed(how: str) -> RegistryError:
    return RegistryError(f"{how} meanwhile: make the plan again")


def _check_whole(topic: str, log: LogPlan, known: Sequence[layouts.Layout]) -> None:
    """Check that `into` can go on from one layout to the next: it does so with all of its partitions."""
    within = layouts_within(known, log.after, log.upto)
    if NOT_PARTITIONED not in log.partitions and any(each.partitions > len(log.partitions) for each in within):
        raise ValidationError(
            f"topic {topic!r} was repartitioned, and a consumer needs all partitions to continue from the old layout "
            "to the new one: replay all partitions (without --partition), or leave no consumer (without --into)"
        )
