"""A topic consumed as a queue: each event is handed out, acknowledged and tried again by itself.

A partition's cursor says up to which id its events were handed out. `consumer_delivery` has a row for each handed-out
event that is not acknowledged, and the consumer's offset is the last id before the first of these events. The
consumer's row is locked only to hand out a block of events; an acknowledgement deletes a row.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from time import monotonic
from typing import Final

import psycopg

from eventsql_orchestration.consuming.batch import matching
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.dead_letter_values import NEVER, DeadLetterCause, describe
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.delivery import Cursor, Delivery, Fresh, HandOut, Standing, arrays, number_of_key
from eventsql_orchestration.consuming.failures import MAX_BACKOFF, backoff_after, without_letter
from eventsql_orchestration.consuming.handlers import EventHandler, call_handler
from eventsql_orchestration.consuming.partition import ConsumerPartition, LockedPartition, lock
from eventsql_orchestration.consuming.tracebacks import logger_of_errors
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.load import too_much
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, query_all
from eventsql_orchestration.database.sessions import read_committed, wait_at_most
from eventsql_orchestration.errors import ClaimLostError, DatabaseBusyError, DatabaseError, RedefinitionError
from eventsql_orchestration.model import Event, how_often
from eventsql_orchestration.storage.erasing import FAILURE, copy_events, erased_meanwhile
from eventsql_orchestration.storage.reading import BATCH_BYTES, LogReader, bytes_of
from eventsql_orchestration.threads import log_recovery
from eventsql_orchestration.validation import counted

logger = logger_of_errors(__name__)

OWNER: Final = "start_queue, with events that are not acknowledged"
"""The owner of the lease of a partition with events that are not acknowledged. The lease keeps other ways of consuming
away: they would repeat the acknowledged events after the offset."""

LOCK_SECONDS: Final = 3.0
"""The most seconds of three waits: after a move of the consumer, for the process's handlers of earlier events; for an
event whose lost connection the server has not missed yet; in the last call of a process, for a locked partition."""

MOST_WAITING: Final = 10_000
"""The most events that wait for a database, and whose wait grows."""

LASTING_SECONDS: Final = 2 * MAX_BACKOFF
"""An error that such an event meets again after more seconds than this is a new line in the log: another process may
have handled the events that this process has seen waiting."""


class WorkerLostError(ClaimLostError):
    """Internal: this process did not renew its lease in time, and another process has ended it."""


class LostHandOutError(ClaimLostError):
    """Internal: the database went back to a state from before it handed events out to this process.

    Other events may get the ids of these events.
    """


def unattended(database: Database) -> list[tuple[str, str, int]]:
    """Consumers whose processes ended and left events: topic, name, and the number of partitions with such events.

    A process that was killed may have acknowledged all of its events, and not have moved the offset.
    """
    return query_all(database, Queries("deliveries", database.schema)("unattended"), {"owner": OWNER}, prepare=False)


def _consumed_otherwise(locked: LockedPartition) -> bool:
    return locked.leased and locked.state.lease_owner != OWNER


class Deliveries:
    """The deliveries of one consumer, in its database."""

    def __init__(
        self, database: Database, dead_letters: DeadLetters, topic: str, consumer: str,
        *, by_key: bool, lease: float, most: int,
    ) -> None:  # fmt: skip
        """`lease` is in seconds; `most` is the most events of a partition that are not acknowledged."""
        self._database = database
        self._dead_letters = dead_letters
        self._topic = topic
        self._consumer = consumer
        self._name = f"consumer {consumer!r} of topic {topic!r}"
        self._own = {"topic": topic, "consumer": consumer}
        self._by_key = by_key
        self._lease = lease
        self._most = most
        self._queries = Queries("deliveries", database.schema)
        self._consumers = Queries("log", database.schema)
        self._log = LogReader(database.schema)
        self._waiting: OrderedDict[tuple[int, int], float] = OrderedDict()
        """Since when events of cursors have met errors that are no failures of theirs."""
        self._told: tuple[str, float] | None = None
        """The last of these errors, and when it was met; None after one of these events was handled."""

    # The process

    def register(self, name: str) -> int:
        """Begin a lease; gives the number of this process. Raises `RedefinitionError` for a changed `by_key`."""
        with self._database.connection() as connection:
            self._check_order(connection)
            values = {**self._own, "name": name, "lease": self._lease}
            with read_committed(connection):
                (worker,) = fetch_one(connection, self._queries("register"), values, prepare=False)
            return int(worker)

    def renew(self, worker: int) -> bool:
        """Prolong a lease; gives whether it is still there."""
        values = {"worker": worker, "lease": self._lease}
        with self._database.urgent() as connection, read_committed(connection):
            return fetch_first(connection, self._queries("renew"), values, prepare=False) is not None

    def leave(self, worker: int) -> None:
        """End a lease. The events that the process holds may be handed out again at once."""
        with self._database.connection() as connection, read_committed(connection):
            connection.execute(self._queries("leave"), {"worker": worker}, prepare=False)

    def _check_order(self, connection: Connection) -> None:
        (other,) = fetch_one(
            connection, self._queries("other_order"), {**self._own, "by_key": self._by_key}, prepare=False
        )
        if other:
            raise RedefinitionError(
                f"{self._name} has events that are not acknowledged and were handed out with "
                f"by_key={not self._by_key}: start it with by_key={not self._by_key} until all are acknowledged, or "
                "move it with `eventsql seek --execute --force`"
            )

    # Handing out

    def hand_out(self, worker: int, partition: int, limit: int, known: Collection[Delivery] = ()) -> HandOut:
        """Hand out at most `limit` events of a partition, and move its offset past the acknowledged events.

        `known` are the events of the partition that this process has. Raises `WorkerLostError` if the lease has ended,
        `LostHandOutError` if the database has not handed out all of `known`, and `RedefinitionError` as `register`.
        """
        while True:
            try:
                with self._database.transaction() as connection:
                    return self._hand_out(connection, worker, partition, limit, known)
            except (psycopg.Error, DatabaseError, MemoryError) as error:
                if limit <= 1 or not too_much(error):
                    raise
                limit //= 2

    def _hand_out(
        self, connection: Connection, worker: int, partition: int, limit: int, known: Collection[Delivery]
    ) -> HandOut:
        locked = lock(connection, self._consumers, self._key(partition), wait=False)
        if locked is None or locked.state.paused or _consumed_otherwise(locked):
            return HandOut((), taken=False)
        renewed = {"worker": worker, "lease": self._lease}
        if fetch_first(connection, self._queries("renew"), renewed, prepare=False) is None:
            raise WorkerLostError(f"{locked.key}: the lease of this process has ended")
        cursor, own, standing = self._open(connection, locked, worker)
        if any(each.cursor == cursor.number and each.event.id > cursor.claimed_upto for each in known):
            raise LostHandOutError(f"{locked.key}: the database has lost events that it had handed out")
        freed, full = self._take_free(connection, locked, own, limit) if standing.free else ([], False)

        room = 0 if full else min(limit - len(freed), self._most - standing.unacknowledged)
        events, more = self._read(connection, locked, cursor, room)
        others = self._held_keys(connection, own) if events and standing.not_own else set()
        fresh = [Fresh(event, key, key not in others) for event, key in self._keyed(locked, events)]
        self._deliver(connection, fresh, own)

        upto = events[-1].id if events else cursor.claimed_upto
        held = self._settle(connection, locked, cursor, standing, claimed_upto=upto, fresh=fresh)

        deliveries = [*freed, *((each.event, each.key, 0) for each in fresh if each.own)]
        return HandOut(
            [Delivery(cursor.number, worker, partition, *each, locked.state.max_attempts) for each in deliveries],
            more=more or full or len(deliveries) >= limit,
            others=standing.not_own > len(freed) or len(deliveries) < len(freed) + len(fresh),
            held=held,
            own=standing.unacknowledged - standing.not_own,
            due_in=standing.due_in,
        )

    def move_offset(self, worker: int, partition: int) -> None:
        """Move a partition's offset past the acknowledged events, even for a paused consumer, or after the lease's end.

        It is the last call of a process; without it, the partition's lease would stay. Waits while another transaction
        has the partition locked. Raises `DatabaseBusyError` if that takes too long, and `RedefinitionError` as
        `register`.
        """
        with self._database.transaction() as connection:
            wait_at_most(connection, LOCK_SECONDS)
            locked = lock(connection, self._consumers, self._key(partition), wait=True)
            if locked is None or _consumed_otherwise(locked):
                return
            cursor, _, standing = self._open(connection, locked, worker)
            self._settle(connection, locked, cursor, standing, claimed_upto=cursor.claimed_upto, fresh=())

    def _key(self, partition: int) -> ConsumerPartition:
        return ConsumerPartition(self._topic, self._consumer, partition)

    def _open(
        self, connection: Connection, locked: LockedPartition, worker: int
    ) -> tuple[Cursor, dict[str, int | str], Standing]:
        """The cursor of a locked partition, the values of its statements, and its events that are not acknowledged.

        Ends the leases of other processes that were not renewed in time.
        """
        connection.execute(self._queries("expire"), self._own, prepare=False)
        cursor = self._cursor(connection, locked)
        own: dict[str, int | str] = {
            **self._own, "cursor": cursor.number, "worker": worker, "offset": cursor.offset
        }  # fmt: skip
        return cursor, own, Standing(*fetch_one(connection, self._queries("standing"), own, prepare=False))

    def _cursor(self, connection: Connection, locked: LockedPartition) -> Cursor:
        values = {**locked.key.parameters(), "offset": locked.offset, "by_key": self._by_key}
        row = fetch_first(connection, self._queries("cursor"), values, prepare=False)
        if row is not None and Cursor(*row).offset != locked.offset:
            # Moved by another way of consuming or by a new layout. Handlers may still have events.
            wait_at_most(connection, LOCK_SECONDS)
            forgotten = {**self._own, "partitions": [locked.key.partition]}
            # `forget` alone would lock the rows in another order than acknowledgements do.
            for name in ("hold", "forget"):
                connection.execute(self._queries(name), forgotten, prepare=False)
            row = None
        if row is None:
            return Cursor(*fetch_one(connection, self._queries("open"), values, prepare=False))
        cursor = Cursor(*row)
        if cursor.by_key != self._by_key:
            self._check_order(connection)
        return cursor

    def _take_free(
        self, connection: Connection, locked: LockedPartition, own: dict[str, int | str], limit: int
    ) -> tuple[list[tuple[Event, int | None, int]], bool]:
        """Take over events that nobody holds, in the order of their keys: each with its key and its attempts.

        The event whose value makes `BATCH_BYTES` full is the last one; the second result is whether there is such an
        event.
        """
        keys = self._lock_free(connection, locked, own, limit)
        if not keys:
            return [], False
        wanted, events, size = sorted(keys), list[Event](), 0
        for event in self._log.read_ids(connection, self._topic, wanted, partition=locked.key.partition):
            events.append(event)
            size += bytes_of([event])
            if size >= BATCH_BYTES:
                wanted = [each for each in wanted if each <= event.id]
                break
        taken = fetch_all(connection, self._queries("take"), {**own, "ids": wanted}, prepare=False)
        attempts: dict[int, int] = dict(taken)
        chosen = matching(locked.state.filter, events)
        if gone := attempts.keys() - {event.id for event in chosen}:
            logger.warning("%s: %d unhandled events left the log, or do not match the filter", locked.key, len(gone))
            connection.execute(self._queries("drop"), {**own, "ids": list(gone)}, prepare=False)
        return [(event, keys[event.id], attempts[event.id]) for event in chosen], size >= BATCH_BYTES

    def _lock_free(
        self, connection: Connection, locked: LockedPartition, own: dict[str, int | str], limit: int
    ) -> dict[int, int | None]:
        """Lock events that nobody holds, at most `limit`. Gives their keys by their ids."""
        accepts = self._dead_letters.accepts(self._topic, connection)
        asked = {**own, "after": own["offset"], "accepts": accepts, "max_attempts": locked.state.max_attempts}
        keys: dict[int, int | None] = {}
        waiting: set[int] = set()
        while missing := limit - len(keys):
            page = {**asked, "limit": missing, "chosen": list(keys)}
            found = fetch_all(connection, self._queries("free"), page, prepare=False)
            if not found:
                break
            ids = {**own, "ids": [event for event, _ in found]}
            lockable = {event for (event,) in fetch_all(connection, self._queries("lock_free"), ids, prepare=False)}

            for event, key in found:
                if event in lockable and key not in waiting:
                    keys[event] = key
                elif key is not None:
                    # The acknowledgement that is under way may still fail: nothing of its key may overtake it.
                    waiting.add(key)

            asked["after"] = found[-1][0]
            if len(found) < missing:
                break
        return keys

    def _read(
        self, connection: Connection, locked: LockedPartition, cursor: Cursor, room: int
    ) -> tuple[Sequence[Event], bool]:
        """The next events that were never handed out, and whether more of them may follow."""
        if room <= 0:
            return (), False
        return self._log.read_batch(
            connection, self._topic,
            partition=locked.key.partition, after=cursor.claimed_upto, upto=locked.upto, limit=room,
        )  # fmt: skip

    def _held_keys(self, connection: Connection, own: dict[str, int | str]) -> set[int | None]:
        """The keys of events that this process does not hold."""
        return {key for (key,) in fetch_all(connection, self._queries("held_keys"), own, prepare=False)}

    def _keyed(self, locked: LockedPartition, events: Sequence[Event]) -> Iterator[tuple[Event, int | None]]:
        for event in matching(locked.state.filter, events):
            yield event, number_of_key(event.key) if self._by_key and event.key is not None else None

    def _deliver(self, connection: Connection, fresh: Sequence[Fresh], own: dict[str, int | str]) -> None:
        """Note new events as handed out."""
        if fresh:
            rows = {
                "ids": [each.event.id for each in fresh], "keys": [each.key for each in fresh],
                "workers": [own["worker"] if each.own else None for each in fresh],
            }  # fmt: skip
            connection.execute(self._queries("deliver"), {**own, **rows}, prepare=False)

    def _settle(
        self, connection: Connection, locked: LockedPartition, cursor: Cursor, standing: Standing,
        *, claimed_upto: int, fresh: Sequence[Fresh],
    ) -> bool:  # fmt: skip
        """Note how far the partition is handed out and acknowledged; gives whether events are not acknowledged."""
        first = fresh[0].event.id if fresh else None
        lowest = first if standing.lowest is None else standing.lowest
        settled = {
            "upto": claimed_upto if lowest is None else lowest - 1, "claimed_upto": claimed_upto, "first": first,
            "unacknowledged": standing.unacknowledged + len(fresh),
            # Events that retention dropped count as consumed, too.
            "consumed": max(0, cursor.unacknowledged - standing.unacknowledged),
        }  # fmt: skip
        own = {"cursor": cursor.number}
        moved = {**own, **settled, "by_key": self._by_key}
        connection.execute(self._queries("move_cursor"), moved, prepare=False)

        held = settled["unacknowledged"] != 0
        if held and locked.state.lease_owner != OWNER:
            connection.execute(self._consumers("release_live_claim"), locked.key.parameters(), prepare=False)
        failure: Sequence[object] = (0, None, None)
        if standing.failed is not None:
            # The text may quote an event. An erasure that replaces it waits until it is copied.
            copy_events(connection, self._database.schema, self._topic)
            failed = {**own, "id": standing.failed}
            failure = fetch_first(connection, self._queries("failed"), failed, prepare=False) or failure
        noted = dict(zip(("attempts", "failure", "due_at"), failure, strict=True))
        noted["failed"] = standing.failed if noted["attempts"] else None
        lease = {"held": held, "owner": OWNER, "forever": NEVER}
        connection.execute(
            self._queries("settle"), {**locked.key.parameters(), **settled, **noted, **lease}, prepare=False
        )
        return held

    def give_back_others(self, worker: int, partition: int, known: Collection[Delivery]) -> None:
        """Give back what this process has of a partition, except the `known` deliveries."""
        values = {**self._key(partition).parameters(), **arrays(known), "worker": worker}
        with self._database.connection() as connection, read_committed(connection):
            connection.execute(self._queries("give_back_others"), values, prepare=False)

    # The end of a delivery

    def handle(self, delivery: Delivery, handler: EventHandler, cancellation: Cancellation) -> None:
        """Hand an event to a handler whose effects commit together with the acknowledgement.

        Raises `ClaimLostError` if another process has the event now, and the handler's error.
        """
        with self._database.transaction() as connection, cancellation.connection(connection):
            # Acknowledge first: nobody else takes the event while the handler runs, and a commit by the handler commits
            # the acknowledgement too.
            self._acknowledge_in(connection, delivery)
            with self._key(delivery.partition).held(connection, self._database.schema, "delivery"):
                call_handler(connection, delivery.event, handler)
        self._handled([delivery])

    def _acknowledge_in(self, connection: Connection, delivery: Delivery) -> None:
        values = {"cursor": delivery.cursor, "id": delivery.event.id, "worker": delivery.worker}
        if connection.execute(self._queries("acknowledge_one"), values, prepare=False).rowcount != 1:
            raise self._lost(delivery)

    def _lost(self, delivery: Delivery) -> ClaimLostError:
        return ClaimLostError(
            f"event {delivery.event.id} of topic {self._topic!r} is not this process's any more: its lease ended, or "
            f"consumer {self._consumer!r} was moved"
        )

    def acknowledge(self, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Acknowledge events in one transaction. Returns the events that this process still held."""
        with self._database.connection() as connection, read_committed(connection):
            rows = set(fetch_all(connection, self._queries("acknowledge"), arrays(deliveries), prepare=False))
        self._handled(deliveries)
        return {each for each in deliveries if (each.cursor, each.event.id, each.worker) in rows}

    def _handled(self, deliveries: Sequence[Delivery]) -> None:
        """Forget how long handled events have waited."""
        if not self._waiting:
            return
        waited = [self._waiting.pop((each.cursor, each.event.id), None) for each in deliveries]
        if self._told is not None and any(since is not None for since in waited):
            self._told = None
            log_recovery(logger, "%s goes on with %s", self._name, self._database)

    def _waited(self, delivery: Delivery) -> float:
        """The seconds since an event's first error that is no failure of it was noted; 0 before."""
        since = self._waiting.get((delivery.cursor, delivery.event.id))
        return 0.0 if since is None else monotonic() - since

    def _lasts(self, failure: str) -> bool:
        """Whether the log has an error of a waiting event already. Notes the error."""
        now, told = monotonic(), self._told
        self._told = failure, now
        return told is not None and told[0] == failure and now - told[1] <= LASTING_SECONDS

    def fail(self, delivery: Delivery, error: BaseException, *, counts: bool, behind: Collection[Delivery]) -> float:
        """Note that an event's handler failed, and give the events `behind` it back.

        Gives the seconds until the event is due again, 0 for a dead letter. A failure that does not count leaves the
        attempts as they are, and lets the event wait as long again as it has waited; the log has such an error once
        while it lasts. Raises `ClaimLostError` if another process has the event, `DatabaseBusyError` if others lock it.
        """
        attempts = delivery.attempts + (1 if counts else 0)
        failure, delay = describe(error), backoff_after(attempts)
        if not counts:
            delay = min(max(delay, self._waited(delivery)), MAX_BACKOFF)
        spent = counts and attempts >= delivery.max_attempts
        remedy = None
        if spent and not self._dead_letters.accepts(self._topic):
            remedy = (
                f"correct the handler and resume the consumer, or create topic {self._topic}_dlt to take such events"
            )
        elif spent:
            try:
                if self._bury(delivery, error, attempts):
                    return 0.0
                delay, remedy = NEVER, "correct the handler or the dead letter factory and resume the consumer"
            except (ClaimLostError, DatabaseBusyError):
                raise
            except Exception as problem:
                logger.exception("%s cannot give event %d up", self._name, delivery.event.id)
                failure = without_letter(failure, problem)

        shown: BaseException | None = error
        if self._note_failure(delivery, attempts=attempts, failure=failure, delay=delay, behind=behind):
            failure, shown = FAILURE, None
        if not counts:
            # Not before the database has taken the note: an event does not wait again for as long as it was away.
            self._waiting.setdefault((delivery.cursor, delivery.event.id), monotonic())
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
        if remedy is not None:
            logger.error(
                "%s keeps event %d back, which failed %s (%s); %s",
                self._name, delivery.event.id, how_often(attempts), failure, remedy, exc_info=shown,
            )  # fmt: skip
        else:
            attempted = f"attempt {attempts} of {delivery.max_attempts} failed" if counts else "no attempt is counted"
            lasts = not counts and self._lasts(failure)
            logger.log(
                logging.DEBUG if lasts else logging.WARNING, "%s will try event %d again in %.0f s (%s: %s)",
                self._name, delivery.event.id, delay, attempted, failure,
                exc_info=shown if counts and attempts == 1 else None,
            )  # fmt: skip
        return delay

    def _note_failure(
        self, delivery: Delivery, *, attempts: int, failure: str, delay: float, behind: Collection[Delivery]
    ) -> bool:
        """Let an event be due again after `delay` seconds, and give the events `behind` it back.

        Gives whether the event was erased meanwhile: texts may quote it.
        """
        values = {
            "cursor": delivery.cursor, "id": delivery.event.id, "worker": delivery.worker, "attempts": attempts,
            "failure": failure, "delay": delay,
        }  # fmt: skip
        with self._database.transaction() as connection:
            wait_at_most(connection, LOCK_SECONDS)
            erased = erased_meanwhile(connection, self._database.schema, delivery.event) is not None
            if erased:
                values["failure"] = FAILURE
            if connection.execute(self._queries("fail"), values, prepare=False).rowcount != 1:
                raise self._lost(delivery)
            if behind:
                connection.execute(self._queries("give_back"), arrays(behind), prepare=False)
        return erased

    def _bury(self, delivery: Delivery, error: BaseException, attempts: int) -> bool:
        """Publish an event's dead letter and acknowledge the event; gives whether one was made."""
        cause = DeadLetterCause.of(self._consumer, error, attempts)
        with self._database.transaction() as connection:
            wait_at_most(connection, LOCK_SECONDS)
            # Lock the consumer's row first, as a move of the consumer does.
            connection.execute(self._consumers("count_given_up"), self._key(delivery.partition).parameters())
            self._acknowledge_in(connection, delivery)
            erased = erased_meanwhile(connection, self._database.schema, delivery.event)
            buried = self._dead_letters.bury(connection, delivery.event, cause, erased=erased)
            if not buried:
                raise psycopg.Rollback
        if buried:
            logger.error(
                "%s gave event %d up after %s, as a dead letter: %s",
                self._name, delivery.event.id, counted(attempts, "attempt"),
                describe(error) if erased is None else FAILURE, exc_info=error if erased is None else None,
            )  # fmt: skip
        return buried
