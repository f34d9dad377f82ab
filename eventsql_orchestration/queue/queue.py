"""A queue in PostgreSQL: one worker at a time receives a message, and it stays until it is acknowledged."""

from __future__ import annotations

from typing import Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.handlers import check_handler
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.queue.message_queue import MAX_MESSAGES, MessageQueue
from eventsql_orchestration.queue.options import seconds_of
from eventsql_orchestration.queue.worker import Backoff, Handler, QueueWorkers, exponential
from eventsql_orchestration.validation import Duration, check_whole

MAX_WORKERS: Final = 20
"""The most workers of one call: each keeps a connection while its handler runs, and heartbeats and other threads need
connections of the same pool, which has up to 30."""


@checked
class Queue(MessageQueue):
    """The queue called `name`, of a platform. It exists as soon as it is used.

    `source` is a platform (`EventSQL`), one of its shards, or a `Database`; receivers hear of new messages at once if
    the sender has a platform or a shard. A message goes to one receiver at a time. If a receiver dies or takes longer
    than its visibility timeout, another receiver gets the message: delivery is at least once. `acknowledge(message,
    connection=…)` in the transaction of the message's effects makes the effects exactly once. Messages are received in
    the order of their priority, then roughly in the order in which they became visible. With `ordered`, messages with
    the same key are received one after another: the next only after the one before is acknowledged, or moved to the
    dead letters.

    The other options are kept in the database; an option that is given changes it for all users of the queue.
    `visibility_timeout` is in seconds (default 30). After `max_receives` receives without an acknowledgement, a message
    moves to the queue `dead_letters` (default: `{name}_dead`). Acknowledged messages are kept in an archive for
    `retention` seconds. `deduplication_window` is in seconds (default 300).

    Over several shards, each message is on the shard of its key.

    Raises `InvalidNameError` and `ValidationError` for an unusable name or option. Nothing connects before the first
    call. The first call raises `RedefinitionError` if the queue exists and differs in `ordered`.
    """

    def work(
        self, handler: Handler,
        *, workers: int = 1, max_messages: int = 10, visibility_timeout: Duration | None = None,
        backoff: Backoff = exponential,
    ) -> QueueWorkers:  # fmt: skip
        """Start threads that call `handler(message, connection)` for each message; `stop()` ends them.

        The `close` of the platform or shard stops them, too.

        Writes through `connection` commit together with the acknowledgement: exactly once. All other effects happen at
        least once. If the handler raises, its writes are rolled back, and the message is released for
        `backoff(receives)` seconds, with the error in its history. The visibility timeout of messages that a worker
        holds is extended meanwhile. Each of up to 20 workers keeps a connection while its handler runs, and receives up
        to `max_messages` at once. Give the queue `max_receives`, or a message whose handler always fails comes back for
        ever. Raises `ValidationError` for more workers than this process may have connections, and for a handler that
        would never run, such as a coroutine function.
        """
        check_handler(handler, "message", "connection")
        check_whole("workers", workers, least=1, most=MAX_WORKERS)
        check_whole("max_messages", max_messages, least=1, most=MAX_MESSAGES)
        for database in self._shards.databases():
            if workers > (most := database.most_connections):
                raise ValidationError(
                    f"{workers} workers would need as many connections: {database} gives this process {most} at once; "
                    f"use at most {most} workers"
                )
        seconds = seconds_of("visibility_timeout", visibility_timeout)
        workers_of_queue = QueueWorkers(
            self, handler, workers=workers, max_messages=max_messages, visibility_timeout=seconds, backoff=backoff
        )
        # First: after Ctrl-C in the middle of their start, the close of the platform still ends them.
        return self._shards.keep(workers_of_queue).start()
