"""Plans of backfills: the windows that a range is cut into on one log, and the events in each. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from eventsql_orchestration import NOT_PARTITIONED, Shard
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.windows import MAX_RUNS, LogPlan, PlannedRun, ReplayRange, Window
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.topics.catalog import choose_partitions
from eventsql_orchestration.topics.layouts import Layout
from eventsql_orchestration.topics.offsets import offset_of
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest
from eventsql_orchestration.validation import counted


class LogPlanner:
    """Plans backfills on the logs of one shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._schema = shard.database.schema
        self._ranges = LogRanges(self._schema)

    def plan(self, topic: str, consumer: str, wanted: ReplayRange) -> LogPlan:
        """Plan a backfill as it would run now. Raises as `Backfills.plan`."""
        created_at = self._shard.registry.topic(topic).created_at
        states = self._shard.registry.consumer(topic, consumer)
        after, upto, remarks = self._offsets(topic, wanted)

        layouts = [] if states[0].partition == NOT_PARTITIONED else self._shard.layouts.of(topic)
        # The topic may have had more partitions then.
        then = list(range(max((each.partitions for each in layouts_within(layouts, after, upto)), default=0)))
        if wanted.partition is None:
            partitions = then or choose_partitions(states, None)
        else:
            partitions = [wanted.partition] if wanted.partition in then else choose_partitions(states, wanted.partition)

        windows = _split(self._cut(topic, after, upto, wanted), [each.after for each in layouts])
        runs, times = self.contents(topic, windows, partitions)

        if any(state.paused for state in states):
            remarks.append(f"consumer {consumer!r} is paused and stays paused; the backfill runs anyway")
        if any(state.last_event_id > after for state in states):
            remarks.append(
                f"consumer {consumer!r} has consumed events of this range: its function gets them again and must "
                "tolerate that, for example by an upsert"
            )
        if states[0].filter is not None:
            remarks.append(f"only events that match the consumer's filter are replayed ({states[0].filter})")
        if len({run.window for run in runs}) > 1:
            remarks.append("a key's events keep their order within a window, and across windows only with --parallel 1")

        with self._shard.database.connection() as connection:
            first_event = self._ranges.first(connection, topic, after=after, upto=upto)
        return LogPlan(
            self._shard.name, tuple(partitions), after, upto, tuple(runs), first_event, created_at,
            min(times, default=None), max(times, default=None), tuple(remarks),
        )  # fmt: skip

    def contents(
        self, topic: str, windows: Sequence[Window], partitions: Sequence[int]
    ) -> tuple[list[PlannedRun], list[datetime]]:
        """The runs of some windows, and times between which all of their events entered the log."""
        with self._shard.database.connection() as connection:
            rows = self._ranges.contents(connection, topic, [(each.after, each.upto) for each in windows])
        of = {window.upto: window for window in windows}
        whole = list(partitions) == [NOT_PARTITIONED]
        counts: dict[tuple[Window, int], int] = {}
        times: list[datetime] = []
        for upto, partition, events, first, last in rows:
            if whole or partition in partitions:
                run = (of[upto], NOT_PARTITIONED if whole else partition)
                counts[run] = counts.get(run, 0) + events
                times += [first, last]
        return [PlannedRun(window, partition, events) for (window, partition), events in sorted(counts.items())], times

    def _offsets(self, topic: str, wanted: ReplayRange) -> tuple[int, int, list[str]]:
        """The offsets of a range (after, upto), and remarks on events that the log does not hold."""
        start, end = wanted.start, wanted.end
        with self._shard.database.connection() as connection:
            last = AtOffset(end.offset + 1) if isinstance(end, AtOffset) else end
            places = (Earliest(), Latest(), start, last)
            begin, log_end, after, upto = (offset_of(connection, self._schema, topic, place) for place in places)
        if after > upto:
            raise ValidationError(f"the range ends at offset {upto}, before it begins at offset {after + 1}")

        remarks = []
        if isinstance(start, AtOffset) and start.offset <= begin and begin > 0:
            asked = max(1, start.offset)
            remarks.append(
                f"the log now begins at offset {begin + 1:,}: offsets {asked:,} to {begin:,} of the range "
                f"({begin - asked + 1:,}) are gone"
            )
        elif isinstance(start, AtTime | Back) and after == begin and begin > 0:
            remarks.append(f"the log now begins at offset {begin + 1:,}: earlier events are gone")
        if isinstance(start, AtOffset) and start.offset > log_end:
            remarks.append(f"the log ends at offset {log_end:,}, before the range begins")
        elif isinstance(end, AtOffset) and end.offset > log_end:
            remarks.append(f"the log ends at offset {log_end:,}: the range ends there")
        if isinstance(end, Latest) and (waiting := self._shard.buffered().get(topic)):
            remarks.append(f"{counted(waiting, 'event')} in the buffer: not part of the range yet")
        return after, upto, remarks

    def _cut(self, topic: str, after: int, upto: int, wanted: ReplayRange) -> list[Window]:
        if after >= upto:
            return []
        if wanted.window_events is None and wanted.window is None:
            return [Window(after, upto, self._shard.name)]
        ends = self._ends(topic, after, upto, wanted)
        if len(ends) > MAX_RUNS:
            raise ValidationError(f"{len(ends):,} windows are too many ({MAX_RUNS:,} at most): use larger windows")
        return [Window(begin, end, self._shard.name) for begin, end in zip([after, *ends], ends, strict=False)]

    def _ends(self, topic: str, after: int, upto: int, wanted: ReplayRange) -> list[int]:
        """The last offset of each window with events."""
        with self._shard.database.connection() as connection:
            if wanted.window is not None:
                return self._ranges.ends_of_periods(
                    connection, topic, after=after, upto=upto, seconds=wanted.window.total_seconds()
                )
            events = wanted.window_events or 1
            return self._ranges.ends_of_events(connection, topic, after=after, upto=upto, events=events)


def layouts_within(layouts: Sequence[Layout], after: int, upto: int) -> list[Layout]:
    """The layouts that apply to some offset of a range."""
    ends = [*(each.after for each in layouts[1:]), upto + 1]
    return [each for each, end in zip(layouts, ends, strict=False) if each.after < upto and end > after]


def _split(windows: Sequence[Window], at: Sequence[int]) -> list[Window]:
    """Cut the windows where the topic was repartitioned: within one, a key's events are in one partition."""
    ends = {window: sorted({offset for offset in at if window.after < offset < window.upto}) for window in windows}
    return [
        Window(after, upto, window.shard)
        for window, cuts in ends.items()
        for after, upto in zip([window.after, *cuts], [*cuts, window.upto], strict=True)
    ]
