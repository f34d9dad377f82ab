"""Where an event comes from: the run that published it, what that run had read, and so on to the first publishers.

What the database knows suffices to go from run to run: an event names its run, and the claims of a run say what it had
read when. Dagster adds status and times, and what a run has read without a claim.

Of several shards each has offsets of its own: events are followed on the shard where they lie, to the claims that their
run had on any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from psycopg.rows import tuple_row

from eventsql_orchestration import Event, EventSQL
from eventsql_orchestration.dagster.draining import owner_of_run
from eventsql_orchestration.dagster.lineage import ASSET_KEY, PARTITION, RUN_ID, asset_of, claim_of, shard_of
from eventsql_orchestration.dagster.runs import RunFacts, RunInput, Runs
from eventsql_orchestration.dagster.shards import shards_of
from eventsql_orchestration.database import Queries
from eventsql_orchestration.errors import LocalDagsterError, ShardSetError, TopicNotFoundError, ValidationError
from eventsql_orchestration.log.dead_letters import REDRIVEN_FROM, SOURCE_OFFSET, SOURCE_TOPIC
from eventsql_orchestration.model import NOT_PARTITIONED

DEPTH: Final = 10
WIDTH: Final = 20

COPIES: Final = 100
"""Copies of copies that are followed: anybody may publish an event that says what it is a copy of."""

OFFSET_DIGITS: Final = 18
"""Of an offset that such an event names; it could be no number at all, and more than a bigint holds."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Who published events: a run and its asset and partition; none of them where it was no run."""

    run_id: str | None = None
    asset: str | None = None
    partition: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Events of one publisher within a topic, and where they come from in turn.

    `run` is what is known of the run, where one published them. `original` is the event that they are a copy of, as a
    dead letter is. `shard` is where they lie, where there are several.
    """

    topic: str
    events: int
    first: int
    last: int
    publisher: Publisher
    run: RunFacts | None = None
    inputs: tuple[Input, ...] = ()
    original: Origin | None = None
    notes: tuple[str, ...] = ()
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """A range that a run has read, and who had published its events; `left_out` more are not listed."""

    range: RunInput
    origins: tuple[Origin, ...] = ()
    left_out: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Group:
    """The events of one publisher within a range, and between when they were published."""

    topic: str
    publisher: Publisher
    events: int
    first: int
    last: int
    since: datetime
    until: datetime
    shard: str | None


@dataclass
class Tracer:
    """Follows events back. One object for one tree: what was shown once is not followed again.

    `platform` is on one database, or on all shards. `runs` is None where Dagster cannot be asked. `depth` bounds how
    many runs lie behind one another, `width` how many publishers of one range are followed.
    """

    platform: EventSQL
    runs: Runs | None = None
    depth: int = DEPTH
    width: int = WIDTH
    unreachable: LocalDagsterError | None = field(default=None, init=False)
    """Why Dagster was not asked any further, where it did not answer."""
    _seen: set[tuple[str, str | None, str, int, int]] = field(default_factory=set, init=False)
    _copies: set[tuple[str, int]] = field(default_factory=set, init=False)

    @cached_property
    def _shards(self) -> dict[str | None, EventSQL]:
        return {shard.shard: shard for shard in shards_of(self.platform)}

    def trace(self, topic: str, offset: int, *, shard: str | None = None) -> Origin:
        """The way of one event; of several shards, that of `shard`.

        Raises `TopicNotFoundError`, `ValidationError` where there is no such event, and `ShardSetError` where several
        shards have such an offset and none is named, or one that there is not.
        """
        if shard not in self._shards:
            known = ", ".join(sorted(name for name in self._shards if name is not None))
            raise ShardSetError(
                f"an offset means another event on each shard: name one of {known} (--shard NAME)"
                if shard is None
                else f"there is no shard {shard!r}" + (f", but {known}" if known else "")
            )
        event = self._event(topic, offset, shard)
        if event is None:
            raise ValidationError(
                f"topic {topic!r} holds no event with the offset {offset}: `eventsql tail {topic}` shows what it holds"
            )
        return self._trace_event(event, shard)

    def _event(self, topic: str, offset: int, shard: str | None) -> Event | None:
        if offset < 1:
            return None
        return next(iter(self._shards[shard].reader.read(topic, after=offset - 1, upto=offset)), None)

    def _trace_event(self, event: Event, shard: str | None) -> Origin:
        copied = _copied_from(event)
        if copied is not None:
            # It has kept the metadata of the event that it is a copy of, which names that one's run.
            return self._trace_copy(event, *copied, shard)
        metadata = event.metadata
        publisher = Publisher(*(_text(metadata, name) for name in (RUN_ID, ASSET_KEY, PARTITION)))
        at = event.buffered_at
        return self._follow(_Group(event.topic, publisher, 1, event.id, event.id, at, at, shard), self.depth)

    def _trace_copy(self, event: Event, topic: str, offset: int, shard: str | None) -> Origin:
        # A dead letter lies on the shard of its event, and is redriven there.
        original = None
        self._copies.add((event.topic, event.id))
        try:
            if (topic, offset) in self._copies:
                note = f"says that it is a copy of event {offset} of topic {topic}, which is shown above"
            elif len(self._copies) > COPIES:
                note = f"a copy of event {offset} of topic {topic}, which is not followed any further"
            else:
                note = f"event {offset} of topic {topic} is not kept any more"
                original = self._event(topic, offset, shard)
        except TopicNotFoundError as error:
            note = error.message
        return Origin(
            event.topic, 1, event.id, event.id, Publisher(),
            original=None if original is None else self._trace_event(original, shard),
            notes=() if original is not None else (note,), shard=shard,
        )  # fmt: skip

    def _follow(self, group: _Group, depth: int) -> Origin:
        def origin(run: RunFacts | None = None, inputs: tuple[Input, ...] = (), *notes: str) -> Origin:
            return Origin(
                group.topic, group.events, group.first, group.last, group.publisher, run, inputs,
                notes=notes, shard=group.shard,
            )  # fmt: skip

        run_id = group.publisher.run_id
        if run_id is None:
            return origin()
        key = (run_id, group.shard, group.topic, group.first, group.last)
        if key in self._seen:
            return origin(None, (), "shown above")
        self._seen.add(key)
        run = self._run(run_id)
        notes = ["Dagster has no such run any more"] if run is None and self.runs is not None else []
        read = self._read_by(run_id, group, run)
        if read and depth < 1:
            ranges = f"{len(read)} range{'' if len(read) == 1 else 's'}"
            return origin(run, (), *notes, f"it read {ranges}, not followed any further: give a larger --depth")
        if not read:
            notes.append(
                "it read no topic that a claim or Dagster tells of"
                if run is not None
                else "it had no claim; what it read without one, Dagster knows"
            )
        return origin(run, tuple(self._input(each, depth - 1) for each in read), *notes)

    def _run(self, run_id: str) -> RunFacts | None:
        if self.runs is None:
            return None
        try:
            return self.runs.run(run_id)
        except LocalDagsterError as error:
            # What the database knows is shown all the same.
            self.runs, self.unreachable = None, error
            return None

    def _read_by(self, run_id: str, group: _Group, run: RunFacts | None) -> list[RunInput]:
        """What a run had read when it published these events: the claims that it held then, and what has none."""
        told = () if run is None else run.inputs
        claimed = list(self._claims(run_id, group.since, group.until))
        if len({each.consumer for each in claimed}) > 1:
            claimed = self._of_publisher(group, claimed)
        return [*claimed, *(each for each in told if each.consumer is None)] if claimed else list(told)

    def _of_publisher(self, group: _Group, claimed: Sequence[RunInput]) -> list[RunInput]:
        """Of the claims of a run that several consumers share, those that the publisher's asset had."""
        committed = {
            (shard_of(writer), claim_of(writer))
            for shard in self._shards
            for (writer,) in self._rows(shard, "writers_between", {"first": group.since, "last": group.until})
            if asset_of(writer) == group.publisher.asset
        }
        by_record = [each for each in claimed if (each.shard, each.claim) in committed]
        # The record may be gone, or the asset has published without its claim; most are called like their consumer.
        by_name = [each for each in claimed if each.consumer == group.publisher.asset]
        return by_record or by_name or list(claimed)

    def _claims(self, run_id: str, since: datetime, until: datetime) -> Iterator[RunInput]:
        values = {"owner": owner_of_run(run_id), "first": since, "last": until}
        for shard in self._shards:
            rows = self._rows(shard, "claims_of_run", values)
            for claim, topic, consumer, partition, after, upto, _events, _state in rows:
                yield RunInput(topic, partition, after, upto, consumer, claim, shard)

    def _input(self, read: RunInput, depth: int) -> Input:
        if read.shard not in self._shards:
            where = "the run does not say on which shard" if read.shard is None else f"there is no shard {read.shard!r}"
            return Input(read, notes=(where,))
        try:
            self._shards[read.shard].registry.topic(read.topic)
        except TopicNotFoundError as error:
            return Input(read, notes=(error.message,))
        groups = self._groups(read)
        if not groups:
            return Input(read, notes=("none of its events is kept any more",) if read.upto > read.after else ())
        followed = tuple(self._follow(group, depth) for group in groups[: self.width])
        return Input(read, followed, len(groups) - len(followed))

    def _groups(self, read: RunInput) -> list[_Group]:
        name = "origins" if read.partition == NOT_PARTITIONED else "origins_in_partition"
        values = {"after": read.after, "upto": read.upto, "partition": read.partition}
        rows = self._rows(read.shard, name, values, topic=read.topic)
        return [
            _Group(read.topic, Publisher(run, asset, partition), events, first, last, since, until, read.shard)
            for run, asset, partition, events, first, last, since, until in rows
        ]

    def _rows(self, shard: str | None, name: str, values: dict[str, Any], *, topic: str | None = None) -> list[Any]:
        database = self._shards[shard].database
        statement = Queries("lineage", database.schema)(name, topic=topic)
        with database.connection() as connection:
            return connection.cursor(row_factory=tuple_row).execute(statement, values, prepare=False).fetchall()


def _copied_from(event: Event) -> tuple[str, int] | None:
    """The event that a dead letter or a redriven event was made of."""
    topic, offset = _text(event.metadata, SOURCE_TOPIC), _text(event.metadata, SOURCE_OFFSET)
    if topic is None or offset is None:
        topic, _, offset = (_text(event.metadata, REDRIVEN_FROM) or "").rpartition(":")
    return (topic, int(offset)) if topic and offset.isdecimal() and len(offset) <= OFFSET_DIGITS else None


def _text(metadata: Any, name: str) -> str | None:
    value = metadata.get(name)
    return value if isinstance(value, str) else None
