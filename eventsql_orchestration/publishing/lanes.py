"""Background commits for the publishers that collect events: one commit for the events of many callers.

Events wait in lanes. Events of one key always take the same lane, and a lane has at most one flush under way. So they
are committed in the order in which they were given, even if the topic is repartitioned meanwhile. Lanes flush side by
side: keys of one partition may take different lanes and have no order among each other.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import psycopg

from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    PublisherClosedError,
    RegistryError,
    ValidationError,
    WrongShardError,
)
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.model import NOT_PARTITIONED, Publication, Topic
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.buffer_limits import BufferLimits
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.threads import SIGNAL_SECONDS, start_thread
from eventsql_orchestration.validation import Duration, in_seconds

CLOSE_TIMEOUT: Final = 30.0
"""Seconds that closing waits for the commits under way and the commits still to come."""

_OF_AN_EVENT: Final = frozenset({"22", "23", "44", "54", "P0"})
"""SQLSTATE classes that concern the written data: data, constraints, views' checks, limits of a row, triggers."""

_LEFT: Final = "the event was not published: the publisher was closed and waited for {} s only"
_UNKNOWN: Final = (
    "it is not known whether the event was published: its commit took longer than {} s after the publisher was closed"
)

Acknowledged = TypeVar("Acknowledged")
"""The caller's handle for an event until its commit: some kind of future."""

Entry: TypeAlias = tuple[Publication, Acknowledged]
"""An event and its handle."""

Outcome: TypeAlias = Placements | Callable[[], Exception]
"""Where committed events are, in their order, or a function that makes the error of each event."""

Settle: TypeAlias = Callable[[Sequence[Acknowledged], Outcome], None]
"""Settles handles."""


def time_left(timeout: Duration | None) -> Callable[[], float | None]:
    """Gives a function for the seconds that are left of `timeout`; None without a limit."""
    deadline = None if timeout is None else time.monotonic() + in_seconds(timeout)
    return lambda: None if deadline is None else max(0.0, deadline - time.monotonic())


@runtime_checkable
class BatchPublisher(Protocol):
    """Commits the batches of lanes. See `Publisher`."""

    @property
    def hashes_keys(self) -> bool: ...

    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int: ...

    def publish_batch(self, publications: list[Publication]) -> Placements: ...


class _Lane(Generic[Acknowledged]):
    """One lane's events, in order. The lock of all lanes guards it."""

    def __init__(self, lock: threading.RLock) -> None:
        self.wake = threading.Condition(lock)
        """For the lane's thread alone. `notify` may wake nobody after Ctrl-C in the middle of an earlier one."""
        self.waiting: list[Entry[Acknowledged]] = []
        self.waiting_bytes = 0
        self.oldest = 0.0
        """When the oldest waiting event came, by the monotonic clock."""
        self.under_way: list[Entry[Acknowledged]] = []
        """The unsettled events of the flush under way. The thread that removes an event settles it."""
        self.given = 0
        """The number of events that ever came; `settled` counts those that are settled."""
        self.settled = 0
        self.wanted = 0
        """Flush at once until this many of the given events are settled."""
        self.thread: threading.Thread | None = None


class QueuedEvent(NamedTuple):
    """An event, its size in bytes, and the number of its lane."""

    publication: Publication
    size: int
    lane: int


class Lanes(Generic[Acknowledged]):
    """Commits events in the background and settles the handle of each event once.

    A lane's thread calls `settle`, which must not raise.
    """

    def __init__(self, publisher: BatchPublisher, limits: BufferLimits, settle: Settle[Acknowledged]) -> None:
        self._publisher = publisher
        self._limits = limits
        self._max_age = in_seconds(limits.max_age)
        self._settle = settle
        # If the buffer is full and nothing is being flushed, at least one lane has enough for a flush.
        self._flush_events = min(limits.max_events, limits.max_pending_events // limits.flushes)
        self._flush_bytes = min(limits.max_bytes, limits.max_pending_bytes // limits.flushes)
        self._closed = False
        self._given_up = False
        self._after_fork()
        after_fork(self, Lanes._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. The parent process publishes the events that wait."""
        # A signal's handler may close the publisher in the thread that it interrupts, in the middle of `put`.
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self._lanes: list[_Lane[Acknowledged]] = [_Lane(self._lock) for _ in range(self._limits.flushes)]
        self._threads: set[int] = set()
        self._pending_events = 0
        self._pending_bytes = 0
        self._on_room: set[Callable[[], None]] = set()

    # Giving events

    def assign(self, publication: Publication, topic: Topic) -> QueuedEvent:
        """Choose the lane of an event of `topic`. Raises `PartitionOutOfRangeError`."""
        key, number = publication.key, NOT_PARTITIONED
        if key is None or publication.partition is not None or not self._publisher.hashes_keys:
            number = self._publisher.partition_of(publication, topic)
        if topic.partitioned and key is not None:
            number = hash(key)
        lane = (hash(topic.name) + number) % len(self._lanes)
        return QueuedEvent(publication, copy_format.size(publication), lane)

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._closed

    def put(self, event: QueuedEvent, acknowledged: Acknowledged, *, timeout: float | None = None) -> None:
        """Give an event to its lane as soon as there is room.

        Raises `DatabaseBusyError` if there is no room within `timeout` seconds, `PublisherClosedError`.
        """
        with self._lock:
            if self._full(event.size) and not self._closed:
                self._await_room(event.size, timeout)
            self._add(event, acknowledged)

    def put_if_room(self, event: QueuedEvent, acknowledged: Acknowledged, *, on_room: Callable[[], None]) -> bool:
        """Give an event to its lane without waiting. False if there is no room: `on_room` is called once there is."""
        with self._lock:
            if self._full(event.size) and not self._closed:
                self._on_room.add(on_room)
                return False
            self._add(event, acknowledged)
            return True

    def _full(self, size: int) -> bool:
        return self._pending_events >= self._limits.max_pending_events or (
            self._pending_bytes + size > self._limits.max_pending_bytes and self._pending_events > 0
        )

    def _await_room(self, size: int, timeout: float | None) -> None:
        self._refuse_in_lane("there is no room for another event")
        if not self._await(lambda: self._closed or not self._full(size), timeout):
            raise DatabaseBusyError(
                f"the buffer is full: {self._pending_events} events ({self._pending_bytes} bytes) wait for the "
                f"database, and none was committed within {timeout} s: publish more slowly, wait longer, or raise "
                "max_pending_events and max_pending_bytes"
            )

    def _add(self, event: QueuedEvent, acknowledged: Acknowledged) -> None:
        publication, size, number = event
        lane = self._lanes[number]
        if lane.thread is None and not self._closed:
            lane.thread = start_thread("flush", self._run, lane)

        if not lane.waiting:
            lane.oldest = time.monotonic()
            lane.wake.notify_all()
        elif (
            len(lane.waiting) + 1 == self._flush_events
            or lane.waiting_bytes < self._flush_bytes <= lane.waiting_bytes + size
        ):
            lane.wake.notify_all()

        # Signals are handled after a call. So all of this happens, or nothing, and the lane's thread is awake before.
        if self._closed:
            raise PublisherClosedError
        lane.waiting_bytes += size
        lane.given += 1
        self._pending_events += 1
        self._pending_bytes += size
        lane.waiting.append((publication, acknowledged))

    def _refuse_in_lane(self, why: str) -> None:
        if threading.get_ident() in self._threads:
            raise DatabaseBusyError(
                f"{why}, and a callback of an acknowledgement cannot wait for commits: wait in another thread"
            )

    # Waiting for commits

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every event given before is settled. Raises `DatabaseBusyError` after `timeout` seconds."""
        with self._lock:
            self._refuse_in_lane("events are still to be committed")
            for lane in self._lanes:
                lane.wanted = lane.given
                lane.wake.notify_all()
            wanted = [(lane, lane.given) for lane in self._lanes]
            if not self._await(lambda: all(lane.settled >= given for lane, given in wanted), timeout):
                raise DatabaseBusyError(
                    f"{self._pending_events} events were not committed within {timeout} s yet: wait for them again"
                )

    def close(self, timeout: float | None) -> None:
        """Take no more events. Wait up to `timeout` seconds until all are settled, then give up the rest."""
        with self._lock:
            self._refuse_in_lane("events are still to be committed")
            if self._given_up:
                return
            self._closed = True
            for lane in self._lanes:
                lane.wake.notify_all()
            self._settled.notify_all()
            waiting, self._on_room = self._on_room, set()
        for on_room in waiting:
            on_room()

        left: list[Entry[Acknowledged]] = []
        unknown: list[Entry[Acknowledged]] = []
        threads = [lane.thread for lane in self._lanes if lane.thread is not None]
        with self._lock:
            if not self._await(lambda: all(lane.settled == lane.given for lane in self._lanes), timeout):
                self._given_up = True
                for lane in self._lanes:
                    left += lane.waiting
                    unknown += lane.under_way
                    self._forget(lane, len(lane.waiting), lane.waiting_bytes)
                    lane.waiting, lane.waiting_bytes, lane.under_way = [], 0, []
            else:
                # A thread that ends needs the lock, which this thread may have had before: waiting gives it away.
                self._await(lambda: all(lane.thread is None for lane in self._lanes), None)

        if not self._given_up:
            for thread in threads:
                thread.join()
            return
        self._settle([entry[1] for entry in left], lambda: PublisherClosedError(_LEFT.format(timeout)))
        self._settle([entry[1] for entry in unknown], lambda: PublisherClosedError(_UNKNOWN.format(timeout)))

    def _await(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `holds`, with the lock; gives whether it does. Ctrl-C always ends the wait."""
        left = time_left(timeout)
        while not holds():
            seconds = left()
            if seconds == 0:
                return False
            self._settled.wait(SIGNAL_SECONDS if seconds is None else min(seconds, SIGNAL_SECONDS))
        return True

    # Committing events

    def _run(self, lane: _Lane[Acknowledged]) -> None:
        self._threads.add(threading.get_ident())
        while True:
            with self._lock:
                if not self._await_flush(lane):
                    if lane.thread is threading.current_thread():
                        lane.thread = None
                        self._settled.notify_all()
                    break
                entries, size = lane.waiting, lane.waiting_bytes
                lane.under_way, lane.waiting, lane.waiting_bytes = entries.copy(), [], 0

            self._commit(lane, entries)

            with self._lock:
                self._forget(lane, len(entries), size)
                self._settled.notify_all()
                waiting, self._on_room = self._on_room, set()
            # A lane may be idle for long and must not keep the committed events.
            del entries
            for on_room in waiting:
                on_room()
        self._threads.discard(threading.get_ident())

    def _await_flush(self, lane: _Lane[Acknowledged]) -> bool:
        """Wait until the lane should flush. False if it never will again."""
        if lane.thread is not threading.current_thread():
            # Ctrl-C came before the thread was noted, and the next event starts another one.
            return False
        while True:
            if not lane.waiting:
                if self._closed:
                    return False
                lane.wake.wait()
                continue
            left = lane.oldest + self._max_age - time.monotonic()
            if (
                left <= 0
                or len(lane.waiting) >= self._flush_events
                or lane.waiting_bytes >= self._flush_bytes
                or lane.settled < lane.wanted
                or self._closed
            ):
                return True
            lane.wake.wait(left)

    def _forget(self, lane: _Lane[Acknowledged], events: int, size: int) -> None:
        lane.settled += events
        self._pending_events -= events
        self._pending_bytes -= size

    def _commit(self, lane: _Lane[Acknowledged], entries: Sequence[Entry[Acknowledged]]) -> None:
        """Publish and settle the next events under way. Events that cannot be published do not stop the others."""
        try:
            placements = self._publisher.publish_batch(list(map(itemgetter(0), entries)))
        except BaseException as error:  # noqa: BLE001 - the caller of each event gets it; a partitioner may raise any
            failure = error if isinstance(error, Exception) else _own_error(error)
        else:
            self._settle_next(lane, len(entries), placements)
            return

        if len(entries) == 1:
            self._settle_next(lane, 1, lambda: failure)
        elif isinstance(failure, RegistryError) and len(parts := _by_topic(entries)) > 1:
            with self._lock:
                if lane.under_way:
                    lane.under_way[: len(entries)] = [entry for part in parts for entry in part]
            for part in parts:
                self._commit(lane, part)
        elif _concerns_an_event(failure):
            middle = len(entries) // 2
            self._commit(lane, entries[:middle])
            self._commit(lane, entries[middle:])
        else:
            self._settle_next(lane, len(entries), lambda: _own_error(failure))

    def _settle_next(self, lane: _Lane[Acknowledged], events: int, outcome: Outcome) -> None:
        with self._lock:
            # Empty if `close` has given these events up.
            entries = lane.under_way[:events]
            del lane.under_way[:events]
        self._settle([entry[1] for entry in entries], outcome)


def _by_topic(entries: Sequence[Entry[Acknowledged]]) -> list[list[Entry[Acknowledged]]]:
    parts: dict[str, list[Entry[Acknowledged]]] = {}
    for entry in entries:
        parts.setdefault(entry[0].topic, []).append(entry)
    return list(parts.values())


def _concerns_an_event(error: Exception) -> bool:
    """Whether single events may have caused the error, so that the other events could be published without them."""
    cause = error if isinstance(error, psycopg.Error) else error.__cause__
    if isinstance(error, RegistryError):
        return isinstance(error, WrongShardError)
    if isinstance(cause, psycopg.Error):
        return isinstance(cause, psycopg.DataError) or (cause.sqlstate or "")[:2] in _OF_AN_EVENT
    # Any other error may have come after the commit.
    return isinstance(error, ValidationError)


def _own_error(error: BaseException) -> Exception:
    """A copy of the error that several events share: each caller who raises it adds to its own traceback."""
    if isinstance(error, EventSQLError):
        own = copy.copy(error)
        own.__cause__ = error.__cause__
    else:
        text = describe(error) if isinstance(error, psycopg.Error) else repr(error)
        own = DatabaseError(f"the flush of events failed: {text}")
        own.__cause__ = error
    return own
