"""Floor 3: SQS-style delivery, each message to one receiver at a time until one of them acknowledges it."""

from eventsql_orchestration.queue.message import Message, QueueDepth
from eventsql_orchestration.queue.queue import Queue

__all__ = ["Message", "Queue", "QueueDepth"]
