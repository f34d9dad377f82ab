"""Retention: drops old segments of a topic's log as a whole, in constant time, after every consumer has passed them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.database.role_statements import act_as_owner, grant
from eventsql_orchestration.database.sessions import let_last, wait_at_most
from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import DatabaseBusyError, EventSQLError, PermissionDeniedError
from eventsql_orchestration.maintenance.compaction import Compactor
from eventsql_orchestration.maintenance.erasure import prune_records
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, Retention, Topic
from eventsql_orchestration.publishing.staged_blocks import StagedBlocks
from eventsql_orchestration.storage import altering, log_form, segments
from eventsql_orchestration.storage.erasing import try_change
from eventsql_orchestration.storage.segment_drops import LOCK_SECONDS, SegmentDrops, drop_leftovers, is_of, try_retain
from eventsql_orchestration.storage.segments import Segment
from eventsql_orchestration.topics.catalog import lock_registry
from eventsql_orchestration.topics.leftovers import Leftovers
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import Duration, in_seconds

logger = logging.getLogger(__name__)

ROLL_SHARE: Final = 8
"""A segment is closed when it holds an eighth of the events to keep, so retention is exact to an eighth."""

MOST_SEGMENTS: Final = 64
"""A log with as many segments keeps its current one open until the ids of that segment are used up. While a consumer
stands still, a short retention would close segments for ever. Measured: with 302 segments, reading the lag of a topic
takes 1,010 ms, and 119 ms with 3. A statement that reads the whole log also needs a lock for each segment and index."""

WAIT_SECONDS: Final = 30
"""How long dropping a segment waits for transactions that may read it. New transactions do not wait."""

SIMPLIFY_SECONDS: Final = 0.5
"""How long readers and publishers of a topic wait, at most, while its log gets one form again. It is shorter than the
server's `deadlock_timeout`, so that retention gives way, and not a reader that waits for it."""

RUN_SECONDS: Final = 60.0
"""How often a program that transfers looks for due segments."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The drop of a topic's old events by retention: segments, events, bytes, and the newest dropped offset.

    `events` is the planner's estimate. `held_by` is the consumer that keeps further due segments, if there is one.
    `shard` is set if there are several.
    """

    topic: str
    segments: int
    events: int
    bytes: int
    upto: int
    held_by: str | None
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    """A closed segment's content: number of events, newest offset, and the seconds since that event entered the log.

    `seen` is the offset of the last event that is there, 0 without events.
    """

    segment: Segment
    events: int
    newest: int
    seconds: float
    seen: int


@checked
class Retainer:
    """Drops old segments of topics, by the `Retention` of each."""

    def __init__(self, database: Database, registry: Registry, dead_letters: DeadLetters, compactor: Compactor) -> None:
        self._database = database
        self._compactor = compactor
        self._dead_letters = dead_letters
        self._registry = registry
        self._leftovers = Leftovers(database)

    def run_once(
        self, topics: Iterable[str] | None = None, *, force: bool = False, execute: bool = True
    ) -> list[Dropped]:
        """See `ClusterRetainer.run_once`."""
        # Look before reading the topics, so that a segment without a topic belongs to a deleted topic.
        begun = self._leftovers.begun_drops() if execute else []
        wanted = self._registry.topics() if topics is None else [self._registry.topic(name) for name in topics]
        dropped: list[Dropped] = []
        failed: list[EventSQLError] = []
        for topic in wanted:
            try:
                unfinished = any(is_of(table, topic.name) for table in begun)
                with self._database.by_admin() if execute else nullcontext():
                    done = self._retain(topic, force=force, execute=execute, unfinished=unfinished)
            except EventSQLError as error:
                logger.warning("topic %r keeps its old segments for now: %s", topic.name, error)
                failed.append(error)
            else:
                dropped += filter(None, [done])
        if execute and any(each.segments and each.topic.endswith(DEAD_LETTER_SUFFIX) for each in dropped):
            self._dead_letters.prune()
        if execute and topics is None:
            self._clear_leftovers([table for table in begun if not any(is_of(table, topic.name) for topic in wanted)])
        if failed:
            raise failed[0]
        return dropped

    def held(self) -> dict[str, str]:
        """See `ClusterRetainer.held`."""
        held: dict[str, str] = {}
        with self._database.connection() as connection:
            for topic in self._registry.topics():
                if topic.retention is None:
                    continue
                # Retention may drop a segment, or somebody the topic, meanwhile.
                with suppress(psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege):
                    newest = segments.newest_id(connection, self._database.schema, topic.name)
                    for content in self._due(connection, topic, topic.retention, newest, close=True):
                        if (consumer := self._held_by(connection, topic, content)) is not None:
                            held[topic.name] = consumer
                            break
        return held

    def _clear_leftovers(self, detached: list[str]) -> None:
        """Clear the leftovers of deleted topics, with their segments that retention has detached."""
        try:
            self._leftovers.clear()
            with self._brief() as connection:
                StagedBlocks(self._database.schema).sweep(connection)
                prune_records(connection, self._database.schema)
            if detached:
                with self._brief() as connection:
                    lock_registry(connection)
                    drop_leftovers(connection, self._database.schema, detached)
        except PermissionDeniedError as error:
            # A transfer role has no right to clear them; the admin's retention does it.
            logger.debug("leftovers of deleted topics are left to the admin role: %s", error)
        except EventSQLError as error:
            logger.warning("leftovers of deleted topics are kept for now: %s", error)

    @contextmanager
    def _brief(self) -> Iterator[Connection]:
        """A transaction that waits at most `LOCK_SECONDS` for each lock."""
        with self._database.transaction() as connection:
            wait_at_most(connection, LOCK_SECONDS)
            yield connection

    def run(self, stop: threading.Event, *, every: Duration = RUN_SECONDS) -> None:
        """Drop due segments and compact logs every `every` seconds until `stop` is set. An error is logged, and the
        next run tries again.
        """
        steps: dict[str, Callable[[], object]] = {
            "old segments": self.run_once, "small blocks": self._compactor.run_once
        }  # fmt: skip
        while not stop.wait(in_seconds(every)):
            # A topic that keeps its old segments must not keep all topics from their compaction.
            for kept, step in steps.items():
                try:
                    step()
                except EventSQLError as error:
                    logger.warning("%s are kept for now: %s", kept, error)
                except Exception:
                    # If this thread died, the logs would grow without bound.
                    logger.exception("%s are kept for now; trying again in %.0f s", kept, every)

    def _retain(self, topic: Topic, *, force: bool, execute: bool, unfinished: bool) -> Dropped | None:
        """Run retention for one topic. None if it keeps everything, or if another program retains the topic now.

        `unfinished`: an earlier run, perhaps one under way, has begun to drop a segment.
        """
        schema = self._database.schema
        if execute and topic.retention is None:
            # Writers that know no segments, as EventSQL's Java library, may write to the log.
            with self._brief() as connection:
                if connection.execute(Queries("log", schema)("lock_topic"), {"topic": topic.name}).fetchone():
                    self._make_ahead(connection, topic)
        if topic.retention is None and not unfinished:
            return None

        # A transaction of another connection holds the locks that span several transactions: session locks would stay
        # with the server process that a pooler lends.
        dedicated = self._database.dedicated
        with self._database.errors(), dedicated() as connection, dedicated() as holder, holder.transaction():
            if not try_retain(holder, schema, topic.name):
                return None
            # The statement has no parameters, so it closes the earlier statement, whose snapshot DETACH would wait for.
            let_last(holder)
            if execute and topic.retention is not None:
                segments.adopt(connection, schema, topic.name)
                newest = self._roll(connection, topic)
            else:
                newest = segments.newest_id(connection, schema, topic.name)
            if unfinished:
                with self._waiting(topic), _registry_held(holder):
                    self._drops(topic).finish(connection, force=force)
            if topic.retention is None:
                return None
            return self._drop_due(connection, holder, topic, topic.retention, newest, force=force, execute=execute)

    def _drops(self, topic: Topic) -> SegmentDrops:
        return SegmentDrops(self._database.schema, topic.name, wait=WAIT_SECONDS)

    def _roll(self, connection: Connection, topic: Topic) -> int:
        """Make segments ahead, and close the current segment if it holds its share and there is room for others.

        Gives an id up to which the log cannot change any more: this holds the topic, so no writer is active.
        """
        schema = self._database.schema
        with connection.transaction():
            wait_at_most(connection, LOCK_SECONDS)
            connection.execute(Queries("log", schema)("await_topic"), {"topic": topic.name})
            newest = segments.newest_id(connection, schema, topic.name)
            existing = segments.segments(connection, schema, topic.name) or []
            segment = self._to_close(connection, topic, existing, newest)
            made = self._make_ahead(connection, topic)
            # No rollback takes a roll back, and the next events need the segment after it. On a full disk, one is
            # enough: the closed segment can be dropped when it is due, which makes room.
            if segment is not None and (made or any(each.start == segment.end for each in existing)):
                segments.roll(connection, schema, topic.name, segment)
            return segments.newest_id(connection, schema, topic.name)

    def _make_ahead(self, connection: Connection, topic: Topic) -> bool:
        """Make segments ahead in the caller's transaction, which holds the topic. False if the disk has no room."""
        try:
            with connection.transaction():
                segments.ensure_ahead(connection, self._database.schema, topic.name)
        except psycopg.errors.DiskFull as error:
            logger.warning("topic %r gets no further segment for now: %s", topic.name, describe(error))
            return False
        return True

    def _to_close(self, connection: Connection, topic: Topic, existing: list[Segment], newest: int) -> Segment | None:
        """The current segment, if it holds its share and the log may get a further segment."""
        if len(existing) >= MOST_SEGMENTS:
            return None
        current = (each for each in existing if each.start <= newest < each.end - 1)
        return next((each for each in current if self._has_its_share(connection, topic, each)), None)

    def _has_its_share(self, connection: Connection, topic: Topic, segment: Segment) -> bool:
        span = self._drops(topic).span(connection, segment)
        if span is None or topic.retention is None:
            return False
        # If the clock went back since the first event, its age is not known: the next segment has a right time again.
        seconds = math.inf if span.seconds < 0 else span.seconds * ROLL_SHARE
        return _reached(
            topic.retention, seconds=seconds, size=segment.bytes * ROLL_SHARE,
            events=(span.newest - span.first + 1) * ROLL_SHARE,
        )  # fmt: skip

    def _drop_due(
        self, connection: Connection, holder: Connection, topic: Topic, retention: Retention, newest: int,
        *, force: bool, execute: bool,
    ) -> Dropped:  # fmt: skip
        schema = self._database.schema
        dropped: list[_Content] = []
        held_by = None
        for content in self._due(connection, topic, retention, newest, close=not execute):
            with _registry_held(holder):
                # By this connection: those of the pool may be with threads that wait for the registry.
                same = Queries("log", schema)("same_topic")
                if not connection.execute(same, {"topic": topic.name, "created_at": topic.created_at}).fetchone():
                    # Somebody has made the topic anew, and its segments have the same names.
                    break
                held_by = None if force else self._held_by(connection, topic, content)
                if held_by is not None:
                    break
                if execute and not self._drop(connection, topic, content):
                    break
            dropped.append(content)
        upto = max((content.newest for content in dropped), default=0)
        if dropped and execute:
            # Delete layouts whose events are dropped, if no consumer is in them any more.
            with connection.transaction():
                lock_registry(connection)
                passed = Queries("leftovers", schema)("passed_layouts")
                connection.execute(passed, {"topic": topic.name, "dropped": upto})
            self._simplify(connection, topic)
        if held_by is not None:
            logger.info("topic %r keeps segments that are due: %s has not passed them", topic.name, held_by)
        events, size = sum(each.events for each in dropped), sum(each.segment.bytes for each in dropped)
        return Dropped(topic.name, len(dropped), events, size, upto, held_by)

    def _due(
        self, connection: Connection, topic: Topic, retention: Retention, newest: int, *, close: bool
    ) -> list[_Content]:
        """The closed segments that are due, oldest first. With `close`, as if the current one were closed if it may."""
        existing = segments.segments(connection, self._database.schema, topic.name) or []
        contents = [
            self._content(connection, topic, segment, newest) for segment in existing if segment.start <= newest
        ]
        due: list[_Content] = []
        events, size = sum(content.events for content in contents), sum(content.segment.bytes for content in contents)
        for content, seconds in zip(contents, _ages(contents), strict=True):
            is_open = content.segment.end > newest + 1
            if is_open and not (close and content.segment == self._to_close(connection, topic, existing, newest)):
                break
            events -= content.events
            size -= content.segment.bytes
            if not _reached(retention, seconds=seconds, size=size, events=events):
                break
            due.append(content)
        return due

    def _simplify(self, connection: Connection, topic: Topic) -> None:
        """Give a log with rows and blocks one form again, once the last segment of the former form is gone."""
        schema = self._database.schema
        if not log_form.form_now(connection, schema, topic.name).both:
            return
        try:
            with connection.transaction():
                has_roles = act_as_owner(connection, schema)
                wait_at_most(connection, SIMPLIFY_SECONDS)
                lock_registry(connection)
                connection.execute(Queries("log", schema)("await_topic"), {"topic": topic.name})
                if not try_change(connection, schema, topic.name):
                    # An erasure is under way, and uses the tables that it has found.
                    return
                if altering.simplify(connection, schema, topic.name, topic.partitions) and has_roles:
                    grant(connection, schema, [topic.name])
        except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege) as error:
            # The log is right in both forms, too; the next run that drops a segment tries again.
            logger.debug("topic %r keeps both forms for now: %s", topic.name, error)
        log_form.forget(connection, schema, topic.name)

    def _content(self, connection: Connection, topic: Topic, segment: Segment, newest: int) -> _Content:
        last = self._drops(topic).newest(connection, segment)
        if last is None:
            return _Content(segment, 0, min(segment.end - 1, newest), math.inf, 0)
        return _Content(segment, last.events, last.offset, last.seconds, last.offset)

    def _held_by(self, connection: Connection, topic: Topic, content: _Content) -> str | None:
        """A consumer partition that has not consumed all events of the segment; None if there is none."""
        unpassed = self._drops(topic).unpassed(connection, content.segment, newest=content.newest)
        if unpassed is None:
            return None
        name, partition = unpassed
        return f"consumer {name!r}" if partition < 0 else f"consumer {name!r} partition {partition}"

    def _drop(self, connection: Connection, topic: Topic, content: _Content) -> bool:
        """Drop a segment. False if it was written to since it was looked at."""
        with self._waiting(topic):
            if not self._drops(topic).drop(connection, content.segment, newest=content.seen):
                return False
        logger.info("topic %r lost its events up to offset %d", topic.name, content.segment.end - 1)
        return True

    @contextmanager
    def _waiting(self, topic: Topic) -> Iterator[None]:
        """Translate timeouts and deadlocks of the block: transactions that read a segment cause them."""
        try:
            yield
        except (
            psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected,
        ) as error:  # fmt: skip
            raise DatabaseBusyError(
                f"an open transaction still reads a segment of topic {topic.name!r}: the next run goes on. `eventsql "
                "doctor` names transactions that have been open for a minute"
            ) from error


@contextmanager
def _registry_held(holder: Connection) -> Iterator[None]:
    """Hold the registry for a drop, which takes several transactions of another connection.

    Meanwhile no seek goes back into the segment, and nobody makes the topic anew. The rollback to the savepoint
    releases the lock.
    """
    with holder.transaction(force_rollback=True):
        holder.execute(f"SELECT pg_catalog.pg_advisory_xact_lock({REGISTRY_LOCK})")
        yield


def _reached(retention: Retention, *, seconds: float, size: int, events: int) -> bool:
    """Whether an age, a size in bytes or a number of events reaches its bound."""
    bounds = ((seconds, retention.seconds), (size, retention.bytes), (events, retention.events))
    return any(bound is not None and value >= bound for value, bound in bounds)


def _ages(contents: list[_Content]) -> list[float]:
    """The seconds since the newest event of each segment entered the log.

    If the clock went back since then, an event may have a time that has not come yet. Its segment is then as old as the
    next segment, at least. Otherwise it would keep all later segments until that time.
    """
    ages, age = list[float](), 0.0
    for content in reversed(contents):
        age = content.seconds if content.seconds >= 0 else age
        ages.append(age)
    return ages[::-1]
