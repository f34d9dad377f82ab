"""The messages that workers hold. Heartbeats extend them, and find out which of them another receiver has by now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.queue.message_queue import MessageQueue
from eventsql_orchestration.queue.queue_shards import by_shard
from eventsql_orchestration.queue.values import Message
from eventsql_orchestration.threads import Wake, join_all, start_thread

logger = logging.getLogger(__name__)

HEARTBEATS: Final = 3
"""Extensions of a held message within its visibility timeout: two may fail."""


class HeldMessages:
    """The messages that the threads of a process hold from a queue. Its methods may be called from any thread."""

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self._held: dict[tuple[str | None, int], Message] = {}
        self._lock = threading.Lock()

    def __contains__(self, message: Message) -> bool:
        with self._lock:
            return self._held.get((message.shard, message.id)) is message

    def messages(self) -> list[Message]:
        with self._lock:
            return list(self._held.values())

    def hold(self, messages: Iterable[Message]) -> None:
        with self._lock:
            self._held |= {(message.shard, message.id): message for message in messages}

    def let_go(self, message: Message) -> None:
        with self._lock:
            # Another worker may hold a later receive of the same message.
            if self._held.get((message.shard, message.id)) is message:
                del self._held[message.shard, message.id]

    def extend(self, seconds: float) -> None:
        """Hold all messages for `seconds` from now on. Forgets the messages that are not held any more."""
        # Each shard by itself: a shard that is down must not cost the others their messages.
        for held in by_shard(self.messages()):
            self._extend_on_shard(held, seconds)

    def _extend_on_shard(self, held: list[Message], seconds: float) -> None:
        try:
            still = {(message.shard, message.id) for message in self._queue.extend_all(held, seconds)}
        except EventSQLError as error:
            logger.warning("the messages held from queue %r were not extended: %s", self._queue.name, error)
            return
        for message in held:
            if (message.shard, message.id) not in still:
                # Another receiver has the message, or it is acknowledged. If it waits here, no handler begins it.
                self.let_go(message)

    def start_heartbeats(self, seconds: float, ended: Callable[[float], bool]) -> threading.Thread:
        """Start a thread that extends the held messages, so that none of them reaches its visibility timeout.

        The thread calls `ended`, which waits for up to the given seconds, and ends when `ended` gives True.
        """

        def beat() -> None:
            every = seconds / HEARTBEATS
            due = time.monotonic() + every
            while not ended(max(0.0, due - time.monotonic())):
                due = time.monotonic() + every
                self.extend(seconds)

        return start_thread(f"heartbeat-{self._queue.name}", beat)

    @contextmanager
    def heartbeat(self, seconds: float) -> Iterator[None]:
        """Extend the held messages during the block: see `start_heartbeats`."""
        stop, threads = Wake(), list[threading.Thread]()
        try:
            # In the block: after Ctrl-C, nobody else would end it.
            threads.append(self.start_heartbeats(seconds, stop.wait))
            yield
        finally:
            stop.set()
            join_all(threads, time.monotonic() + seconds)
