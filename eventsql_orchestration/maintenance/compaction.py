"""Compaction: merges the small blocks that single publications leave in a log, beside writers and readers.

A log is compacted in windows of up to 20,000 ids, each in a transaction of its own. A window is merged once it lies
behind the newest event. By then, only erasures change its blocks, and only retention drops them. Each transaction keeps
both away. If a transaction is interrupted, its window stays as it was.

Merged blocks leave their space to the segment. A closed segment gets no further events: if it takes much more space
than its blocks need, a copy takes its place, and the disk has the space again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries, replaced_tables
from eventsql_orchestration.database.role_statements import act_as_owner
from eventsql_orchestration.database.sessions import let_last, wait_at_most
from eventsql_orchestration.errors import DatabaseBusyError, EventSQLError, PermissionDeniedError, RegistryError
from eventsql_orchestration.model import BLOCKS, Topic
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.storage import exchanging, log_form, segments
from eventsql_orchestration.storage.compacting import DAMAGED, LogCompactor, Merged, Window
from eventsql_orchestration.storage.erasing import try_change
from eventsql_orchestration.storage.exchanging import attempt
from eventsql_orchestration.storage.segment_drops import try_retain
from eventsql_orchestration.storage.segments import Segment
from eventsql_orchestration.topics.registry import Registry

logger = logging.getLogger(__name__)

RUN_SECONDS: Final = 10.0
"""Seconds after which one run of the housekeeping ends with the next merge of blocks or copy of a segment. The next
run goes on."""

RETRY_SECONDS: Final = 30.0
"""Seconds that a window waits for an erasure or for retention."""

LOCK_SECONDS: Final = 5
"""How long a compaction waits for the writer of a topic, and for each other lock."""

VACUUMED_BLOCKS: Final = 10_000
"""The number of merged blocks of a segment after which their space is freed for new blocks."""

SPARE_BYTES: Final = 16 << 20
"""A segment may be larger than its blocks need, by this many bytes plus a fifth of its own size. A larger segment is
rewritten: a fresh segment takes about 4 % more than its blocks need."""

SPARE_SHARE: Final = 0.2


class Unmerged(NamedTuple):
    """Small blocks of one partition between two offsets that are not merged, because one of them is broken."""

    partition: int
    after: int
    upto: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """The small blocks of a topic's log that were merged, or would be: the numbers of blocks and of their events.

    `into` is the number of blocks that took their place, and `freed` the number of bytes that the disk has again; None
    for a plan. `unmerged` are blocks that were left as they were, because one of them is broken.
    """

    topic: str
    blocks: int
    events: int
    into: int | None
    freed: int | None = None
    unmerged: tuple[Unmerged, ...] = ()


@checked
class Compactor:
    """Merges small blocks in the logs of one database."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        # By topic: the offset up to which the log needs no further look.
        self._done: dict[str, int] = {}
        # By topic and segment: its bytes when it took no more space than it needs. An erasure makes it larger.
        self._packed: dict[str, dict[str, int]] = {}

    def plan(self, topic: str) -> Compaction:
        """See `ClusterCompactor.plan`."""
        log = _Log(self._database, self._in_blocks(topic))
        blocks = events = 0
        with self._database.errors(), self._database.dedicated() as connection:
            for segment in log.segments(connection):
                for _, window in log.windows(connection, segment, after=0):
                    blocks, events = blocks + window.blocks, events + window.events
        return Compaction(topic, blocks, events, None)

    def execute(self, topic: str) -> Compaction:
        """See `ClusterCompactor.execute`."""
        wanted = self._in_blocks(topic)
        with self._database.by_admin(), self._database.dedicated() as connection:
            return self._compact(connection, wanted, after=0)

    def run_once(self) -> list[Compaction]:
        """Merge blocks of all topics for some seconds each. An error leaves its topic for the next run."""
        compacted: list[Compaction] = []
        topics = deque(topic for topic in self._registry.topics() if topic.storage == BLOCKS)
        while topics:
            with self._database.dedicated() as connection:
                # An error may end the session: the next topic gets another session.
                while topics and not connection.closed:
                    self._try(connection, topics.popleft(), compacted)
        return compacted

    def _try(self, connection: Connection, topic: Topic, compacted: list[Compaction]) -> None:
        after = self._done.get(topic.name, 0)
        try:
            compacted.append(self._compact(connection, topic, after=after, seconds=RUN_SECONDS))
        except PermissionDeniedError as error:
            # A transfer role has no right to compact; the admin's retention does it.
            logger.debug("the log of topic %r is left to the admin role: %s", topic.name, error)
        except EventSQLError as error:
            logger.warning("topic %r keeps its small blocks for now: %s", topic.name, error)

    def _in_blocks(self, topic: str) -> Topic:
        found = self._registry.topic(topic)
        with self._database.connection() as connection:
            form = log_form.form_now(connection, self._database.schema, topic)
        if not form.blocks:
            raise RegistryError(f"topic {topic!r} is stored in {found.storage}: only a log in blocks is compacted")
        return found

    def _compact(
        self, connection: Connection, topic: Topic, *, after: int, seconds: float | None = None
    ) -> Compaction:  # fmt: skip
        """Merge small blocks after an offset, for some seconds. Without `seconds`, merge all; that may roll the log."""
        log, done = _Log(self._database, topic), _Done(None if seconds is None else time.monotonic() + seconds)
        with self._database.errors():
            existing, newest = log.segments(connection), log.newest(connection)
            if newest < after:
                # The topic was deleted and made anew.
                after = 0
                self._packed.pop(topic.name, None)
            for segment in existing:
                if not self._compact_segment(log, connection, segment, after=after, done=done):
                    break
                if seconds is None and segment is existing[-1] and log.roll(connection, segment):
                    self._compact_segment(log, connection, segment, after=self._done.get(log.topic, after), done=done)
        return Compaction(topic.name, done.blocks, done.events, done.into, done.freed, tuple(done.unmerged))

    def _compact_segment(self, log: _Log, connection: Connection, segment: Segment, *, after: int, done: _Done) -> bool:
        """Merge small blocks of a segment, and rewrite it if that frees much space. False if the time is over."""
        since_vacuum = 0
        packed = self._packed.setdefault(log.topic, {})
        if packed.get(segment.table) != segment.bytes:
            packed.pop(segment.table, None)
        if segment.end <= after and segment.table in packed:
            return True
        for position, window in log.windows(connection, segment, after=after):
            if window.partitions:
                merged = log.merge(connection, position, window, done.unmerged)
                done.blocks, done.events = done.blocks + merged.blocks, done.events + merged.events
                done.into += merged.into
                since_vacuum += merged.blocks
                packed.pop(segment.table, None)
                if since_vacuum >= VACUUMED_BLOCKS:
                    log.vacuum(connection, segment)
                    since_vacuum = 0
            self._done[log.topic] = window.upto or position
            # A look is cheap, and a process that begins at the start of the log has to come to its small blocks.
            if window.partitions and done.is_over():
                return False
        if segment.table not in packed and log.is_closed(connection, segment):
            freed = log.give_back(connection, segment)
            done.freed += freed or 0
            if freed is not None:
                packed[segment.table] = segment.bytes - freed
            if freed and done.is_over():
                return False
        return True


@dataclass(slots=True)
class _Done:
    """What a compaction has done so far, and the end of its time by `time.monotonic`; None without an end."""

    until: float | None
    blocks: int = 0
    events: int = 0
    into: int = 0
    freed: int = 0
    unmerged: list[Unmerged] = field(default_factory=list)

    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until


class _Log:
    """The log of one topic while it is compacted. The connections are in autocommit mode."""

    def __init__(self, database: Database, topic: Topic) -> None:
        database.ensure_schema()
        self.topic = topic.name
        self._database = database
        self._schema = database.schema
        self._compactor = LogCompactor(database.schema, topic.name)

    def newest(self, connection: Connection) -> int:
        """The last id of the log; 0 if it is empty."""
        return self._compactor.newest(connection)

    def segments(self, connection: Connection) -> list[Segment]:
        """The segments with blocks that may be merged or rewritten, up to the newest event."""
        newest = self.newest(connection)
        return [
            each
            for each in segments.segments(connection, self._schema, self.topic) or ()
            if each.in_blocks and not each.detaching and each.start <= newest
        ]

    def windows(self, connection: Connection, segment: Segment, *, after: int) -> Iterator[tuple[int, Window]]:
        """The windows of a segment that may be merged, and the offsets after which they begin."""
        newest = self.newest(connection)
        last = min(segment.end - 1, newest)
        position = max(after, segment.start - 1, 0)
        closed = last < newest or self.is_closed(connection, segment)
        while position < last:
            window = self._compactor.window(connection, after=position, upto=last)
            if window.upto is None or (window.upto == last and not closed):
                # The last window is not full yet: more events will come into it.
                break
            yield position, window
            position = window.upto

    def is_closed(self, connection: Connection, segment: Segment) -> bool:
        """Whether a segment gets no further events."""
        if segments.newest_id(connection, self._schema, self.topic) < segment.end - 1:
            return False
        # A writer that has drawn ids of the segment holds the topic until they are committed.
        with connection.transaction():
            self._hold(connection)
        return True

    def roll(self, connection: Connection, segment: Segment) -> bool:
        """Close the newest segment if it is worth rewriting: new events get ids of the next segment."""
        if not self._is_spacious(connection, segment):
            return False
        with connection.transaction():
            self._hold(connection)
            newest = segments.newest_id(connection, self._schema, self.topic)
            if not segment.start <= newest < segment.end - 1:
                return False
            segments.roll(connection, self._schema, self.topic, segment)
            segments.ensure_ahead(connection, self._schema, self.topic)
        return True

    def _hold(self, connection: Connection) -> None:
        """Become the one writer of the topic, in the caller's transaction."""
        wait_at_most(connection, LOCK_SECONDS)
        connection.execute(Queries("log", self._schema)("await_topic"), {"topic": self.topic})

    def _is_spacious(self, connection: Connection, segment: Segment) -> bool:
        try:
            space = self._compactor.space(connection, segment)
        except psycopg.errors.UndefinedTable:
            # A retention has dropped it.
            return False
        return space.taken - space.needed > SPARE_BYTES + space.taken * SPARE_SHARE

    def merge(self, connection: Connection, after: int, window: Window, unmerged: list[Unmerged]) -> Merged:
        """Merge the blocks of a window, and append the partitions with broken blocks to `unmerged`."""
        assert window.upto is not None
        try:
            return self._merge(connection, after, window.upto, window.partitions)
        except DAMAGED:
            # Merge one partition after the other, so that the sound partitions are merged.
            found = Merged(0, 0, 0, 0)
        for partition in window.partitions:
            try:
                merged = self._merge(connection, after, window.upto, [partition])
            except DAMAGED as error:
                logger.warning(
                    "topic %r keeps the small blocks of partition %d with the offsets %d to %d, because one of them is "
                    "broken: run `eventsql doctor` (%s)", self.topic, partition, after + 1, window.upto, error,
                )  # fmt: skip
                unmerged.append(Unmerged(partition, after, window.upto))
            else:
                found = Merged(*map(add, found, merged))
        return found

    def _merge(self, connection: Connection, after: int, upto: int, partitions: list[int]) -> Merged:
        with self._undisturbed(connection):
            merged = self._compactor.merge(connection, after=after, upto=upto, partitions=partitions)
            if merged.events != merged.kept:
                raise psycopg.errors.DataException("a block does not have the number of events in its row")
            return merged

    @contextmanager
    def _undisturbed(self, connection: Connection) -> Iterator[None]:
        """A transaction that keeps retention and erasures away."""
        retry = Backoff(RETRY_SECONDS)
        while True:
            with connection.transaction():
                # A limit of the session would end the same merge in each run.
                let_last(connection)
                wait_at_most(connection, LOCK_SECONDS)
                locked = all(lock(connection, self._schema, self.topic) for lock in (try_retain, try_change))
                if locked:
                    yield
                    return
            if not retry.lasts():
                raise DatabaseBusyError(f"an erasure or a retention of topic {self.topic!r} is under way: try again")

    def vacuum(self, connection: Connection, segment: Segment) -> None:
        """Free the space of merged blocks. If other transactions are in the way, the server does it later."""
        self._compactor.exchange(segment).vacuum(connection)

    def give_back(self, connection: Connection, segment: Segment) -> int | None:
        """Rewrite a closed segment if it takes much more space than it needs. Gives how many bytes the disk has again.

        None if other transactions are in the way: a later run tries again. A segment that cannot be copied stays as it
        is.
        """
        if not self._is_spacious(connection, segment) or not self._may_be_exchanged(connection, segment):
            return 0
        try:
            exchanged = self._exchange(connection, segment)
        except psycopg.errors.LockNotAvailable:
            # Another transaction waits for the segment.
            exchanged = False
        except (*DAMAGED, psycopg.errors.DiskFull) as error:
            # Another copy would fail too, and a disk that is full again and again stops the writers.
            logger.warning("segment %r keeps its free space, because it cannot be copied: %s", segment.table, error)
            return 0
        if not exchanged:
            return None
        present = segments.segments(connection, self._schema, self.topic) or ()
        return segment.bytes - sum(each.bytes for each in present if each.table == segment.table)

    def _exchange(self, connection: Connection, segment: Segment) -> bool:
        """Let a copy take the place of a closed segment. False if other transactions are in the way."""
        with self._database.dedicated() as source, self._undisturbed(connection):
            exchanging.begin(connection)
            present = segments.segments(connection, self._schema, self.topic) or ()
            if (segment.table, segment.log) not in {(each.table, each.log) for each in present if not each.detaching}:
                # A retention has dropped it, or a change of the form has given its log another name.
                return False
            # If VACUUM did not run, the server's numbers may be older than the newest events.
            own = self._compactor.exchange(segment)
            bounds = own.seen_by_all(source) if own.vacuum(source) else None
            has_roles = act_as_owner(connection, self._schema)
            if bounds is None or not attempt(connection, own.probe) or not attempt(connection, own.keep_writers_away):
                return False

            new = self._compactor.rewrite(connection, source, segment)
            if not has_roles:
                segments.pass_on_owner(connection, self._schema, own.table, new)
            replaced_tables.grant_as_on(connection, own.table, new)
            exchange = partial(own.replace, new=new, bounds=bounds)
            if not attempt(connection, exchange, seconds=exchanging.EXCHANGE_SECONDS):
                connection.execute(sql.SQL("DROP TABLE {}").format(new))
                return False
            return True

    def _may_be_exchanged(self, connection: Connection, segment: Segment) -> bool:
        """Whether no view or other object depends on the table of a segment, and no replication reads it."""
        exchange = self._compactor.exchange(segment)
        found = segments.dependents(connection, self._schema, self.topic, exchange.table)
        if found or exchange.is_published(connection):
            logger.info("segment %r keeps its free space, because %s", segment.table, found or "it may be replicated")
            return False
        return True
