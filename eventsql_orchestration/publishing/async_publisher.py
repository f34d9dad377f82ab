"""Publishing from asyncio: many tasks share a commit, and no call waits for the database in the event loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.errors import EventSQLError, PublisherClosedError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.model import Placement, Publication
from eventsql_orchestration.publishing.batches import check_publication
from eventsql_orchestration.publishing.buffer_limits import BufferLimits
from eventsql_orchestration.publishing.lanes import CLOSE_TIMEOUT, BatchPublisher, Lanes, Outcome, time_left
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.topics.registry import Registry

IN_A_ROW: Final = 100
"""Maximum number of events taken in a row. Then the loop's other tasks may run. Measured: an event takes less than 10
µs."""


@checked
class AsyncCollector:
    """Collects the events of any number of tasks for one database. `AsyncPublisher` is its public face."""

    def __init__(self, publisher: BatchPublisher, registry: Registry, limits: BufferLimits) -> None:
        self._registry = registry
        self._lanes: Lanes[asyncio.Future[Placement]] = Lanes(publisher, limits, self._settle)
        self._closing = False
        self._after_fork()
        after_fork(self, AsyncCollector._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. The event loop and the tasks that wait belong to the parent process."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._given = 0
        # The number of tasks that wait to give their event. Tasks that come later wait behind them.
        self._queued = 0
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()

    @checks_itself
    async def enqueue(self, publication: Publication) -> asyncio.Future[Placement]:
        """Give one event, when there is room; the future is done when the event is committed or has failed."""
        check_publication(publication)
        loop = self._own_loop()
        if self._closing:
            raise PublisherClosedError

        self._given += 1
        topic = self._registry.known(publication.topic)
        if topic is not None and not self._queued and self._given % IN_A_ROW:
            future = loop.create_future()
            if self._lanes.put_if_room(self._lanes.assign(publication, topic), future, on_room=self._wake):
                return future

        self._queued += 1
        try:
            async with self._turn:
                # A task that only gives events would otherwise never let other tasks run.
                await asyncio.sleep(0)
                return await self._give(publication, loop.create_future())
        finally:
            self._queued -= 1

    async def _give(self, publication: Publication, future: asyncio.Future[Placement]) -> asyncio.Future[Placement]:
        topic = self._registry.known(publication.topic)
        if topic is None:
            topic = await asyncio.to_thread(self._registry.cached_topic, publication.topic)
        event = self._lanes.assign(publication, topic)
        while True:
            self._room.clear()
            if self._lanes.put_if_room(event, future, on_room=self._wake):
                return future
            await self._room.wait()

    async def flush(self) -> None:
        """Wait until every event given before is committed or has failed. Its future is done then."""
        self._own_loop()
        async with self._turn:
            pass
        await asyncio.to_thread(self._lanes.flush)

    async def aclose(self, timeout: float | None = CLOSE_TIMEOUT) -> None:  # noqa: ASYNC109 - the rest gets an error
        """Take no more events, and commit the events that were given."""
        self._own_loop()
        self._closing = True
        left = time_left(timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._turn:
                pass
        await asyncio.to_thread(self._lanes.close, left())

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """`aclose` for code outside of tasks. It blocks the calling thread, even the loop's own thread."""
        self._closing = True
        self._lanes.close(timeout)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EventSQLError("this publisher belongs to another event loop: make a publisher in each loop")
        return loop

    # The lanes' threads call these

    def _wake(self) -> None:
        self._call(self._room.set)

    def _settle(self, futures: Sequence[asyncio.Future[Placement]], outcome: Outcome) -> None:
        self._call(_resolve, futures, outcome)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            # If the loop is closed, no one waits for this.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(futures: Sequence[asyncio.Future[Placement]], outcome: Outcome) -> None:
    for number, future in enumerate(futures):
        if future.done():
            continue
        if isinstance(outcome, Placements):
            future.set_result(outcome[number])
        else:
            future.set_exception(outcome())
