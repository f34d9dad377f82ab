"""Backfills: replaying a range of a topic through a consumer, in windows, without moving the consumer's own offset.

Every window is a side consumer of its own, whose name says what it is:
`<consumer>__backfill_<id>_<after>_<upto>`, offsets after `after` up to and with `upto`. So what is known of consuming
holds for it: its offset moves in the transaction of the effects, claims and their epochs keep a second run out, events
that fail are retried and become dead letters, and retention keeps what is left to replay. The windows of a backfill are
registered in one statement and deleted together when all are done; until then, what is left is what they have left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from eventsql_orchestration import NOT_PARTITIONED, EventSQL
from eventsql_orchestration.dagster.windows import (
    MARK,
    MAX_RUNS,
    SIDE_CONSUMER,
    Backfill,
    Place,
    Plan,
    PlannedRun,
    Replayed,
    Window,
    check_cut,
    check_id,
    check_order,
    resume_command,
)
from eventsql_orchestration.database import Connection, Queries, driver_connection
from eventsql_orchestration.errors import RegistryError, ValidationError
from eventsql_orchestration.log import layouts
from eventsql_orchestration.log.layouts import Layout
from eventsql_orchestration.log.positions import AtOffset, AtTime, Back, Earliest, Latest, resolve
from eventsql_orchestration.log.registry import choose_partitions, consumer_states, find_topic, lock_registry
from eventsql_orchestration.log.seek import Move
from eventsql_orchestration.model import ConsumerState
from eventsql_orchestration.rules import check_name


class Backfills:
    """Plans, registers, lists and deletes the backfills of one database."""

    def __init__(self, platform: EventSQL) -> None:
        self._platform = platform
        self._database = platform.database
        self._queries = Queries("backfills", platform.database.schema)

    # Planning

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
    ) -> Plan:
        """What a backfill of the events from `start` to `end` would do now; nothing is changed.

        It is cut into windows of `window_events`, or of the events that entered the log in the same `window` of time,
        counted from 1970 in UTC; by default it is one. Raises `TopicNotFoundError`, `ConsumerNotFoundError`,
        `PartitionOutOfRangeError`; `ValidationError` for a range that ends before it begins, and for more than 1,000
        runs.
        """
        check_cut(window_events, window)
        check_order(start, end)
        if MARK in consumer:
            raise ValidationError(f"{consumer!r} is a window of a backfill: name the consumer that it belongs to")
        created_at = self._platform.registry.topic(topic).created_at
        states = self._platform.registry.consumer(topic, consumer)
        after, upto, remarks = self._range(topic, start, end)
        known = [] if states[0].partition == NOT_PARTITIONED else self._platform.layouts.of(topic)
        wanted = _partitions(known, after, upto) if partition is None else None
        wanted = wanted or choose_partitions(states, partition)
        if any(state.paused for state in states):
            remarks.append(f"consumer {consumer!r} is paused, and stays so: a backfill runs all the same")
        if states[0].filter is not None:
            remarks.append(f"of these events those are replayed that match the consumer's filter ({states[0].filter})")
        windows = _split(self._cut(topic, after, upto, window_events, window), [each.after for each in known])
        runs, times = self._contents(topic, windows, wanted)
        if len(runs) > MAX_RUNS:
            raise ValidationError(f"{len(runs):,} runs are too many ({MAX_RUNS:,} at most): take larger windows")
        if len({run.window for run in runs}) > 1:
            remarks.append("a key's events keep their order within a window; across windows with --parallel 1 alone")
        # Windows whose events all belong to partitions that are not wanted.
        kept = tuple(sorted({run.window for run in runs}))
        first, last = (min(times), max(times)) if times else (None, None)
        with self._database.connection() as connection:
            first_event = self._first(connection, topic, after, upto)
        return Plan(
            topic, consumer, tuple(wanted), after, upto, kept, tuple(runs), first_event, created_at, first, last,
            tuple(remarks),
        )  # fmt: skip

    def _range(self, topic: str, start: Place, end: Place) -> tuple[int, int, list[str]]:
        with self._database.connection() as connection:

            def offset_of(place: Place) -> int:
                return resolve(connection, self._database.schema, topic, place, {NOT_PARTITIONED: 0})[
                    NOT_PARTITIONED
                ].offset

            begin, log_end = offset_of(Earliest()), offset_of(Latest())
            after = offset_of(start)
            upto = offset_of(AtOffset(end.offset + 1) if isinstance(end, AtOffset) else end)
        if after > upto:
            raise ValidationError(f"the range ends at offset {upto}, before it begins at offset {after + 1}")
        remarks = []
        if isinstance(start, AtOffset) and start.offset <= begin and begin > 0:
            remarks.append(
                f"the log begins at offset {begin + 1:,} by now: offsets {max(1, start.offset):,} to {begin:,} of the "
                f"range ({begin - max(1, start.offset) + 1:,}) are gone"
            )
        elif isinstance(start, AtTime | Back) and after == begin and begin > 0:
            remarks.append(f"the log begins at offset {begin + 1:,} by now: what was before is gone")
        if isinstance(start, AtOffset) and start.offset > log_end:
            remarks.append(f"the log ends at offset {log_end:,}, before the range begins")
        elif isinstance(end, AtOffset) and end.offset > log_end:
            remarks.append(f"the log ends at offset {log_end:,}: the range ends there")
        if isinstance(end, Latest) and (waiting := self._platform.buffered().get(topic)):
            remarks.append(f"{waiting:,} events are in the buffer yet and no part of the range")
        return after, upto, remarks

    def _cut(
        self, topic: str, after: int, upto: int, window_events: int | None, window: timedelta | None
    ) -> list[Window]:
        if after >= upto:
            return []
        if window_events is None and window is None:
            return [Window(after, upto)]
        with self._database.connection() as connection:
            rows = connection.execute(
                self._queries("window_ends" if window is None else "period_ends", topic=topic),
                {
                    "after": after,
                    "upto": upto,
                    "events": window_events,
                    "seconds": None if window is None else window.total_seconds(),
                },
                prepare=False,
            ).fetchall()
        if len(rows) > MAX_RUNS:
            raise ValidationError(f"{len(rows):,} windows are too many ({MAX_RUNS:,} at most): take larger ones")
        ends = [row[0] for row in rows]
        return [Window(begin, end) for begin, end in zip([after, *ends], ends, strict=False)]

    def _contents(
        self, topic: str, windows: Sequence[Window], partitions: Sequence[int]
    ) -> tuple[list[PlannedRun], list[datetime]]:
        with self._database.connection() as connection:
            rows = connection.execute(
                self._queries("contents", topic=topic),
                {"afters": [each.after for each in windows], "uptos": [each.upto for each in windows]}, prepare=False,
            ).fetchall()  # fmt: skip
        of = {window.upto: window for window in windows}
        whole = list(partitions) == [NOT_PARTITIONED]
        counts: dict[tuple[Window, int], int] = {}
        times: list[datetime] = []
        for upto, partition, events, first, last in rows:
            if not whole and partition not in partitions:
                continue
            run = (of[upto], NOT_PARTITIONED if whole else partition)
            counts[run] = counts.get(run, 0) + events
            times += [first, last]
        return [PlannedRun(window, partition, events) for (window, partition), events in sorted(counts.items())], times

    def runs_of(self, backfill: Backfill) -> tuple[PlannedRun, ...]:
        """The runs of a backfill that is registered, those that are done among them."""
        windows = sorted({part.window for part in backfill.parts})
        runs, _ = self._contents(backfill.topic, windows, sorted({part.partition for part in backfill.parts}))
        return tuple(runs)

    # Registering

    def register(self, plan: Plan, backfill_id: str, *, into: str | None = None) -> Backfill:
        """Create the side consumers of a plan's windows, all or none. They keep retention off what is to be replayed.

        With `into`, a consumer of that name is left at the end of the range when the backfill is done. Raises
        `RegistryError` where a backfill of the consumer has the id, where `into` is a consumer that exists, and where
        the topic was created anew or retention dropped a part of the range meanwhile; `ValidationError` for an empty
        plan.
        """
        check_id(backfill_id)
        if not plan.runs:
            raise ValidationError("the range holds no events: there is nothing to replay")
        if into is not None and MARK in check_name("consumer name", into):
            raise ValidationError(f"{into!r} would be taken for a window of a backfill: choose a name without {MARK!r}")
        names = [window.consumer(plan.consumer, backfill_id, into) for window in plan.windows]
        partitions = {run.partition for run in plan.runs}
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            if into is not None and consumer_states(connection, plan.topic, into):
                raise RegistryError(f"topic {plan.topic!r} has a consumer {into!r} already: name a new one")
            if self._registered(plan.topic, plan.consumer, backfill_id, driver):
                raise RegistryError(
                    f"consumer {plan.consumer!r} has a backfill {backfill_id} already: "
                    f"`{resume_command(plan.topic, plan.consumer, backfill_id)}` runs the rest of it"
                )
            registered = find_topic(connection, plan.topic)
            if registered is None or registered.created_at != plan.topic_created_at:
                raise RegistryError(f"topic {plan.topic!r} was deleted or created anew meanwhile: make the plan again")
            states = consumer_states(connection, plan.topic, plan.consumer)
            # After a repartitioning the events of before are in partitions that the consumer may not have any more.
            if not states or (states[0].partition == NOT_PARTITIONED) != (plan.partitions == (NOT_PARTITIONED,)):
                raise RegistryError(
                    f"consumer {plan.consumer!r} of topic {plan.topic!r} was deleted or registered anew meanwhile: "
                    "make the plan again"
                )
            # Retention drops a log from its beginning.
            if self._first(driver, plan.topic, plan.after, plan.upto) != plan.first_event:
                raise RegistryError("retention dropped a part of the range meanwhile: make the plan again")
            windows = [(names, plan.windows, partitions)]
            if into is not None:
                # It consumes all of the partitions from there on, those that have no events in the range too.
                windows.append((names[:1], plan.windows[:1], {*plan.partitions} - partitions))
            for named, cut, chosen in windows:
                driver.execute(
                    self._queries("register"),
                    {
                        "topic": plan.topic,
                        "consumer": plan.consumer,
                        "names": named,
                        "afters": [window.after for window in cut],
                        "partitions": sorted(chosen),
                    },
                )
            (backfill,) = self._registered(plan.topic, plan.consumer, backfill_id, driver)
        return backfill

    # Looking

    def registered(self, topic: str | None = None) -> list[Backfill]:
        """The backfills that are registered, of one topic or of all: those that are not done."""
        if topic is not None:
            self._platform.registry.topic(topic)
        with self._database.connection() as connection:
            return self._registered(topic, None, None, connection)

    def find(self, topic: str, backfill_id: str, consumer: str | None = None) -> Backfill | None:
        """One of them; None where it is done, was deleted or never was."""
        with self._database.connection() as connection:
            found = self._registered(topic, consumer, backfill_id, connection)
        return found[0] if found else None

    def get(self, topic: str, backfill_id: str, consumer: str | None = None) -> Backfill:
        """The same. Raises `TopicNotFoundError`, and `RegistryError` where there is none."""
        backfill = self.find(topic, backfill_id, consumer)
        if backfill is None:
            self._platform.registry.topic(topic)
            of = "" if consumer is None else f" of consumer {consumer!r}"
            raise RegistryError(
                f"topic {topic!r} has no backfill {backfill_id!r}{of}: it is done or was deleted, or never was; "
                f"`eventsql backfill list {topic}` shows those that are left"
            )
        return backfill

    def left(self, topic: str, part: Replayed, limit: int) -> int:
        """How many events a window has left in a partition, counted up to `limit`."""
        with self._database.connection() as connection:
            return self._count(connection, topic, part.partition, after=part.offset, upto=part.window.upto, limit=limit)

    def _count(self, connection: Connection, topic: str, partition: int, *, after: int, upto: int, limit: int) -> int:
        row = connection.execute(
            self._queries("left_of_topic" if partition == NOT_PARTITIONED else "left_of", topic=topic),
            {"partition": partition, "after": after, "upto": upto, "limit": limit}, prepare=False,
        ).fetchone()  # fmt: skip
        assert row is not None, "an aggregate gives one row"
        return int(row[0])

    def _first(self, connection: Connection, topic: str, after: int, upto: int) -> int | None:
        row = connection.execute(
            self._queries("first_after", topic=topic), {"after": after, "upto": upto}, prepare=False
        ).fetchone()
        assert row is not None, "an aggregate gives one row"
        return None if row[0] is None else int(row[0])

    def _registered(
        self, topic: str | None, consumer: str | None, backfill_id: str | None, connection: Connection
    ) -> list[Backfill]:
        rows = connection.execute(self._queries("windows"), {"mark": MARK, "topic": topic}).fetchall()
        found: dict[tuple[str, str, str], list[tuple[re.Match[str], Any]]] = {}
        for row in rows:
            match = SIDE_CONSUMER.fullmatch(row[1])
            # Somebody may name a consumer of his own so that it has the mark, and nothing of the rest.
            if match is None or consumer not in {None, match["consumer"]} or backfill_id not in {None, match["id"]}:
                continue
            found.setdefault((row[0], match["consumer"], match["id"]), []).append((match, row))
        return [self._backfill(connection, key, parts) for key, parts in found.items()]

    def _backfill(
        self, connection: Connection, key: tuple[str, str, str], found: Sequence[tuple[re.Match[str], Any]]
    ) -> Backfill:
        topic, consumer, backfill_id = key
        parts = []
        for match, row in found:
            (_, name, partition, offset, consumed, paused, failed, attempts, most, failure, owner, lease, _, due) = row
            parts.append(
                Replayed(
                    Window(int(match["after"]), int(match["upto"])), partition, name, offset, consumed,
                    done=offset >= int(match["upto"]), paused=paused, owner=owner, lease_ends_at=lease,
                    failed_event=failed, spent=failed is not None and attempts >= most,
                    failure=failure if failed is not None else None, retry_in=due or 0.0,
                )
            )  # fmt: skip
        parts = sorted(self._look_further(connection, topic, parts), key=lambda part: (part.window, part.partition))
        return Backfill(
            backfill_id, topic, consumer, found[0][0]["into"], min(row[12] for _, row in found), tuple(parts)
        )

    def _look_further(self, connection: Connection, topic: str, parts: Sequence[Replayed]) -> list[Replayed]:
        """Those whose offset is not at the end, but has no event before it, are done too."""
        open_parts = [number for number, part in enumerate(parts) if not part.done]
        unfinished = set()
        for query, chosen in (
            ("unfinished_topic", [n for n in open_parts if parts[n].partition == NOT_PARTITIONED]),
            ("unfinished", [n for n in open_parts if parts[n].partition != NOT_PARTITIONED]),
        ):
            if not chosen:
                continue
            rows = connection.execute(
                self._queries(query, topic=topic),
                {
                    "numbers": chosen,
                    "partitions": [parts[n].partition for n in chosen],
                    "offsets": [parts[n].offset for n in chosen],
                    "uptos": [parts[n].window.upto for n in chosen],
                },
                prepare=False,
            )
            unfinished |= {row[0] for row in rows}
        return [replace(part, done=number not in unfinished) for number, part in enumerate(parts)]

    # Ending

    def renew(self, backfill: Backfill) -> None:
        """Give the windows that an event blocks, or that are paused, a fresh set of attempts."""
        for name in sorted({part.name for part in backfill.parts if not part.done and (part.spent or part.paused)}):
            self._platform.registry.resume(backfill.topic, name)

    def finish(self, backfill: Backfill) -> bool:
        """Delete a backfill that is done, and leave the side consumer that it is for, if it has one.

        False where it is not done yet. Whoever comes second finds nothing left to do.
        """
        return self._end(backfill, only_done=True)

    def delete(self, backfill: Backfill) -> None:
        """Delete a backfill, done or not: what it has replayed stays, the rest never will be.

        Runs that are under way lose their claims. Waits at most 10 seconds for a batch, then `DatabaseBusyError`.
        """
        self._end(backfill, only_done=False)

    def _end(self, backfill: Backfill, *, only_done: bool) -> bool:
        topic = backfill.topic
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            for name in backfill.names:
                consumer_states(connection, topic, name, lock=True)
            found = self._registered(topic, backfill.consumer, backfill.id, driver)
            if not found:
                return True
            (current,) = found
            if only_done and not current.done:
                return False
            if only_done and current.into is not None:
                driver.execute(
                    self._queries("keep_side_consumer"),
                    {"topic": topic, "names": current.names, "into": current.into, "upto": current.range.upto},
                )
                if any(part.partition != NOT_PARTITIONED for part in current.parts):
                    layouts.move(driver, self._database.schema, topic, current.into, offset=current.range.upto)
            own = {"topic": topic, "names": current.names}
            driver.execute(self._queries("delete_windows"), own)
            driver.execute(self._queries("delete_claims"), own)
        return True

    def take_over(self, backfill: Backfill) -> list[Move]:
        """Move the consumer's own offset to the end of a range: what of it was not consumed is left to the backfill.

        Partitions that are beyond the end stay. Raises `RegistryError` where a partition stands before the range, whose
        events in between nobody would consume, and `PartitionLeasedError` while somebody leases one of them; then none
        of them has moved.
        """
        topic, begin, end = backfill.topic, backfill.range.after, backfill.range.upto
        wanted = {part.partition for part in backfill.parts}

        def behind(states: Sequence[ConsumerState]) -> Sequence[ConsumerState]:
            chosen = [state for state in states if state.partition in wanted and state.last_event_id < end]
            with self._database.connection() as connection:
                for state in chosen:
                    if self._count(connection, topic, state.partition, after=state.last_event_id, upto=begin, limit=1):
                        raise RegistryError(
                            f"consumer {backfill.consumer!r} stands at offset {state.last_event_id}, before the range: "
                            "what lies between would be skipped; begin the range there"
                        )
            return chosen

        return self._platform.seeker.execute(topic, backfill.consumer, AtOffset(end + 1), choose=behind)


def _partitions(known: Sequence[Layout], after: int, upto: int) -> list[int]:
    """The partitions of the layouts that a range has to do with; empty where there are no layouts."""
    ends = [*(each.after for each in known[1:]), upto + 1]
    counts = [
        each.partitions for each, end in zip(known, ends, strict=True) if each.after < upto and end > after
    ] if known else []  # fmt: skip
    return list(range(max(counts, default=0)))


def _split(windows: Sequence[Window], at: Sequence[int]) -> list[Window]:
    """The windows, with those cut in two in which the topic was repartitioned: a key's events are in one partition."""
    ends = {window: sorted({offset for offset in at if window.after < offset < window.upto}) for window in windows}
    return [
        Window(after, upto)
        for window, cuts in ends.items()
        for after, upto in zip([window.after, *cuts], [*cuts, window.upto], strict=True)
    ]
