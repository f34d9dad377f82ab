"""Compaction: merges the small blocks that single publications leave in a log, beside writers and readers.

A log is compacted in windows of up to 20,000 ids, each in a transaction of its own. A window is merged once it lies
behind the newest event, and no program changes blocks there any more: only an erasure does, and retention drops them.
Each transaction keeps both away. If it is interrupted, its window stays as it was.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    PermissionDeniedError,
    RegistryError,
)
from eventsql_orchestration.model import BLOCKS, Topic
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.storage import log_form, segments
from eventsql_orchestration.storage.compacting import LogCompactor, Merged, Window
from eventsql_orchestration.storage.erasing import try_change
from eventsql_orchestration.storage.segment_drops import try_retain
from eventsql_orchestration.storage.segments import Segment
from eventsql_orchestration.topics.registry import Registry

logger = logging.getLogger(__name__)

RUN_SECONDS: Final = 10.0
"""Seconds for which one run of the housekeeping merges blocks of a topic. The next run goes on."""

RETRY_SECONDS: Final = 30.0
"""Seconds that a window waits for an erasure or for retention."""

VACUUMED_BLOCKS: Final = 10_000
"""The number of merged blocks of a segment after which their space is freed for new blocks."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """The small blocks of a topic's log that were merged, or would be: the numbers of blocks and of their events.

    `into` is the number of blocks that took their place; None for a plan.
    """

    topic: str
    blocks: int
    events: int
    into: int | None


@checked
class Compactor:
    """Merges small blocks in the logs of one database."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        # By topic: the offset up to which the log needs no further look.
        self._done: dict[str, int] = {}

    def plan(self, topic: str) -> Compaction:
        """See `ClusterCompactor.plan`."""
        log = _Log(self._database, self._in_blocks(topic))
        blocks = events = 0
        with self._database.errors(), self._database.dedicated() as connection:
            for _, _, window in log.windows(connection, after=0):
                blocks, events = blocks + window.blocks, events + window.events
        return Compaction(topic, blocks, events, None)

    def execute(self, topic: str) -> Compaction:
        """See `ClusterCompactor.execute`."""
        return self._compact(self._in_blocks(topic), after=0)

    def run_once(self) -> list[Compaction]:
        """Merge blocks of all topics for some seconds each. An error leaves its topic for the next run."""
        compacted: list[Compaction] = []
        for topic in self._registry.topics():
            if topic.storage != BLOCKS:
                continue
            try:
                done = self._compact(topic, after=self._done.get(topic.name, 0), seconds=RUN_SECONDS)
            except PermissionDeniedError as error:
                # A transfer role has no right to compact; the admin's retention does it.
                logger.debug("the log of topic %r is left to the admin role: %s", topic.name, error)
            except EventSQLError as error:
                logger.warning("topic %r keeps its small blocks for now: %s", topic.name, error)
            else:
                compacted.append(done)
        return compacted

    def _in_blocks(self, topic: str) -> Topic:
        found = self._registry.topic(topic)
        with self._database.connection() as connection:
            form = log_form.form_now(connection, self._database.schema, topic)
        if not form.blocks:
            raise RegistryError(f"topic {topic!r} is stored in {found.storage}: only a log in blocks is compacted")
        return found

    def _compact(self, topic: Topic, *, after: int, seconds: float | None = None) -> Compaction:
        log = _Log(self._database, topic)
        started = time.monotonic()
        blocks = events = into = 0
        merged_blocks: Counter[str] = Counter()
        with self._database.errors(), self._database.dedicated() as connection:
            for segment, position, window in log.windows(connection, after=after):
                if window.partitions:
                    merged = log.merge(connection, position, window)
                    blocks, events, into = blocks + merged.blocks, events + merged.events, into + merged.into
                    merged_blocks[segment.table] += merged.blocks
                    if merged_blocks[segment.table] >= VACUUMED_BLOCKS:
                        log.vacuum(connection, segment)
                        merged_blocks[segment.table] = 0
                self._done[topic.name] = window.upto or position
                if seconds is not None and time.monotonic() - started > seconds:
                    break
        return Compaction(topic.name, blocks, events, into)


class _Log:
    """The log of one topic while it is compacted. The connections are in autocommit mode."""

    def __init__(self, database: Database, topic: Topic) -> None:
        database.ensure_schema()
        self._schema = database.schema
        self._topic = topic.name
        self._compactor = LogCompactor(database.schema, topic.name)

    def windows(self, connection: Connection, *, after: int) -> Iterator[tuple[Segment, int, Window]]:
        """The windows that may be merged: their segments, and the offsets after which they begin."""
        newest = self._compactor.newest(connection)
        if newest < after:
            # The topic was deleted and made anew.
            after = 0
        for segment in segments.segments(connection, self._schema, self._topic) or ():
            last = min(segment.end - 1, newest)
            position = max(after, segment.start - 1, 0)
            if segment.detaching or not segment.in_blocks:
                continue
            while position < last:
                window = self._compactor.window(connection, after=position, upto=last)
                if window.upto is None or window.upto == last < segment.end - 1:
                    # The last window is not full yet: more events will come into it.
                    break
                yield segment, position, window
                position = window.upto

    def merge(self, connection: Connection, after: int, window: Window) -> Merged:
        """Merge the blocks of a window, in a transaction that keeps retention and erasures away."""
        assert window.upto is not None
        retry = Backoff(RETRY_SECONDS)
        while True:
            with self._whole(), connection.transaction():
                if try_retain(connection, self._schema, self._topic) and try_change(
                    connection, self._schema, self._topic
                ):
                    merged = self._compactor.merge(
                        connection, after=after, upto=window.upto, partitions=window.partitions
                    )
                    if merged.events != merged.kept:
                        raise psycopg.errors.DataException("a block does not have the number of events in its row")
                    return merged
            if not retry.lasts():
                raise DatabaseBusyError(f"an erasure or a retention of topic {self._topic!r} is under way: try again")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Translate the server's error about a damaged block, which lacks events."""
        try:
            yield
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            raise DatabaseError(
                f"a block of topic {self._topic!r} is broken, and the blocks around it are not merged: run "
                f"`eventsql doctor` ({error})"
            ) from error

    def vacuum(self, connection: Connection, segment: Segment) -> None:
        """Free the space of merged blocks. If other transactions are in the way, the server does it later."""
        self._compactor.vacuum(connection, segment.table)
