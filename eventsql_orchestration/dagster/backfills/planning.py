"""Plans of backfills: which windows of a range there would be, and what each holds; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from eventsql_orchestration import NOT_PARTITIONED, EventSQL
from eventsql_orchestration.dagster.windows import (
    MAX_RUNS,
    Backfill,
    Plan,
    PlannedRun,
    Window,
    check_cut,
    check_order,
)
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log.layouts import Layout
from eventsql_orchestration.log.positions import AtOffset, AtTime, Back, Earliest, Latest, Place, resolve
from eventsql_orchestration.log.registry import choose_partitions
from eventsql_orchestration.log.side_consumers import MARK


class BackfillPlanner:
    """Looks at a database's logs, and says what would be replayed."""

    def __init__(self, platform: EventSQL) -> None:
        self._platform = platform
        self._database = platform.database
        self._queries = Queries("backfills", platform.database.schema)

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
        then = _partitions(known, after, upto)
        if partition is None:
            wanted = then or choose_partitions(states, None)
        else:
            # The topic may have had more partitions then.
            wanted = [partition] if partition in then else choose_partitions(states, partition)
        if any(state.paused for state in states):
            remarks.append(f"consumer {consumer!r} is paused, and stays so: a backfill runs all the same")
        if any(state.last_event_id > after for state in states):
            remarks.append(
                f"consumer {consumer!r} has had events of this range: its function is handed them again, and must bear "
                "that (an upsert does)"
            )
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
            return [Window(after, upto, self._platform.shard)]
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
        return [Window(begin, end, self._platform.shard) for begin, end in zip([after, *ends], ends, strict=False)]

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

    def _first(self, connection: Connection, topic: str, after: int, upto: int) -> int | None:
        row = connection.execute(
            self._queries("first_after", topic=topic), {"after": after, "upto": upto}, prepare=False
        ).fetchone()
        assert row is not None, "an aggregate gives one row"
        return None if row[0] is None else int(row[0])


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
        Window(after, upto, window.shard)
        for window, cuts in ends.items()
        for after, upto in zip([window.after, *cuts], [*cuts, window.upto], strict=True)
    ]
