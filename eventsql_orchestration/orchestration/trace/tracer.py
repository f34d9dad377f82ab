"""Traces an event to its origin: its run, the ranges that the run had read, and so on to the first publishers.

The database is enough to go from run to run: an event names its run, and the claims of a run tell which ranges it read
and when. The orchestrator adds status and times, and Dagster the ranges that a run read without a claim.

Each shard has offsets of its own. Events are followed on the shard that holds them, and to the claims of their run on
any shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from eventsql_orchestration import Event, EventSQL, Shard
from eventsql_orchestration.consuming.dead_letter_values import REDRIVEN_FROM, SOURCE_OFFSET, SOURCE_TOPIC
from eventsql_orchestration.errors import ShardSetError, TopicNotFoundError, ValidationError
from eventsql_orchestration.orchestration.errors import LocalProcessError
from eventsql_orchestration.orchestration.owners import AIRFLOW_OWNER, airflow_run, owner_of
from eventsql_orchestration.orchestration.provenance import (
    AIRFLOW_DAG,
    AIRFLOW_MAP_INDEX,
    AIRFLOW_RUN,
    AIRFLOW_TASK,
    DAGSTER_ASSET,
    DAGSTER_PARTITION,
    DAGSTER_RUN,
    Writer,
)
from eventsql_orchestration.orchestration.shards import rows_of, shard_named, shards_of
from eventsql_orchestration.orchestration.trace.runs import RunFacts, RunInput, Runs
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.validation import counted

DAGSTER: Final = "Dagster"
AIRFLOW: Final = "Airflow"

DEPTH: Final = 10
WIDTH: Final = 20

COPIES: Final = 100
"""The most copies of copies that are followed, because any publisher may claim that its event is a copy."""

OFFSET_DIGITS: Final = 18
"""Digits of an offset that an event's metadata names; more would not fit into a bigint."""


@dataclass(frozen=True, slots=True)
class TracedEvents:
    """Events of one publisher within a topic, and their origin.

    `run_id`, `asset` and `partition` name the run that published the events between `since` and `until`; they are None
    if a service published them. `run` is what its orchestrator knows of the run, `inputs` the ranges that it had read.
    `original` is the original event if this event is a copy, for example a dead letter. `shard` holds the events; None
    if there is one database.
    """

    topic: str
    shard: str | None
    run_id: str | None
    asset: str | None
    partition: str | None
    events: int
    first: int
    last: int
    since: datetime
    until: datetime
    run: RunFacts | None = None
    inputs: tuple[TracedInput, ...] = ()
    original: TracedEvents | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedInput:
    """A range that a run has read, and the publishers of its events; `left_out` publishers are not listed."""

    range: RunInput
    origins: tuple[TracedEvents, ...] = ()
    left_out: int = 0
    notes: tuple[str, ...] = ()


@dataclass
class Tracer:
    """Follows events back. One object makes one tree: events that were shown are not followed again.

    `platform` is on one database or on all shards. `runs` has an orchestrator by its name if it can be asked. `depth`
    bounds the length of a chain of runs, `width` the publishers of one range. `deeper` says how to get longer chains.
    """

    platform: EventSQL
    runs: dict[str, Runs] = field(default_factory=dict)
    depth: int = DEPTH
    width: int = WIDTH
    deeper: str = "give a larger --depth"
    unreachable: dict[str, LocalProcessError] = field(default_factory=dict, init=False)
    """The error after which an orchestrator was not asked again."""
    _seen: set[tuple[str, str | None, str, int, int]] = field(default_factory=set, init=False)
    _copies: set[tuple[str, int]] = field(default_factory=set, init=False)

    @cached_property
    def _shards(self) -> dict[str | None, Shard]:
        return {shard.name: shard for shard in shards_of(self.platform)}

    def trace(self, topic: str, offset: int, *, shard: str | None = None) -> TracedEvents:
        """Trace the event at an offset, of `shard` if there are several.

        Raises `TopicNotFoundError`, `ValidationError` if there is no such event, and `ShardSetError` if there are
        several shards and none is named, or if `shard` does not exist.
        """
        if shard is None and None not in self._shards:
            known = ", ".join(sorted(name for name in self._shards if name is not None))
            raise ShardSetError(f"an offset means another event on each shard: name one of {known} (--shard NAME)")
        shard_named(list(self._shards.values()), shard)
        event = self._event(topic, offset, shard)
        if event is None:
            raise ValidationError(
                f"topic {topic!r} holds no event with the offset {offset}: `eventsql tail {topic}` shows its events"
            )
        return self._trace_event(event, shard)

    def inputs_of(self, run_id: str) -> tuple[TracedInput, ...]:
        """The ranges of all claims that a run had, as far as claims are kept, with the publishers of their events."""
        return tuple(
            self._input(each, self.depth - 1)
            for each in self._claims(run_id, datetime.min.replace(tzinfo=UTC), datetime.now(UTC))
        )

    def _event(self, topic: str, offset: int, shard: str | None) -> Event | None:
        if offset < 1:
            return None
        return next(iter(self._shards[shard].reader.read(topic, after=offset - 1, upto=offset)), None)

    def _trace_event(self, event: Event, shard: str | None) -> TracedEvents:
        at, metadata = event.buffered_at, event.metadata
        copied = _copied_from(event)
        # A copy keeps the metadata of its original, which names the run of the original.
        run_id, asset, partition = (None, None, None) if copied else _origin(metadata)
        traced = TracedEvents(event.topic, shard, run_id, asset, partition, 1, event.id, event.id, at, at)
        return self._trace_copy(traced, *copied) if copied else self._follow(traced, self.depth)

    def _trace_copy(self, copy: TracedEvents, topic: str, offset: int) -> TracedEvents:
        # A dead letter lies on the shard of its event, and is redriven there.
        original = None
        self._copies.add((copy.topic, copy.first))
        try:
            if (topic, offset) in self._copies:
                note = f"says that it is a copy of event {offset} of topic {topic}, which is shown above"
            elif len(self._copies) > COPIES:
                note = f"a copy of event {offset} of topic {topic}, which is not followed any further"
            else:
                note = f"event {offset} of topic {topic} is not kept any more"
                original = self._event(topic, offset, copy.shard)
        except TopicNotFoundError:
            note = f"a copy of event {offset} of topic {topic}, which does not exist any more"
        if original is None:
            return replace(copy, notes=(note,))
        return replace(copy, original=self._trace_event(original, copy.shard))

    def _follow(self, traced: TracedEvents, depth: int) -> TracedEvents:
        run_id = traced.run_id
        if run_id is None:
            return traced
        orchestrator = orchestrator_of(run_id)
        key = (run_id, traced.shard, traced.topic, traced.first, traced.last)
        if key in self._seen:
            return replace(traced, notes=("shown above",))
        self._seen.add(key)

        run = self._run(orchestrator, run_id)
        notes = [f"{orchestrator} has no such run any more"] if run is None and orchestrator in self.runs else []
        read = self._read_by(run_id, traced, run)
        if read and depth < 1:
            notes.append(f"it read {counted(len(read), 'range')}, not followed any further: {self.deeper}")
            return replace(traced, run=run, notes=tuple(notes))
        if run is not None and run.queue is not None:
            notes.append(f"it handled messages of queue {run.queue!r}")
        elif not read:
            notes.append(
                "neither a claim nor Dagster names a topic that it read"
                if run is not None and orchestrator == DAGSTER
                else f"it had no claim; only {orchestrator} knows what a run reads without one"
            )
        inputs = tuple(self._input(each, depth - 1) for each in read)
        return replace(traced, run=run, inputs=inputs, notes=tuple(notes))

    def _run(self, orchestrator: str, run_id: str) -> RunFacts | None:
        if orchestrator not in self.runs:
            return None
        try:
            return self.runs[orchestrator].run(run_id)
        except LocalProcessError as error:
            # The facts of the database are shown without the orchestrator's.
            del self.runs[orchestrator]
            self.unreachable[orchestrator] = error
            return None

    def _read_by(self, run_id: str, traced: TracedEvents, run: RunFacts | None) -> list[RunInput]:
        """The ranges that a run had read when it published: ranges of its claims then, and ranges without a claim."""
        told = () if run is None else run.inputs
        claimed = list(self._claims(run_id, traced.since, traced.until))
        if len({each.consumer for each in claimed}) > 1:
            claimed = self._of_asset(traced, claimed)
        return [*claimed, *(each for each in told if each.consumer is None)] if claimed else list(told)

    def _of_asset(self, traced: TracedEvents, claimed: Sequence[RunInput]) -> list[RunInput]:
        """The claims of the asset that published, from the claims of a run that several consumers share."""
        values = {"first": traced.since, "last": traced.until}
        rows = [row for shard in self._shards.values() for row in rows_of(shard, "lineage", "writers_between", values)]
        writers = [Writer.read(writer) for (writer,) in rows]
        committed = {(writer.shard, writer.claim) for writer in writers if writer.asset == traced.asset}
        by_record = [each for each in claimed if (each.shard, each.claim) in committed]
        # The record may be deleted, or the asset published without its claim. Most assets have their consumer's name.
        by_name = [each for each in claimed if each.consumer == traced.asset]
        return by_record or by_name or list(claimed)

    def _claims(self, run_id: str, since: datetime, until: datetime) -> Iterator[RunInput]:
        values = {"owner": owner_of(run_id), "first": since, "last": until}
        for name, shard in self._shards.items():
            rows = rows_of(shard, "lineage", "claims_of_run", values)
            for claim, topic, consumer, partition, after, upto, _events, _state in rows:
                yield RunInput(topic, partition, after, upto, consumer, claim, name)

    def _input(self, read: RunInput, depth: int) -> TracedInput:
        if read.shard not in self._shards:
            where = "the run does not say on which shard" if read.shard is None else f"there is no shard {read.shard!r}"
            return TracedInput(read, notes=(where,))
        try:
            self._shards[read.shard].registry.topic(read.topic)
        except TopicNotFoundError as error:
            return TracedInput(read, notes=(error.message,))

        database = self._shards[read.shard].database
        with database.connection() as connection:
            rows = LogRanges(database.schema).publishers(
                connection, read.topic, partition=read.partition, after=read.after, upto=read.upto
            )
        if not rows:
            none_kept = ("none of its events is kept any more",) if read.upto > read.after else ()
            return TracedInput(read, notes=none_kept)
        followed = tuple(self._follow(TracedEvents(read.topic, read.shard, *row), depth) for row in rows[: self.width])
        return TracedInput(read, followed, len(rows) - len(followed))


def orchestrator_of(run_id: str) -> str:
    """The orchestrator of a run that events name."""
    return AIRFLOW if run_id.startswith(AIRFLOW_OWNER) else DAGSTER


def _copied_from(event: Event) -> tuple[str, int] | None:
    """The topic and offset of the event that a dead letter or a redriven event is a copy of."""
    topic, offset = _text(event.metadata, SOURCE_TOPIC), _text(event.metadata, SOURCE_OFFSET)
    if topic is None or offset is None:
        topic, _, offset = (_text(event.metadata, REDRIVEN_FROM) or "").rpartition(":")
    return (topic, int(offset)) if topic and offset.isdecimal() and len(offset) <= OFFSET_DIGITS else None


def _origin(metadata: Any) -> tuple[str | None, str | None, str | None]:
    """The run of Dagster or Airflow that published an event, its asset or task, and its partition."""
    dag, run = _text(metadata, AIRFLOW_DAG), _text(metadata, AIRFLOW_RUN)
    run_id = _text(metadata, DAGSTER_RUN) or (airflow_run(dag, run) if dag is not None and run is not None else None)
    asset = _text(metadata, DAGSTER_ASSET) or _text(metadata, AIRFLOW_TASK)
    return run_id, asset, _text(metadata, DAGSTER_PARTITION) or _text(metadata, AIRFLOW_MAP_INDEX)


def _text(metadata: Any, name: str) -> str | None:
    value = metadata.get(name)
    return value if isinstance(value, str) else None
