"""Publishing at high rates: events of many callers share a commit, and each is acknowledged after it.

Events wait in lanes. A lane takes the events of certain keys and has one flush under way at most, so those of a key are
committed in the order in which they were given, also when its topic is repartitioned meanwhile. Lanes flush side by
side, so keys of one partition may be in different lanes and have no order among each other.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import psycopg

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database.database import describe
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    PublisherClosedError,
    RegistryError,
    ValidationError,
    WrongShardError,
)
from eventsql_orchestration.log import encoding
from eventsql_orchestration.log.publisher import Publisher, check_publication
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import NOT_PARTITIONED, Publication, Topic
from eventsql_orchestration.rules import check_seconds, check_whole

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT: Final = 30.0
"""Seconds that closing waits for commits that are under way or still to come."""

MAX_FLUSHES: Final = 1_000
"""Each has a thread, and a connection while it commits."""

_OF_AN_EVENT: Final = frozenset({"22", "23", "44", "54", "P0"})
"""SQLSTATE classes that tell of what was written: data, constraints, views' checks, limits of a row, triggers."""

_LEFT: Final = "not published: the publisher was closed, and waited for {} s only"
_UNKNOWN: Final = (
    "it is not known whether the event is published: its commit was under way when the publisher was closed, and took "
    "longer than {} s"
)

Acknowledged = TypeVar("Acknowledged")
"""What stands for an event until its commit: a future of some kind."""

Entry: TypeAlias = tuple[Publication, Acknowledged]
"""An event and what stands for it."""


class BoundOptions(TypedDict, total=False):
    """The fields of `Bounds` as options."""

    max_events: int
    max_bytes: int
    max_age: float
    flushes: int
    max_pending_events: int
    max_pending_bytes: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """When events are flushed, and how many may wait.

    A lane flushes when `max_events` events or `max_bytes` bytes (of values, keys and metadata) wait in it, or its
    oldest event has waited for `max_age` seconds; what came during its last flush goes together in the next.

    `flushes` is the number of lanes, and so of flushes under way. `max_pending_events` and `max_pending_bytes` bound
    what was given and is not yet acknowledged; one event that is larger than that is let in alone.

    Raises `ValidationError` for bounds that no event could meet.
    """

    max_events: int = 1_000
    max_bytes: int = 4 * 1024 * 1024
    max_age: float = 0.01
    flushes: int = 2
    max_pending_events: int = 3_000
    max_pending_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("max_events", "max_bytes", "max_pending_events", "max_pending_bytes"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("flushes", self.flushes, least=1, most=MAX_FLUSHES)
        check_seconds("max_age", self.max_age, zero=True)


class _Lane(Generic[Acknowledged]):
    """Events on their way, in order; guarded by the lock of all lanes."""

    def __init__(self, lock: threading.Lock) -> None:
        self.wake = threading.Condition(lock)
        self.waiting: list[Entry[Acknowledged]] = []
        self.waiting_bytes = 0
        self.oldest = 0.0
        """When the first of those that wait came, by the monotonic clock."""
        self.under_way: list[Entry[Acknowledged]] = []
        """Those of the flush under way that are not settled. Whoever takes one out settles it."""
        self.given = 0
        """How many events came, ever; `settled` is how many of them are not on their way any more."""
        self.settled = 0
        self.wanted = 0
        """So many of the events given are to be settled without waiting for company."""
        self.thread: threading.Thread | None = None


class Placed(NamedTuple):
    """An event with the lane that it goes to."""

    publication: Publication
    size: int
    lane: int


class Lanes(Generic[Acknowledged]):
    """Commits events in the background and settles what stands for each of them.

    `settle` is called by a lane's thread with what stands for some events after they were committed, or with a function
    that makes the error of each; once for each event. It must not raise.
    """

    def __init__(
        self,
        publisher: Publisher,
        registry: Registry,
        bounds: Bounds,
        settle: Callable[[Sequence[Acknowledged], Callable[[], Exception] | None], None],
    ) -> None:
        self._publisher = publisher
        self._registry = registry
        self._bounds = bounds
        self._settle = settle
        # When no more events may be given and none is being flushed, one lane has enough to flush.
        self._flush_events = max(1, min(bounds.max_events, bounds.max_pending_events // bounds.flushes))
        self._flush_bytes = max(1, min(bounds.max_bytes, bounds.max_pending_bytes // bounds.flushes))
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._lanes: list[_Lane[Acknowledged]] = [_Lane(self._lock) for _ in range(bounds.flushes)]
        self._threads: set[int] = set()
        self._pending_events = 0
        self._pending_bytes = 0
        self._on_room: set[Callable[[], None]] = set()
        self._closed = False
        self._given_up = False

    # Giving events

    def place(self, publication: Publication, topic: Topic) -> Placed:
        """Choose the lane of an event of `topic`. Raises `PartitionOutOfRangeError`."""
        key, place = publication.key, NOT_PARTITIONED
        if key is None or publication.partition is not None or not self._publisher.hashes_keys:
            place = self._publisher.partition_of(publication, topic)
        if topic.partitioned and key is not None:
            place = hash(key)
        lane = (hash(topic.name) + place) % len(self._lanes)
        return Placed(publication, encoding.size(publication), lane)

    def put(self, event: Placed, acknowledged: Acknowledged, *, timeout: float | None = None) -> None:
        """Hand an event to its lane, when there is room.

        Raises `DatabaseBusyError` when there is none for `timeout` seconds, `PublisherClosedError`.
        """
        with self._lock:
            if self._full(event.size) and not self._closed:
                self._await_room(event.size, timeout)
            self._add(event, acknowledged)

    def put_if_room(self, event: Placed, acknowledged: Acknowledged, *, on_room: Callable[[], None]) -> bool:
        """The same without waiting: where there is no room, False, and `on_room` is called once when to try again."""
        with self._lock:
            if self._full(event.size) and not self._closed:
                self._on_room.add(on_room)
                return False
            self._add(event, acknowledged)
            return True

    def _full(self, size: int) -> bool:
        return self._pending_events >= self._bounds.max_pending_events or (
            self._pending_bytes + size > self._bounds.max_pending_bytes and self._pending_events > 0
        )

    def _await_room(self, size: int, timeout: float | None) -> None:
        self._refuse_in_lane("there is no room for another event")
        if not self._settled.wait_for(lambda: self._closed or not self._full(size), timeout):
            raise DatabaseBusyError(
                f"{self._pending_events} events ({self._pending_bytes} bytes) wait for the database, which is as many "
                f"as may, and none was done within {timeout} s: publish more slowly, wait for longer, or allow more "
                "(max_pending_events, max_pending_bytes)"
            )

    def _add(self, event: Placed, acknowledged: Acknowledged) -> None:
        if self._closed:
            raise PublisherClosedError
        lane = self._lanes[event.lane]
        if lane.thread is None:
            self._start(lane)
        before = lane.waiting_bytes
        lane.waiting.append((event.publication, acknowledged))
        lane.waiting_bytes += event.size
        lane.given += 1
        self._pending_events += 1
        self._pending_bytes += event.size
        waiting = len(lane.waiting)
        if waiting == 1:
            lane.oldest = time.monotonic()
            lane.wake.notify()
        elif waiting == self._flush_events or before < self._flush_bytes <= lane.waiting_bytes:
            lane.wake.notify()

    def _start(self, lane: _Lane[Acknowledged]) -> None:
        thread = threading.Thread(target=self._run, args=(lane,), name="eventsql-flush", daemon=True)
        thread.start()
        lane.thread = thread

    def _refuse_in_lane(self, why: str) -> None:
        if threading.get_ident() in self._threads:
            raise DatabaseBusyError(
                f"{why}, and a callback of an acknowledgement cannot wait for it, because events are committed by the "
                "thread that it runs in: hand it over to a thread of your own"
            )

    # Waiting for them

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every event that was given before is settled.

        Raises `DatabaseBusyError` when that takes longer than `timeout` seconds.
        """
        with self._lock:
            self._refuse_in_lane("events are still to be committed")
            for lane in self._lanes:
                lane.wanted = lane.given
                lane.wake.notify()
            wanted = [(lane, lane.given) for lane in self._lanes]
            if not self._settled.wait_for(lambda: all(lane.settled >= given for lane, given in wanted), timeout):
                raise DatabaseBusyError(
                    f"{self._pending_events} events were not committed within {timeout} s: they are still on their "
                    "way, wait for them again"
                )

    def close(self, timeout: float | None) -> None:
        """Take no more events, and wait up to `timeout` seconds until all are settled; then give the others up."""
        with self._lock:
            self._refuse_in_lane("events are still to be committed")
            if self._given_up:
                return
            self._closed = True
            for lane in self._lanes:
                lane.wake.notify()
            self._settled.notify_all()
            waiting, self._on_room = self._on_room, set()
        for on_room in waiting:
            on_room()
        left: list[Entry[Acknowledged]] = []
        unknown: list[Entry[Acknowledged]] = []
        with self._lock:
            if not self._settled.wait_for(lambda: all(lane.settled == lane.given for lane in self._lanes), timeout):
                self._given_up = True
                for lane in self._lanes:
                    left += lane.waiting
                    unknown += lane.under_way
                    self._forget(lane, len(lane.waiting), lane.waiting_bytes)
                    lane.waiting, lane.waiting_bytes, lane.under_way = [], 0, []
        if not self._given_up:
            for lane in self._lanes:
                if lane.thread is not None:
                    lane.thread.join()
            return
        self._settle([entry[1] for entry in left], lambda: PublisherClosedError(_LEFT.format(timeout)))
        self._settle([entry[1] for entry in unknown], lambda: PublisherClosedError(_UNKNOWN.format(timeout)))

    # Committing them

    def _run(self, lane: _Lane[Acknowledged]) -> None:
        self._threads.add(threading.get_ident())
        while True:
            with self._lock:
                if not self._await_flush(lane):
                    break
                entries, size = lane.waiting, lane.waiting_bytes
                lane.under_way, lane.waiting, lane.waiting_bytes = entries.copy(), [], 0
            self._commit(lane, entries)
            with self._lock:
                self._forget(lane, len(entries), size)
                self._settled.notify_all()
                waiting, self._on_room = self._on_room, set()
            # A lane may be idle for long: it keeps nothing of what it has done.
            del entries
            for on_room in waiting:
                on_room()
        self._threads.discard(threading.get_ident())

    def _await_flush(self, lane: _Lane[Acknowledged]) -> bool:
        """Wait until the lane should flush; False when it never will again."""
        while True:
            if not lane.waiting:
                if self._closed:
                    return False
                lane.wake.wait()
                continue
            left = lane.oldest + self._bounds.max_age - time.monotonic()
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
        """Publish and settle the next events under way: where some cannot be published, all the others are."""
        try:
            self._publisher.publish_all(list(map(itemgetter(0), entries)))
        except Exception as error:  # noqa: BLE001 - it is raised to whoever waits for the events
            failure = error
        else:
            self._settle_next(lane, len(entries), None)
            return
        if len(entries) == 1:
            self._settle_next(lane, 1, lambda: failure)
        elif isinstance(failure, RegistryError) and len(parts := _by_topic(entries)) > 1:
            with self._lock:
                if lane.under_way:
                    lane.under_way[: len(entries)] = [entry for part in parts for entry in part]
            for part in parts:
                self._commit(lane, part)
        elif _tells_of_an_event(failure):
            middle = len(entries) // 2
            self._commit(lane, entries[:middle])
            self._commit(lane, entries[middle:])
        else:
            self._settle_next(lane, len(entries), _one_each(failure))

    def _settle_next(self, lane: _Lane[Acknowledged], events: int, failure: Callable[[], Exception] | None) -> None:
        with self._lock:
            # None where they were given up.
            entries = lane.under_way[:events]
            del lane.under_way[:events]
        self._settle([entry[1] for entry in entries], failure)


@checked
class BufferedPublisher:
    """Publishes events of any number of threads together, a commit for many, and acknowledges each after its commit.

    The options are those of `Bounds`. Memory is bounded by them: while as many events wait as may, `publish` waits.

    Events of a key are committed in the order in which they were given. Without a key, events that name the same
    partition are, and in a topic without partitions all events are. Events of different keys have no order, even in one
    partition. An event that fails does not keep those after it from being committed: who gives it
    again gives it after them, so where the order of a key matters more than its pace, wait for its last event before
    giving the next. Close it, or use it as a context manager: events that are not acknowledged when the process ends
    may be lost.
    """

    def __init__(self, publisher: Publisher, registry: Registry, **bounds: Unpack[BoundOptions]) -> None:
        self._registry = registry
        self._lanes: Lanes[Acknowledgement] = Lanes(publisher, registry, Bounds(**bounds), _settle)

    @checks_itself
    def publish(self, publication: Publication, *, timeout: float | None = None) -> Acknowledgement:
        """Give one event; its acknowledgement is done when the event is committed, or cannot be.

        While as many events wait as may, it waits for room, at most `timeout` seconds.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseUnavailableError` (where the topic had to be
        looked up), `DatabaseBusyError` when there is no room in time, `PublisherClosedError`; the event is not
        published then.

        The acknowledgement has what the database says against this event, or `PartitionOutOfRangeError` when its topic
        has lost its partition since: neither touches the events that share its commit. `DatabaseUnavailableError` and
        other errors of the database hit all that share it; where the connection broke at the commit, they may be
        published nevertheless, and are twice if they are published again.

        Callbacks of the acknowledgement run in the thread that commits: they should be short, and must not wait for
        other events.
        """
        check_publication(publication)
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        event = self._lanes.place(publication, self._registry.cached_topic(publication.topic))
        acknowledgement = Acknowledgement()
        self._lanes.put(event, acknowledgement, timeout=timeout)
        return acknowledgement

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until every event that was given before is acknowledged, or has failed.

        Raises `DatabaseBusyError` when that takes longer than `timeout` seconds; the events are on their way still.
        """
        self._lanes.flush(timeout)

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Take no more events, and commit those that were given.

        What is not committed after `timeout` seconds gets a `PublisherClosedError`, which says whether its outcome is
        known.
        """
        self._lanes.close(timeout)

    def __enter__(self) -> BufferedPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Acknowledgement:
    """What became of an event: done once it is committed, or cannot be.

    It is like a `concurrent.futures.Future`, but none, so `concurrent.futures.wait` and `asyncio.wrap_future` do not
    take it: wait for each, or with `BufferedPublisher.flush` for all; tasks of asyncio use an `AsyncPublisher`. It
    cannot be cancelled, because an event that was given cannot be taken back.

    What waiting needs is made when somebody waits. A `Future` is made of fifteen objects, and thousands that wait keep
    Python's garbage collector busy. Measured: 20 µs of the processor's time an event published with them, 10 µs
    without.
    """

    # No attribute is set before it differs from these, nor, until it is done, without `_watching`.
    _done = False
    _error: Exception | None = None
    _waited: threading.Event | None = None
    _callbacks: tuple[Callable[[Acknowledgement], object], ...] = ()

    def done(self) -> bool:
        """Whether the event is committed, or cannot be."""
        return self._done

    def result(self, timeout: float | None = None) -> None:
        """Wait until the event is committed. Raises why it could not be, and `TimeoutError` after `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback has this frame, and this frame would have the error.
                del error, self

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait until it is done; gives why the event could not be committed, None when it is.

        Raises `TimeoutError` after `timeout` seconds; the event is on its way still.
        """
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if not self._done:
            self._wait(timeout)
        return self._error

    def add_done_callback(self, callback: Callable[[Acknowledgement], object]) -> None:
        """Call `callback` with this when it is done: in the thread that commits, or at once when it is done already.

        What it raises is logged.
        """
        if not callable(callback):
            raise ValidationError(f"callback must be a function, not {type(callback).__name__}")
        with _watching:
            if not self._done:
                self._callbacks = (*self._callbacks, callback)
                return
        self._call(callback)

    def _wait(self, timeout: float | None) -> None:
        with _watching:
            if self._done:
                return
            waited = self._waited
            if waited is None:
                waited = self._waited = threading.Event()
        if not waited.wait(timeout) and not self._done:
            raise TimeoutError(f"the event was not committed within {timeout} s: it is still on its way")

    def _call(self, callback: Callable[[Acknowledgement], object]) -> None:
        try:
            callback(self)
        except (Exception, SystemExit):
            # The thread that commits has other events to commit.
            logger.exception("a callback of an acknowledgement failed")

    def finish(self, error: Exception | None) -> bool:
        """For the publisher, which holds `_watching`: become done; gives whether somebody waits to be told."""
        if error is not None:
            self._error = error
        self._done = True
        return self._waited is not None or bool(self._callbacks)

    def tell(self) -> None:
        """For the publisher, without `_watching`: wake who waits. It is done, so nobody begins to any more."""
        if self._waited is not None:
            self._waited.set()
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            self._call(callback)


_watching: Final = threading.Lock()
"""One for all: whoever begins to wait and whoever is done hold it for a moment."""


def _settle(acknowledgements: Sequence[Acknowledgement], failure: Callable[[], Exception] | None) -> None:
    errors = repeat(None) if failure is None else [failure() for _ in acknowledgements]
    with _watching:
        watched = [each for each, error in zip(acknowledgements, errors, strict=False) if each.finish(error)]
    for each in watched:
        each.tell()


def _by_topic(entries: Sequence[Entry[Acknowledged]]) -> list[list[Entry[Acknowledged]]]:
    """The same events by topic, each part in its order."""
    parts: dict[str, list[Entry[Acknowledged]]] = {}
    for entry in entries:
        parts.setdefault(entry[0].topic, []).append(entry)
    return list(parts.values())


def _tells_of_an_event(error: Exception) -> bool:
    """Whether an error is about what was to be published, so that without some events the others could be."""
    cause = error if isinstance(error, psycopg.Error) else error.__cause__
    if isinstance(error, RegistryError):
        return isinstance(error, WrongShardError)
    if isinstance(cause, psycopg.Error):
        return isinstance(cause, psycopg.DataError) or (cause.sqlstate or "")[:2] in _OF_AN_EVENT
    # Of any other error it is not known whether it came before the commit. One of the registry is all events'.
    return isinstance(error, ValidationError)


def _one_each(error: Exception) -> Callable[[], Exception]:
    """Makes the errors of events that failed together: whoever raises one adds to its traceback."""

    def make() -> Exception:
        if isinstance(error, EventSQLError):
            one = copy.copy(error)
            one.__cause__ = error.__cause__
        else:
            said = describe(error) if isinstance(error, psycopg.Error) else repr(error)
            one = DatabaseError(f"the flush of events failed: {said}")
            one.__cause__ = error
        return one

    return make
