"""A queue for asyncio: no call waits for the database in the event loop's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import CallersConnection
from eventsql_orchestration.queue.queue import Queue
from eventsql_orchestration.queue.values import (
    ArchivedMessage,
    ErasedMessages,
    Message,
    NewMessage,
    PeekedMessage,
    QueueDefinition,
    QueueDepth,
    QueueStatistics,
)
from eventsql_orchestration.queue.worker import give_back
from eventsql_orchestration.validation import NO_METADATA, Duration, in_seconds


@checked
class AsyncQueue:
    """The calls of `Queue` for tasks of an event loop, without workers. A waiting `receive` takes no thread."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    async def definition(self) -> QueueDefinition:
        """As `Queue.definition`."""
        return await asyncio.to_thread(self.queue.definition)

    async def send_all(
        self, messages: Iterable[NewMessage | bytes], *, connection: CallersConnection | None = None
    ) -> list[int]:
        """As `Queue.send_all`."""
        return await asyncio.to_thread(self.queue.send_all, messages, connection=connection)

    @checks_itself
    async def send(
        self, body: bytes,
        *, key: str | None = None, metadata: Mapping[str, str] = NO_METADATA, delay: Duration = 0.0,
        due: datetime | None = None, priority: int = 0, deduplication_id: str | None = None,
        connection: CallersConnection | None = None,
    ) -> int:  # fmt: skip
        """As `Queue.send`."""
        message = NewMessage(body, key, metadata, delay, due, priority, deduplication_id)
        return (await self.send_all([message], connection=connection))[0]

    async def receive(
        self, *, max_messages: int = 1, visibility_timeout: Duration | None = None, wait: Duration = 0.0
    ) -> list[Message]:
        """As `Queue.receive`. A receive that is cancelled gives its messages back at once, and does not count."""
        deadline = time.monotonic() + in_seconds(wait)

        found = await self._take(max_messages, visibility_timeout)
        if found or not wait:
            return found

        wake, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)

        # The queue's databases are open by now, so this does not wait. A thread would leave the subscription behind if
        # the task was cancelled at that moment.
        unsubscribe = self.queue.subscribe(notify)
        try:
            while True:
                wake.clear()
                found = await self._take(max_messages, visibility_timeout)
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                pause = await asyncio.to_thread(self.queue.pause)
                try:
                    async with asyncio.timeout(min(left, pause)):
                        await wake.wait()
                except TimeoutError:
                    pass
        finally:
            unsubscribe()

    async def _take(self, max_messages: int, visibility_timeout: Duration | None) -> list[Message]:
        found: list[Message] = []
        cancelled, lock = False, threading.Lock()

        def receive() -> None:
            messages = self.queue.receive(max_messages=max_messages, visibility_timeout=visibility_timeout)
            with lock:
                if not cancelled:
                    found.extend(messages)
                    return
            give_back(self.queue, messages)

        try:
            await asyncio.to_thread(receive)
        except asyncio.CancelledError:
            # The thread does not end with the task.
            with lock:
                cancelled = True
            if found:
                asyncio.get_running_loop().run_in_executor(None, give_back, self.queue, found)
            raise
        return found

    async def acknowledge(self, message: Message, *, connection: CallersConnection | None = None) -> None:
        """As `Queue.acknowledge`."""
        await asyncio.to_thread(self.queue.acknowledge, message, connection=connection)

    async def acknowledge_all(
        self, messages: Iterable[Message], *, connection: CallersConnection | None = None
    ) -> None:
        """As `Queue.acknowledge_all`."""
        await asyncio.to_thread(self.queue.acknowledge_all, messages, connection=connection)

    async def release(self, message: Message, *, delay: Duration = 0.0, reason: str | None = None) -> None:
        """As `Queue.release`."""
        await asyncio.to_thread(self.queue.release, message, delay=delay, reason=reason)

    async def extend(self, message: Message, seconds: Duration) -> None:
        """As `Queue.extend`."""
        await asyncio.to_thread(self.queue.extend, message, seconds)

    async def peek(self, limit: int = 10) -> list[PeekedMessage]:
        """As `Queue.peek`."""
        return await asyncio.to_thread(self.queue.peek, limit)

    async def purge(self) -> int:
        """As `Queue.purge`."""
        return await asyncio.to_thread(self.queue.purge)

    async def count_of_keys(self, keys: Collection[str]) -> ErasedMessages:
        """As `Queue.count_of_keys`."""
        return await asyncio.to_thread(self.queue.count_of_keys, keys)

    async def erase(self, keys: Collection[str]) -> ErasedMessages:
        """As `Queue.erase`."""
        return await asyncio.to_thread(self.queue.erase, keys)

    async def delete(self, *, force: bool = False) -> None:
        """As `Queue.delete`."""
        await asyncio.to_thread(self.queue.delete, force=force)

    async def redrive(self, limit: int | None = None, *, ids: Iterable[int] | None = None) -> int:
        """As `Queue.redrive`."""
        return await asyncio.to_thread(self.queue.redrive, limit, ids=ids)

    async def statistics(self) -> QueueStatistics:
        """As `Queue.statistics`."""
        return await asyncio.to_thread(self.queue.statistics)

    async def archived(self, limit: int = 100) -> list[ArchivedMessage]:
        """As `Queue.archived`."""
        return await asyncio.to_thread(self.queue.archived, limit)

    async def depth(self) -> QueueDepth:
        """As `Queue.depth`."""
        return await asyncio.to_thread(self.queue.depth)
