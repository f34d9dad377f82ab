"""SQS-style queues: a message goes to one receiver at a time until it is acknowledged."""

from eventsql_orchestration.queue.async_queue import AsyncQueue
from eventsql_orchestration.queue.options import QueueOptions
from eventsql_orchestration.queue.queue import Queue
from eventsql_orchestration.queue.upkeep import drop_expired_archives, list_queues
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
from eventsql_orchestration.queue.worker import QueueWorkers

__all__ = [
    "ArchivedMessage", "AsyncQueue", "ErasedMessages", "Message", "NewMessage", "PeekedMessage", "Queue",
    "QueueDefinition", "QueueDepth", "QueueOptions", "QueueStatistics", "QueueWorkers", "drop_expired_archives",
    "list_queues",
]  # fmt: skip
