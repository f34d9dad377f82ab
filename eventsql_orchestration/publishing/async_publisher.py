"""Publishing from asyncio: many tasks share a commit, and no call waits for the database in the event loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final, Unpack

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.errors import EventSQLError, PublisherClosedError
from eventsql_orchestration.log.buffered import CLOSE_TIMEOUT, BoundOptions, Bounds, Lanes
from eventsql_orchestration.log.publisher import Publisher, check_publication
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import Publication

IN_A_ROW: Final = 100
"""Events that are given without letting the loop's other tasks run. Measured: giving one takes under 10 µs."""


@checked
class AsyncPublisher:
    """Publishes events of any number of tasks together, a commit for many, and acknowledges each after its commit.

    The options are those of `log.buffered.Bounds`. Memory is bounded by them: while as many events wait as may, tasks
    wait for room, in the order in which they came.

    Events of a key are committed in the order in which they were given. Without a key, events that name the same
    partition are, and in a topic without partitions all events are. Events of different keys have no order, even in one
    partition. An event that fails does not keep those after it from being committed.

    It belongs to the event loop in which it is used first. Close it, or use it with `async with`: events that are not
    acknowledged when the process ends may be lost.

    Cancelling a task that waits for an acknowledgement, or the future of one, does not take its event back.
    """

    def __init__(self, publisher: Publisher, registry: Registry, **bounds: Unpack[BoundOptions]) -> None:
        self._registry = registry
        self._lanes: Lanes[asyncio.Future[None]] = Lanes(publisher, registry, Bounds(**bounds), self._settle)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._given = 0
        # Tasks that could not give their event at once. While there are any, those that come later wait behind them.
        self._queued = 0
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()

    @checks_itself
    async def publish(self, publication: Publication) -> None:
        """Publish one event; it is committed when this returns.

        Raises what `enqueue` raises, and what the database says against this event, or `RedefinitionError` when its
        topic was redefined after it was given: neither touches the events that share its commit.
        `DatabaseUnavailableError` and other errors of the database hit all that share it; where the connection broke at
        the commit, they may be published nevertheless, and are twice if they are published again. So may one whose task
        is cancelled.
        """
        future = await self.enqueue(publication)
        await future

    @checks_itself
    async def enqueue(self, publication: Publication) -> asyncio.Future[None]:
        """Give one event, when there is room; the future is done when the event is committed, or cannot be.

        Where the task is cancelled before this returns, the event is not published.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseUnavailableError` (where the topic had to be
        looked up), `PublisherClosedError`; the event is not published then. The future has the other errors of
        `publish`.
        """
        check_publication(publication)
        loop = self._own_loop()
        if self._closing:
            raise PublisherClosedError
        self._given += 1
        topic = self._registry.known(publication.topic)
        if topic is not None and not self._queued and self._given % IN_A_ROW:
            future = loop.create_future()
            if self._lanes.put_if_room(self._lanes.place(publication, topic), future, on_room=self._wake):
                return future
        self._queued += 1
        try:
            async with self._turn:
                # Where the database keeps up with a task that only gives events, nothing else would let others run.
                await asyncio.sleep(0)
                return await self._give(publication, loop.create_future())
        finally:
            self._queued -= 1

    async def _give(self, publication: Publication, future: asyncio.Future[None]) -> asyncio.Future[None]:
        topic = self._registry.known(publication.topic)
        if topic is None:
            topic = await asyncio.to_thread(self._registry.cached_topic, publication.topic)
        event = self._lanes.place(publication, topic)
        while True:
            self._room.clear()
            if self._lanes.put_if_room(event, future, on_room=self._wake):
                return future
            await self._room.wait()

    async def flush(self) -> None:
        """Wait until every event that was given before is committed, or cannot be; its future is done then."""
        self._own_loop()
        async with self._turn:
            pass
        await asyncio.to_thread(self._lanes.flush)

    async def aclose(self, timeout: float | None = CLOSE_TIMEOUT) -> None:  # noqa: ASYNC109 - what is left then is told
        """Take no more events, and commit those that were given.

        What is not committed after `timeout` seconds gets a `PublisherClosedError`, which says whether its outcome is
        known.
        """
        self._own_loop()
        self._closing = True
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._turn:
                pass
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        await asyncio.to_thread(self._lanes.close, left)

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """The same for code that is not a task; the thread that calls it waits, be it the loop's own."""
        self._closing = True
        self._lanes.close(timeout)

    async def __aenter__(self) -> AsyncPublisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EventSQLError("this publisher belongs to another event loop: make one in each")
        return loop

    # Called by the threads of the lanes

    def _wake(self) -> None:
        self._call(self._room.set)

    def _settle(self, futures: Sequence[asyncio.Future[None]], failure: Callable[[], Exception] | None) -> None:
        self._call(_resolve, futures, failure)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(futures: Sequence[asyncio.Future[None]], failure: Callable[[], Exception] | None) -> None:
    for future in futures:
        if future.done():
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure())
