"""Every error that this package raises on purpose. `orchestration/errors.py` has the errors of orchestrators' runs.

Catch `EventSQLError` for all of them. The message of each says what happened and what to do next; the docstring
of a class is the message that it carries when none is given.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from typing import Any


class EventSQLError(Exception):
    """Something went wrong in the events platform."""

    def __init__(self, message: str | None = None) -> None:
        if message is None:
            message = " ".join((type(self).__doc__ or type(self).__name__).split())
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is made without `__init__`, whose arguments differ.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    @property
    def message(self) -> str:
        """The whole message, one line where its parts allow it."""
        return str(self.args[0])


# Configuration and installation


class ConfigurationError(EventSQLError):
    """A setting is missing or has a value that cannot be used."""


class MissingExtraError(ConfigurationError):
    """A part of the package is not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra [{extra}]: pip install 'eventsql-orchestration[{extra}]'")
        self.extra = extra


class EmbeddedServerError(EventSQLError):
    """The embedded PostgreSQL server could not be started or stopped."""


class ClosedError(EventSQLError):
    """The platform was closed: make another EventSQL, or open it again with `with platform:` or `platform.open()`."""


# Database


class DatabaseError(EventSQLError):
    """The database refused a statement."""


class DatabaseUnavailableError(DatabaseError):
    """The database cannot be reached, or it closed the connection."""


class ConnectionLostError(DatabaseUnavailableError):
    """The connection was lost before the database had answered: the work under way may have been committed or not."""


class DatabaseBusyError(DatabaseError):
    """A lock, a connection or an answer of the database took too long: try again."""


class DatabaseFullError(DatabaseError):
    """The database has no room left on its disk or in its memory."""


class SchemaOutdatedError(DatabaseError):
    """The tables of the events platform are missing or older than this package: run `eventsql migrate`."""


class SequenceError(DatabaseError):
    """A sequence does not give ids one by one and upwards, so events would be lost or stay behind.

    `sequence` is its quoted name, `finding` says what is wrong with it, `remedy` is the SQL statement that corrects it.
    """

    def __init__(self, finding: str | None = None, *, sequence: str = "", remedy: str = "") -> None:
        super().__init__(f"{finding}. Run: {remedy}" if finding and remedy else finding)
        self.sequence = sequence
        self.finding = finding or self.message
        self.remedy = remedy


class BrokenBlockError(DatabaseError):
    """A block of events in a topic's log is damaged, so reading its partition stops there.

    `topic` and `partition` say where it is, `first` is the offset of its first event that was asked for.
    """

    def __init__(self, topic: str, partition: int, first: int) -> None:
        super().__init__(
            f"the block of topic {topic!r} with offset {first}, in partition {partition}, is damaged: its number of "
            "events differs from its number of values. Restore it from a backup, or move the consumers past it "
            "(`eventsql seek --help`)"
        )
        self.topic = topic
        self.partition = partition
        self.first = first


class StuckEventError(DatabaseError):
    """One event cannot be moved from the buffer to its log, so it and the later events of its topic wait there.

    `topic` and `buffer_id` name the event or the block of events. `size` is in bytes, None if it is not known.
    """

    def __init__(
        self, message: str | None = None, *, topic: str = "", buffer_id: int = 0, size: int | None = None
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.buffer_id = buffer_id
        self.size = size


class PermissionDeniedError(DatabaseError):
    """The current role lacks a right: grant it the role that has it, see `eventsql roles list`.

    `role` is the current role and `object` is the object that it may not use, as far as the server names them.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        role: str | None = None,
        object: str | None = None,  # noqa: A002 - the usual word
    ) -> None:
        super().__init__(message)
        self.role = role
        self.object = object


# Arguments of callers


class ValidationError(EventSQLError, ValueError):
    """A value breaks a rule of the platform; nothing was written."""


class InvalidNameError(ValidationError):
    """A topic or consumer name breaks the rules for names."""


class InvalidPublicationError(ValidationError):
    """A publication has a key, value or metadata that cannot be stored; nothing was written."""


class PartitionOutOfRangeError(ValidationError):
    """A partition was named that the topic does not have."""


# Registry


class RegistryError(EventSQLError):
    """The registry refused a definition."""


class TopicNotFoundError(RegistryError):
    """There is no such topic: create it with `eventsql topic create`."""


class ConsumerNotFoundError(RegistryError):
    """There is no such consumer: create it with `eventsql consumer create`."""


class ViewNotFoundError(RegistryError):
    """No view has this name: `Views.declare` makes it."""


class ViewConflictError(RegistryError):
    """A view exists with another form: declare the new form under another name, and fill it from the topic."""


class RedefinitionError(RegistryError):
    """A topic or consumer exists with another definition that cannot be changed any more."""


# Publishing


class CaptureError(EventSQLError):
    """The changes of a table cannot be captured, or are not captured."""


class PublisherClosedError(ClosedError):
    """The publisher is closed and takes no more events: open another."""


# Shards


class ShardError(EventSQLError):
    """The shards of a platform cannot do this together."""

    # `shard` is the name of the shard, if the error is about one.
    def __init__(self, message: str | None = None, *, shard: str = "") -> None:
        super().__init__(message)
        self.shard = shard


class SingleShardError(ShardError):
    """An attribute belongs to one database, and the platform has several: use it on a shard, `platform.shards[i]`."""


class ShardSetError(ShardError, ConfigurationError):
    """The databases that were named are not the shards of one set."""


class WrongShardError(RegistryError, ShardError):
    """The key belongs to another shard; nothing was published or sent. For an event, `shard` is its name."""


class ShardPendingError(WrongShardError):
    """The shard is being added and takes no events yet: finish it with `eventsql shard add … --execute`."""


class ShardUnavailableError(DatabaseUnavailableError, ShardError):
    """The shard that a key belongs to cannot be reached; nothing was published."""


class ShardsDifferError(ShardError):
    """A topic or consumer is not the same on all shards."""

    # `remedy` is the command that makes it the same.
    def __init__(self, message: str | None = None, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class PartlyPublishedError(ShardError):
    """Some shards have committed their events of a batch, others have not.

    `committed` has the number of events by shard, `failed` the error by shard. The batch's events of the shards in
    `failed` are not published, unless the error is a `ConnectionLostError`: these may have been published.
    """

    def __init__(self, committed: Mapping[str, int], failed: Mapping[str, Exception]) -> None:
        done = ", ".join(f"{count} events on {name!r}" for name, count in committed.items())
        faults = "; ".join(f"shard {name!r}: {error}" for name, error in failed.items())
        others = "nothing on the other shards: publish their events again"
        if lost := _lost(failed):
            others = (
                f"perhaps the events of {lost}, and nothing on other shards: before you publish these shards' events "
                f"again, look whether the events of {lost} are there"
            )
        super().__init__(f"published {done}, and {others} ({faults})")
        self.committed = dict(committed)
        self.failed = dict(failed)


def first_error(failed: Mapping[str, Exception]) -> Exception:
    """The error to raise if every shard of a call failed: first an error that leaves the outcome unknown."""
    return min(failed.values(), key=lambda error: not isinstance(error, ConnectionLostError))


def _lost(failed: Mapping[str, Exception]) -> str:
    """The shards whose outcome is unknown, as words."""
    return ", ".join(repr(name) for name, error in failed.items() if isinstance(error, ConnectionLostError))


class PublicationUnfinishedError(ShardError):
    """A publication over several shards is decided, but some of its events are not in the buffer of their shard yet.

    Any transfer over all shards finishes the publication once the shard can be reached. The same writer finishes it
    too, if it writes the same batch again. Do not publish the events again: they would be published twice.
    """


# Consuming


class ConsumptionError(EventSQLError):
    """Raised by a handler to name the event of its batch that failed.

    `event` is the event that could not be processed; it alone is retried, and becomes a dead letter after its last
    attempt. The cause (`raise … from cause`) is what the dead letter records.
    """

    def __init__(self, event: object, message: str | None = None) -> None:
        super().__init__(message or f"event {getattr(event, 'id', event)!r} could not be processed")
        self.event = event


class PartitionLeasedError(EventSQLError):
    """A consumer partition is leased by a consumption that is under way: stop it first."""


class ClaimLostError(EventSQLError):
    """The claim is lost: another owner took the partition, or its offset moved."""


class ClaimNotFoundError(ClaimLostError):
    """No claim has this number: it was never made, it ended long ago, or its consumer or topic was deleted."""


# Using the log


class DataLossError(EventSQLError):
    """Retention has dropped events that were still to be read."""


class ConcurrentAppendError(EventSQLError):
    """Another writer appended to this aggregate first: load it again and decide again."""


class AggregateClosedError(EventSQLError):
    """The aggregate was closed and takes no more changes."""


class SubscriptionNotFoundError(EventSQLError):
    """There is no such subscription: `eventsql store subscriptions` names them."""


class RestoredStoreError(DatabaseError):
    """The event store was restored from a dump of another server: run `eventsql store adopt`."""


class ChangeSchemaError(EventSQLError):
    """A stored change cannot be read as an event of the declared types."""


class ProjectionError(EventSQLError):
    """A projection cannot be rebuilt or used as it is."""


class MessageNotFoundError(EventSQLError):
    """The queue holds no such message under this receipt: it was acknowledged, or its visibility timeout ended.

    `ids` are the ids of the messages that are not held, or that are not dead letters of the queue.
    """

    def __init__(self, message: str | None = None, *, ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)


class PartlySentError(ShardError):
    """Some shards have taken their messages of a `send_all`, others have not: send the messages without an id again.

    `ids` has the id of each message in the order of the call, None for a message that was not sent. `failed` is as in
    `PartlyPublishedError`.
    """

    def __init__(self, ids: Sequence[int | None], failed: Mapping[str, Exception]) -> None:
        sent = len(ids) - list(ids).count(None)
        faults = "; ".join(f"shard {name!r}: {error}" for name, error in failed.items())
        again = "send the messages without an id in `ids` again"
        if lost := _lost(failed):
            again += f", but look first whether the messages of {lost} were sent"
        super().__init__(f"sent {sent} of {len(ids)} messages: {again} ({faults})")
        self.ids = list(ids)
        self.failed = dict(failed)


class QueueNotFoundError(EventSQLError):
    """There is no such queue: create it with `eventsql queue create`, or send a message to it."""


class QueueInUseError(EventSQLError):
    """A queue is kept, because its messages would be lost, or because another queue needs it."""


# Files of events


class InputError(EventSQLError):
    """A file or stream of events cannot be read, or one of its lines is not an event."""


# Benchmarks


class BenchmarkError(EventSQLError):
    """A benchmark could not be run to its end, so it has no figure."""
