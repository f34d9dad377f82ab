"""Publishing at high rates from threads: events of many callers share a commit, and each is acknowledged after it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.errors import EventSQLError, PublisherClosedError, ValidationError
from eventsql_orchestration.forks import ProcessLock
from eventsql_orchestration.model import Placement, Publication
from eventsql_orchestration.publishing.batches import check_publication
from eventsql_orchestration.publishing.buffer_limits import BufferLimits
from eventsql_orchestration.publishing.lanes import CLOSE_TIMEOUT, BatchPublisher, Lanes, Outcome
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.threads import SIGNAL_SECONDS, Wake
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import Duration, check_seconds

logger = logging.getLogger(__name__)


@checked
class Collector:
    """Collects the events of any number of threads for one database. `BufferedPublisher` is its public face."""

    def __init__(self, publisher: BatchPublisher, registry: Registry, limits: BufferLimits) -> None:
        self._registry = registry
        self._lanes: Lanes[Acknowledgement] = Lanes(publisher, limits, _settle)

    @checks_itself
    def publish(self, publication: Publication, *, timeout: Duration | None = None) -> Acknowledgement:
        """Give one event. Its acknowledgement is done when the event is committed or has failed."""
        check_publication(publication)
        seconds = None if timeout is None else check_seconds("timeout", timeout, zero=True)
        if self._lanes.closed:
            # Before the look-up of the topic: the platform may be closed too, and says so by another error.
            raise PublisherClosedError
        event = self._lanes.assign(publication, self._registry.cached_topic(publication.topic))
        acknowledgement = Acknowledgement()
        self._lanes.put(event, acknowledgement, timeout=seconds)
        return acknowledgement

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until every event given before is acknowledged or has failed. Raises `DatabaseBusyError`."""
        self._lanes.flush(timeout)

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Take no more events, and commit the events that were given."""
        self._lanes.close(timeout)


class Acknowledgement:
    """The outcome of an event: done once the event is committed or has failed.

    It resembles a `concurrent.futures.Future`, but `concurrent.futures.wait` and `asyncio.wrap_future` do not take it.
    Wait for each, or for all with `BufferedPublisher.flush`; asyncio tasks use an `AsyncPublisher`. It cannot be
    cancelled, because an event that was given cannot be taken back. Only the process that gave the event can wait for
    it: a process that was forked since then gets an `EventSQLError`.

    It makes the objects for waiting only when somebody waits. A `Future` consists of fifteen objects, and thousands of
    them keep Python's garbage collector busy. Measured: 20 µs of processor time an event published with futures, 10 µs
    without.
    """

    # Slots: a dictionary that refers to other objects is one more object for the collector.
    __slots__ = ("_callbacks", "_lock", "_number", "_outcome", "_waited")

    def __init__(self) -> None:
        # Until it is done, only a thread that holds the lock sets attributes. A forked process has another lock.
        self._lock = _watching.lock
        self._outcome: Placements | Exception | None = None
        self._number = 0
        self._waited: Wake | None = None
        self._callbacks: tuple[Callable[[Acknowledgement], object], ...] = ()

    def done(self) -> bool:
        """Whether the event is committed or has failed."""
        return self._outcome is not None

    def result(self, timeout: Duration | None = None) -> Placement:
        """Wait until the event is committed; gives where it is.

        Raises its error, or `TimeoutError` after `timeout` seconds.
        """
        outcome = self._await(timeout)
        if isinstance(outcome, Placements):
            return outcome[self._number]
        try:
            raise outcome
        finally:
            # Break the cycle: the error's traceback refers to this frame, and this frame to the error.
            del outcome, self

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Wait until it is done. Gives the event's error, or None if the event is committed.

        Raises `TimeoutError` after `timeout` seconds; the event is still on its way.
        """
        outcome = self._await(timeout)
        return outcome if isinstance(outcome, Exception) else None

    def add_done_callback(self, callback: Callable[[Acknowledgement], object]) -> None:
        """Call `callback` with this acknowledgement when it is done, or at once if it is done already.

        The thread that commits calls it. An exception of the callback is logged.
        """
        if not callable(callback):
            raise ValidationError(f"callback must be a function, not {type(callback).__name__}")
        if self._outcome is None:
            with self._own_lock():
                if self._outcome is None:
                    self._callbacks = (*self._callbacks, callback)
                    return
        self._call(callback)

    def _await(self, timeout: Duration | None) -> Placements | Exception:
        seconds = None if timeout is None else check_seconds("timeout", timeout, zero=True)
        while (outcome := self._outcome) is None:
            self._wait(seconds)
        return outcome

    def _wait(self, timeout: float | None) -> None:
        waited = Wake()
        with self._own_lock():
            # Without a call: a signal's handler would run after it, and might wait for a thread that needs the lock.
            if self._outcome is not None:
                return
            if self._waited is None:
                self._waited = waited
            waited = self._waited
        # Without a timeout, `_await` comes back: Ctrl-C always ends the wait.
        woken = waited.wait(SIGNAL_SECONDS if timeout is None else timeout)
        if timeout is not None and not woken and self._outcome is None:
            raise TimeoutError(f"the event was not committed within {timeout} s, and may be committed later")

    def _own_lock(self) -> threading.Lock:
        """The lock, for a caller that waits. Raises `EventSQLError` in a process that was forked since."""
        if self._lock is not _watching.lock:
            raise EventSQLError(
                "the parent process gave this event before the fork, and only the parent learns of its commit: wait "
                "for it in the parent"
            )
        return self._lock

    def _call(self, callback: Callable[[Acknowledgement], object]) -> None:
        try:
            callback(self)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # The thread has other events to commit.
            logger.exception("a callback of an acknowledgement failed")

    def finish(self, number: int, outcome: Placements | Exception) -> bool:
        """Become done, as event `number` of its batch. Gives whether `tell` is needed.

        Only the publisher calls it, holding the lock of `_watching`.
        """
        # Set the outcome last: a thread that sees it reads the number without the lock.
        self._number, self._outcome = number, outcome
        return self._waited is not None or bool(self._callbacks)

    def tell(self) -> None:
        """Wake the waiting threads. Only the publisher calls it, after `finish`, without the lock of `_watching`."""
        if self._waited is not None:
            self._waited.set()
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            self._call(callback)


_watching: Final = ProcessLock()
"""The lock of all acknowledgements, held for a moment to begin waiting and to become done."""


def _settle(acknowledgements: Sequence[Acknowledgement], outcome: Outcome) -> None:
    outcomes: Iterable[Placements | Exception] = (
        repeat(outcome) if isinstance(outcome, Placements) else ([outcome() for _ in acknowledgements])
    )
    with _watching.lock:
        watched = [
            each
            for number, (each, own) in enumerate(zip(acknowledgements, outcomes, strict=False))
            if each.finish(number, own)
        ]
    for each in watched:
        each.tell()
