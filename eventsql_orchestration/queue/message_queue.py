"""The messages of a queue in PostgreSQL: they are sent, received by one receiver at a time, settled and looked at."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime
from itertools import chain
from typing import Final

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import CallersConnection, Connection
from eventsql_orchestration.errors import (
    DatabaseError,
    EventSQLError,
    MessageNotFoundError,
    PartlySentError,
    QueueNotFoundError,
    ShardError,
    ValidationError,
    WrongShardError,
    first_error,
)
from eventsql_orchestration.maintenance.erasure import check_keys
from eventsql_orchestration.queue.options import QueueOptions, checked_options, seconds_of
from eventsql_orchestration.queue.queue_shards import QueueShards, Source, by_shard
from eventsql_orchestration.queue.queue_table import QUEUE, QueueTable
from eventsql_orchestration.queue.upkeep import QueueUpkeep
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
from eventsql_orchestration.shards.cluster import ONE_SHARD
from eventsql_orchestration.threads import Wake
from eventsql_orchestration.validation import (
    NO_METADATA,
    Duration,
    check_kind,
    check_name,
    check_seconds,
    check_several,
    check_whole,
    in_seconds,
)

logger = logging.getLogger(__name__)

MAX_MESSAGES: Final = 10_000
"""The most messages of one receive or send. More would wait in memory for longer than their visibility timeout."""

MAX_IN_ORDER: Final = 1_000
"""The most messages of one receive from an ordered queue: it locks the key of each."""

POLL_SECONDS: Final = 1.0
"""The longest time between two looks of a receiver that waits. Messages of callers' transactions and messages that
become visible by themselves come without a notification."""


@checked
class MessageQueue:
    """All that a `Queue` does, except for its workers, which use this class."""

    def __init__(
        self, source: Source, name: str,
        *, ordered: bool | None = None, visibility_timeout: Duration | None = None, max_receives: int | None = None,
        dead_letters: str | None = None, retention: Duration | None = None,
        deduplication_window: Duration | None = None,
    ) -> None:  # fmt: skip
        self.name = check_name("queue name", name)
        options = QueueOptions(ordered, visibility_timeout, max_receives, dead_letters, retention, deduplication_window)
        self._shards = QueueShards(source, name, checked_options(name, options))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def definition(self) -> QueueDefinition:
        """The queue's options as the database has them; creates the queue if there is none.

        Over several shards, creates it on each shard that can be reached.
        """
        return self._shards.each(self._shards.all(), QueueTable.definition)[0]

    # Sending

    @checks_itself
    def send(
        self, body: bytes,
        *, key: str | None = None, metadata: Mapping[str, str] = NO_METADATA, delay: Duration = 0.0,
        due: datetime | None = None, priority: int = 0, deduplication_id: str | None = None,
        connection: CallersConnection | None = None,
    ) -> int:  # fmt: skip
        """Send one message and return its id. `NewMessage` describes its fields.

        With `connection`, of psycopg or SQLAlchemy, it is sent when the caller's transaction commits. For a message
        whose `deduplication_id` was sent before, gives the id of that message.

        Raises `ValidationError`, with nothing sent, for values that cannot be stored and for a connection to another
        database, and `WrongShardError` for a key of an ordered queue that belongs to another shard.
        """
        message = NewMessage(body, key, metadata, delay, due, priority, deduplication_id)
        return self.send_all([message], connection=connection)[0]

    @checks_itself
    def send_all(
        self, messages: Iterable[NewMessage | bytes], *, connection: CallersConnection | None = None
    ) -> list[int]:
        """Send up to 10,000 messages in one statement, all or none, and return their ids in the same order.

        With `connection`, they are sent when the caller's transaction commits. Over several shards, the messages of
        each shard are one statement, and `PartlySentError` says which messages were sent if a shard has failed. While
        a shard is being added, the keys of an ordered queue that move to it wait for up to `shard_timeout`. Raises as
        `send`.
        """
        check_several("messages", messages)
        given = [each if isinstance(each, NewMessage) else _bare(each) for each in messages]
        if len(given) > MAX_MESSAGES:
            raise ValidationError(f"{len(given)} messages are too many for one call: send up to {MAX_MESSAGES}")
        tables = self._shards.all()
        if given and self._shards.lone():
            return tables[0].put(given, connection)
        if connection is not None:
            # Check the connection even if there is nothing to send.
            table = self._shards.where(connection, given, tables)
            try:
                return table.put(given, connection) if given else []
            except WrongShardError as error:
                # A caller that asks for the shard now gets the new answer, if the shards can be read.
                with suppress(EventSQLError):
                    self._shards.reconsider(error, time.monotonic())
                raise
        return self._send_over_shards(given, tables)

    def _send_over_shards(self, given: Sequence[NewMessage], tables: Sequence[QueueTable]) -> list[int]:
        started = time.monotonic()
        ids: dict[int, int] = {}
        failed: dict[str, Exception] = {}
        left = self._by_table(given, range(len(given)), tables)
        while left:
            refused: dict[str, WrongShardError] = {}
            again: list[int] = []
            for table, places in left.items():
                try:
                    with self._shards.using(table, since=started):
                        ids.update(zip(places, table.put([given[each] for each in places], None), strict=True))
                except WrongShardError as error:
                    refused[table.shard or ""] = error
                    again += places
                except Exception as error:  # noqa: BLE001 - raised below, with the ids of the others
                    failed[table.shard or ""] = error
            if not refused:
                break
            # A shard was added, or is being added, and the keys have moved to it.
            try:
                self._shards.reconsider(next(iter(refused.values())), started)
                left = self._by_table(given, sorted(again), self._shards.all())
            except Exception as error:  # noqa: BLE001 - raised below, with the ids of the others
                failed.update(dict.fromkeys(refused, error))
                break
        if not failed:
            return [ids[place] for place in range(len(given))]
        first = first_error(failed)
        if not ids:
            raise first
        raise PartlySentError([ids.get(place) for place in range(len(given))], failed) from first

    def _by_table(
        self, given: Sequence[NewMessage], places: Iterable[int], tables: Sequence[QueueTable]
    ) -> dict[QueueTable, list[int]]:
        """The places of messages by the queue on their shard."""
        grouped: dict[QueueTable, list[int]] = {}
        for place in places:
            message = given[place]
            # A message with the same deduplication id has to go to the shard of the first message.
            key = message.deduplication_id if message.key is None else message.key
            grouped.setdefault(self._shards.for_key(key, tables), []).append(place)
        return grouped

    # Receiving

    @checks_itself
    def receive(
        self, *, max_messages: int = 1, visibility_timeout: Duration | None = None, wait: Duration = 0.0
    ) -> list[Message]:
        """Receive up to `max_messages` (1 to 10,000; in order: 1,000) visible messages.

        If there are none, waits up to `wait` seconds for the first, without an open transaction. No other receiver gets
        them for `visibility_timeout` seconds, the queue's own by default. Choose a longer time than a batch takes. Over
        several shards, an error of a shard is raised only if the others have no message.
        """
        check_whole("max_messages", max_messages, least=1, most=MAX_MESSAGES)
        seconds = seconds_of("visibility_timeout", visibility_timeout)
        deadline = time.monotonic() + check_seconds("wait", wait, zero=True)
        found = self._take(max_messages, seconds)
        if found or not wait:
            return found

        wake = Wake()
        with ExitStack() as subscriptions:
            subscriptions.callback(self.subscribe(wake.set))
            while True:
                wake.clear()
                found = self._take(max_messages, seconds)
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                wake.wait(min(left, self.pause()))

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` upon new messages, from another thread; gives a function that ends this.

        Messages that are sent in callers' transactions, or become visible by themselves, come without a call: see
        `pause`.
        """
        with ExitStack() as subscriptions:
            for table in self._shards.all():
                if table.listener is not None:
                    subscriptions.callback(table.listener.subscribe(QUEUE, self.name, callback))
            return subscriptions.pop_all().close

    def pause(self) -> float:
        """Seconds after which a receiver that waits looks again, even without a notification: 1 at most."""
        dues = self._shards.each(self._shards.all(), QueueTable.due)
        return max(0.01, min([POLL_SECONDS, *(due for due in dues if due is not None)]))

    @contextmanager
    def transaction(self, message: Message) -> Iterator[Connection]:
        """A transaction on the database of a message, for its effects and its acknowledgement."""
        with ExitStack() as transaction:
            # The work of the transaction may find another database down.
            with self._shards.holding(message) as table:
                connection = transaction.enter_context(table.database.transaction())
            yield connection

    def _take(self, most: int, seconds: float | None) -> list[Message]:
        tables = self._shards.all()
        if len(tables) > 1:
            random.shuffle(tables)
        found: list[Message] = []
        failures: dict[str, DatabaseError] = {}
        for table in tables:
            if not (room := most - len(found)):
                break
            try:
                with self._shards.using(table):
                    found += table.take(min(room, MAX_IN_ORDER) if table.known().ordered else room, seconds)
            except DatabaseError as error:
                # Messages that another shard gives must reach their receiver.
                failures[table.shard or ""] = error
        if failures and not found:
            raise next(iter(failures.values()))
        for shard, failure in failures.items():
            logger.warning("nothing was received from queue %r on shard %r: %s", self.name, shard, failure)
        return found

    # Settling

    @checks_itself
    def acknowledge(self, message: Message, *, connection: CallersConnection | None = None) -> None:
        """Delete a message whose work is done; with `connection`, when the caller's transaction commits.

        After its visibility timeout, a message can still be acknowledged until somebody receives it again. Raises
        `MessageNotFoundError` after that, or if it was acknowledged or released before. For an ordered queue, raises
        `ValidationError`, with nothing done, in a transaction above READ COMMITTED.
        """
        check_kind("message", message, Message)
        self._acknowledge([[message]], connection)

    @checks_itself
    def acknowledge_all(self, messages: Iterable[Message], *, connection: CallersConnection | None = None) -> None:
        """Acknowledge messages together, all or none; over several shards, all of a shard or none.

        Raises as `acknowledge`; `ids` of the `MessageNotFoundError` are the messages that are not held any more.
        """
        check_several("messages", messages)
        grouped = by_shard(messages)
        if not grouped and connection is not None:
            self._shards.where(connection, [], self._shards.all())
        self._acknowledge(grouped, connection)

    def _acknowledge(self, grouped: Sequence[list[Message]], connection: CallersConnection | None) -> None:
        tables = [self._shards.of(held[0], connected=connection is not None) for held in grouped]
        for table, held in zip(tables, grouped, strict=True):
            with self._shards.using(table) if connection is None else nullcontext():
                table.acknowledge(held, connection)

    def release(self, message: Message, *, delay: Duration = 0.0, reason: str | None = None) -> None:
        """Give a message back, visible again after `delay` seconds, behind all visible messages.

        In an ordered queue, later messages of its key still wait for it. `reason` goes into its history. Raises
        `MessageNotFoundError` if this receipt does not hold it any more.
        """
        with self._shards.holding(message) as table:
            table.release(message, in_seconds(delay), reason)

    def release_failed(self, message: Message, *, delay: Duration, reason: str) -> str | None:
        """As `release`, for a message whose handler failed; gives the queue of dead letters if it moved there."""
        with self._shards.holding(message) as table:
            return table.fail(message, in_seconds(delay), reason)

    def give_back(self, messages: Iterable[Message]) -> None:
        """Release messages that nobody began to handle: their receive does not count towards `max_receives`.

        A message that is not held any more stays as it is. Messages of the other shards are given back before a shard
        that cannot be reached raises `DatabaseUnavailableError`; its own come back after their timeout.
        """
        failures: list[DatabaseError | ShardError] = []
        for held in by_shard(messages):
            try:
                with self._shards.holding(held[0]) as table:
                    table.give_back(held)
            except (DatabaseError, ShardError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def extend(self, message: Message, seconds: Duration) -> None:
        """Hold a message for `seconds` from now on. Raises `MessageNotFoundError` if it is not held any more."""
        with self._shards.holding(message) as table:
            if not table.extend([message], in_seconds(seconds)):
                raise table.not_found([message.id])

    def extend_all(self, messages: Iterable[Message], seconds: Duration) -> list[Message]:
        """Hold messages for `seconds` from now on. Gives the messages that are still held."""
        still: list[Message] = []
        for held in by_shard(messages):
            with self._shards.holding(held[0]) as table:
                ids = table.extend(held, in_seconds(seconds))
            still += [message for message in held if message.id in ids]
        return still

    # Looking after

    def peek(self, limit: int = 10) -> list[PeekedMessage]:
        """The messages that are next in turn, with their states, without receiving them."""
        found = list(chain(*self._shards.each(self._shards.all(), lambda table: QueueUpkeep(table).peek(limit))))
        # A blocked message has no time yet.
        found.sort(key=lambda message: (-message.priority, message.visible_at is None, message.visible_at))
        return found[:limit]

    def purge(self) -> int:
        """Delete the messages of the queue, also those in flight, and give their number.

        Messages that are sent, received or acknowledged at that moment may stay. Dead letters stay. Raises
        `DatabaseBusyError` if a transaction that acknowledges messages of an ordered queue does not end for 10 s.
        """
        purged = 0
        for table in self._shards.all():
            with self._shards.using(table):
                purged = QueueUpkeep(table).purge(purged)
        return purged

    def count_of_keys(self, keys: Collection[str]) -> ErasedMessages:
        """Count the messages that `erase` would delete."""
        wanted = check_keys(keys)
        counted = self._shards.each(self._needed(), lambda table: QueueUpkeep(table).count_of_keys(wanted))
        return sum(counted, ErasedMessages(0, 0, 0))

    def erase(self, keys: Collection[str]) -> ErasedMessages:
        """Delete the messages of keys, also those in flight, their dead letters and archived messages; count them.

        One call takes 1,000 keys at most, and needs all shards. A message stays if a transaction receives or
        acknowledges it at that moment, or if it is sent or redriven meanwhile: `count_of_keys` counts these messages,
        and another call deletes them. Deduplication ids stay until their window ends. Raises `QueueNotFoundError`,
        `PermissionDeniedError` if the role is not the admin, and `DatabaseBusyError` if a transaction that acknowledges
        messages of these keys does not end for 10 s.
        """
        wanted, erased = check_keys(keys), ErasedMessages(0, 0, 0)
        for table in self._needed():
            with self._shards.using(table):
                erased = QueueUpkeep(table).erase(wanted, erased)
        return erased

    def delete(self, *, force: bool = False) -> None:
        """Delete the queue; `force` also deletes its messages, those in flight too, and its archive.

        Its dead letters stay where they are, and cannot be redriven any more. Programs that go on using the queue get
        `QueueNotFoundError`, and its workers end; a new `Queue` of this name makes another queue. Over several shards,
        all of them are needed; if this call stops in between, call it again to complete it.

        Raises `QueueNotFoundError`, and `QueueInUseError` if another queue moves its dead letters to it, or, without
        `force`, if it has messages, dead letters or an archive. Raises `DatabaseBusyError` while transactions that have
        used queues do not end; with `force`, the queue is empty by then. A transaction above READ COMMITTED that began
        before may still send to the queue: that message is lost.
        """
        self.check_deletable(force=force)
        self._shards.each(self._existing(), lambda table: QueueUpkeep(table).delete(force=force))

    def check_deletable(self, *, force: bool = False) -> None:
        """Raise as `delete` if it would refuse the queue."""
        self._shards.each(self._needed(), lambda table: QueueUpkeep(table).check_deletable(force=force))

    def _existing(self) -> list[QueueTable]:
        tables = self._shards.every()
        found = self._shards.each(tables, QueueTable.existing)
        return [table for table, definition in zip(tables, found, strict=True) if definition is not None]

    def _needed(self) -> list[QueueTable]:
        """The queue on each shard. Raises `QueueNotFoundError` if no shard has it."""
        if queues := self._existing():
            return queues
        raise QueueNotFoundError(f"there is no queue {self.name!r}: `eventsql queue list` shows the queues")

    def redrive(self, limit: int | None = None, *, ids: Iterable[int] | None = None) -> int:
        """Move dead letters of this queue back to it, at most `limit`, the oldest first, and give their number.

        `ids` chooses messages of the queue of dead letters. Their receives begin anew, and their history goes on. A
        dead letter that somebody holds stays. Several shards move their dead letters one after the other. Raises
        `MessageNotFoundError`, with nothing done, if some of `ids` are not dead letters of this queue; the error's
        `ids` name them. Raises `ShardError`, with nothing done, for an id that dead letters of several shards have, and
        `DatabaseBusyError` if a transaction that acknowledges dead letters of an ordered queue does not end for 10 s.
        """
        tables = self._shards.all()
        chosen = None if ids is None else list(ids)
        if chosen is not None:
            self.check_dead_letters(chosen)
        redriven = 0
        for table in tables:
            with self._shards.using(table):
                redriven = QueueUpkeep(table).redrive(limit, chosen, redriven)
        return redriven

    def check_dead_letters(self, ids: Iterable[int]) -> None:
        """Raise as `redrive` if it would refuse these ids."""
        chosen = list(ids)
        found = self._shards.each(self._shards.all(), lambda table: QueueUpkeep(table).dead_letters(chosen))
        known = Counter(chain(*found))
        if unknown := [number for number in dict.fromkeys(chosen) if number not in known]:
            raise MessageNotFoundError(
                f"queue {self.name!r} has no dead letter {', '.join(map(str, unknown))}: `eventsql queue describe` "
                "names its queue of dead letters, and `eventsql queue peek` lists the messages of a queue",
                ids=unknown,
            )
        if several := [number for number in known if known[number] > 1]:
            raise ShardError(f"dead letter {min(several)} of queue {self.name!r} is on several shards: {ONE_SHARD}")

    def statistics(self) -> QueueStatistics:
        """Count the queue's messages by state. The time grows with their number."""
        found = self._shards.each(self._shards.all(), lambda table: QueueUpkeep(table).statistics())
        ages = [each.oldest for each in found if each.oldest is not None]
        waits = [each.waiting for each in found if each.waiting is not None]
        sent = [each.sent_per_second for each in found if each.sent_per_second is not None]
        acknowledged = [each.acknowledged_per_second for each in found if each.acknowledged_per_second is not None]
        return QueueStatistics(
            self.name,
            visible=sum(each.visible for each in found),
            in_flight=sum(each.in_flight for each in found),
            delayed=sum(each.delayed for each in found),
            blocked=sum(each.blocked for each in found),
            dead=sum(each.dead for each in found),
            oldest=max(ages, default=None),
            waiting=max(waits, default=None),
            sent_per_second=sum(sent) if sent else None,
            acknowledged_per_second=sum(acknowledged) if acknowledged else None,
        )

    def archived(self, limit: int = 100) -> list[ArchivedMessage]:
        """The messages that were acknowledged last, the latest first, of a queue with a `retention`."""
        found = self._shards.each(self._shards.all(), lambda table: QueueUpkeep(table).archived(limit))
        return sorted(chain(*found), key=lambda message: message.acknowledged_at, reverse=True)[:limit]

    def depth(self) -> QueueDepth:
        """Count the messages that can be received now, and the others."""
        counted = self.statistics()
        return QueueDepth(counted.visible, counted.depth - counted.visible)


def _bare(body: bytes) -> NewMessage:
    check_kind("an item of messages", body, NewMessage | bytes)
    return NewMessage(body)
