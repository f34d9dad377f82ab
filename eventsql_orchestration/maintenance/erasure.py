"""Erasure: the values and metadata of a key's events are removed, as a person may demand; their offsets stay.

An erasure changes stored events a range at a time, each in a transaction of its own, while publishers, transfers and
consumers go on. It looks where events are stored, in the order in which events move: the staged blocks, the buffer, the
log, the dead letters. Copies move the other way, too: a consumer makes dead letters, and a redrive publishes them
again. Both hold a lock while they copy, so an erasure waits for them and looks again until it finds nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeAlias, TypeVar

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.dead_letter_values import KEPT_WHEN_ERASED
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.load import too_much
from eventsql_orchestration.database.rows import fetch_one, query_all
from eventsql_orchestration.database.sessions import let_last
from eventsql_orchestration.errors import DatabaseBusyError, ValidationError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, ERASED, MAX_KEY_BYTES
from eventsql_orchestration.publishing.copy_format import EncodedEvent
from eventsql_orchestration.publishing.staged_blocks import StagedBlocks
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.erasing import LogEraser, await_copies, try_change, vacuum
from eventsql_orchestration.storage.reading import MAX_OFFSET, LogReader
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import check_name, check_text

_Given = TypeVar("_Given")
_Change: TypeAlias = Callable[[Connection], Counter[str]]

_ONLY_MARKED: Final = re.compile(re.escape(ERASED.encode()) + rb'"[0-9TZ:-]{20}"\}')
"""The metadata of an event that was erased, and has no metadata of another."""

MOST_KEYS: Final = 1_000
"""The most keys of one call: they are looked for together."""

RANGE_IDS: Final = 100_000
"""Ids that one transaction looks at. Rows are locked for as long, 0.1 to 0.5 s."""

BUFFERED_ROWS: Final = 20_000
"""Events of the buffer that one transaction looks at. The transfer of the topic waits meanwhile."""

FAILURES: Final = 1_000
"""Failed deliveries whose events are read at once."""

LOCK_SECONDS: Final = 2
"""Seconds that an attempt waits for other transactions. Later transactions may wait behind it."""

RETRY_SECONDS: Final = 30.0
"""Seconds for which a step is tried again if other transactions are in its way."""

MOST_ROUNDS: Final = 10
"""Maximum number of times that an erasure looks for events that were copied meanwhile."""

KEPT_DAYS: Final = 3_650
"""How long the record of an erasure is kept."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """The events of some keys that are erased, or would be: in the log, in the buffer or staged, and dead letters.

    `vacuumed` is False if former versions of their rows may stay on the disk until the next vacuum: the role does not
    own the tables, or an open transaction or a standby's query sees these rows. Let the owner run VACUUM (ANALYZE) when
    these have ended. Another erasure vacuums only the tables that it changes.
    """

    topic: str
    keys: int
    events: int
    buffered: int
    dead_letters: int
    vacuumed: bool = False


@dataclass(frozen=True, slots=True)
class ErasureRecord:
    """The record of an erasure: of which key, when, by which role of the database, and for whom.

    `key_digest` is the SHA-256 of the key, in hexadecimal. `finished_at` is None if the erasure was interrupted: run it
    again. `shard` is set if several shards are listed together.
    """

    topic: str
    key_digest: str
    started_at: datetime
    finished_at: datetime | None
    role: str
    requested_by: str | None
    events: int
    buffered: int
    dead_letters: int
    shard: str | None = None


def digest_of(key: str) -> str:
    """The SHA-256 of a key in hexadecimal, as records of erasures have it."""
    return hashlib.sha256(key.encode()).hexdigest()


@checked
class Eraser:
    """Erases the events of keys in one database, and lists what was erased."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._queries = Queries("erasures", database.schema)

    def plan(self, topic: str, keys: Collection[str]) -> Erasure:
        """See `ClusterEraser.plan`."""
        wanted = check_keys(keys)
        run = _Run(self._database, self._names(topic), wanted)
        with self._database.errors(), self._database.dedicated() as connection:
            for name in run.names:
                run.visit(connection, name, execute=False)
        return run.result()

    def execute(self, topic: str, keys: Collection[str], *, requested_by: str | None = None) -> Erasure:
        """See `ClusterEraser.execute`."""
        wanted = check_keys(keys)
        if requested_by is not None:
            check_name("requested_by", requested_by)
        run = _Run(self._database, self._names(topic), wanted)
        with self._database.errors(), self._database.dedicated() as connection, self._database.dedicated() as holder:
            # The lock has to span several transactions, so a transaction of another connection holds it. With a pooler,
            # the lock of a session would stay in a server process that the next client gets.
            with holder.transaction():
                run.hold(holder)
                run.begin(connection, requested_by)
                run.erase(connection)
                if self._names(topic) != run.names:
                    raise DatabaseBusyError(f"topic {topic!r} got a dead letter topic meanwhile: run the erasure again")
                # Vacuum before the record is finished: if the erasure is interrupted here, the next run vacuums.
                vacuumed = run.vacuum(connection)
                # Raises if the session that keeps other programs away was ended: a compaction may have moved events
                # meanwhile.
                holder.execute("SELECT")
                run.finish(connection)
            return replace(run.result(), vacuumed=vacuumed)

    def records(self, topic: str | None = None, *, key: str | None = None, limit: int = 100) -> list[ErasureRecord]:
        """See `ClusterEraser.records`."""
        values = {"topic": topic, "digest": None if key is None else digest_of(key), "limit": limit}
        return [ErasureRecord(*row) for row in query_all(self._database, self._queries("list"), values)]

    def _names(self, topic: str) -> list[str]:
        """The topic, its dead letter topic, and so on. Raises `TopicNotFoundError`."""
        names = [self._registry.topic(topic).name]
        known = {each.name for each in self._registry.topics()}
        while (letters := names[-1] + DEAD_LETTER_SUFFIX) in known:
            names.append(letters)
        return names


class _Run:
    """One plan or execution: the events of `keys` in the topic `names[0]` and in its dead letter topics."""

    def __init__(self, database: Database, names: Sequence[str], keys: frozenset[str]) -> None:
        self.names = names
        self._schema = database.schema
        self._digests = {key: digest_of(key) for key in keys}
        self._encoded = {key.encode() for key in keys}
        now = datetime.now(UTC)
        self._mark = f'{ERASED}"{now:%Y-%m-%dT%H:%M:%SZ}"'
        self._erasers = {
            name: LogEraser(self._schema, name, keys, self._mark, kept=KEPT_WHEN_ERASED if number else ())
            for number, name in enumerate(names)
        }
        self._staged = StagedBlocks(self._schema)
        self._records = Queries("erasures", self._schema)
        self._counts: Counter[str] = Counter()
        self._looked_at: dict[str, int] = {}
        self._range_ids, self._buffered_rows = RANGE_IDS, BUFFERED_ROWS
        self._resumed = False
        self._changed: dict[str, list[tuple[int, int]]] = {name: [] for name in names}

    def result(self) -> Erasure:
        counts = self._counts
        return Erasure(self.names[0], len(self._digests), counts["events"], counts["buffered"], counts["letters"])

    # The record

    def hold(self, holder: Connection) -> None:
        """Keep other erasures of these topics away until the transaction of `holder` ends."""
        retry = Backoff(RETRY_SECONDS)
        while not all(try_change(holder, self._schema, name) for name in self.names):
            if not retry.lasts():
                raise DatabaseBusyError(
                    f"an erasure or a compaction of topic {self.names[0]!r} is under way: try again when it has ended"
                )
        # The statement has no parameters, so it closes the earlier statement, whose snapshot would hold VACUUM back.
        let_last(holder)

    def begin(self, connection: Connection, requested_by: str | None) -> None:
        values = {"topic": self.names[0], "digests": sorted(self._digests.values()), "requested_by": requested_by}
        began = connection.execute(self._records("begin"), values).rowcount
        # An interrupted erasure changed rows that this erasure will not find.
        self._resumed = began < len(self._digests)

    def _note(self, connection: Connection, column: str, counts: Mapping[str, int]) -> None:
        """Add to the records, in the transaction that erases."""
        digests = [self._digests[key] for key in counts]
        none = dict.fromkeys(("events", "buffered", "letters"), [0] * len(digests))
        values = {"topic": self.names[0], "digests": digests, **none, column: list(counts.values())}
        connection.execute(self._records("count"), values)

    def finish(self, connection: Connection) -> None:
        values = {"topic": self.names[0], "digests": list(self._digests.values())}
        connection.execute(self._records("finish"), values)

    # Erasing

    def erase(self, connection: Connection) -> None:
        """Erase everywhere, until a round finds no event that was copied meanwhile."""
        for name in self.names:
            # Retention may also attach such a segment again. A segment that is there can be visited.
            self._check_leaving(connection, name)
        for _ in range(MOST_ROUNDS):
            before = self._counts.total()
            for name in self.names:
                for each in self.names:
                    self._step(connection, partial(await_copies, schema=self._schema, topic=each))
                self.visit(connection, name, execute=True)
            if self._counts.total() == before:
                break
            self._erasers[self.names[0]].only_copies()
        else:
            raise DatabaseBusyError(
                f"dead letters of these keys of topic {self.names[0]!r} come as fast as they are erased: pause the "
                "topic's consumers, and run the erasure again"
            )
        for name in self.names:
            self._clear_failures(connection, name)
            self._check_leaving(connection, name)

    def visit(self, connection: Connection, name: str, *, execute: bool) -> None:
        """Count or erase the events in staged blocks, in the buffer, and in the log: they move in this order."""
        eraser = self._erasers[name]
        log_form.form_now(connection, self._schema, name)
        waiting, stored = ("buffered", "events") if name == self.names[0] else ("letters", "letters")

        for attempt, position in self._staged.of_topic(connection, name):
            repack = self._staged.erase if execute else self._staged.count
            step = partial(repack, attempt=attempt, position=position, erased=self._erased)
            self._apply(connection, name, waiting, step, execute=execute, hold=True)

        change_buffered = eraser.erase_buffered if execute else eraser.count_buffered
        change_stored = eraser.erase if execute else eraser.count

        def visit_buffered(after: int, upto: int) -> None:
            step = partial(change_buffered, after=after, upto=upto)
            self._apply(connection, name, waiting, step, execute=execute, hold=True)

        def visit_stored(after: int, upto: int) -> None:
            step = partial(change_stored, after=after, upto=upto)
            if self._apply(connection, name, stored, step, execute=execute, hold=False):
                self._changed[name].append((after, upto))

        after = 0
        while (end := eraser.buffered_end(connection, after=after, limit=self._buffered_rows)) is not None:
            if _in_parts(after, end, visit_buffered):
                self._buffered_rows = max(1, self._buffered_rows // 2)
            after = end

        for start, upto in self._ranges(connection, eraser, name):
            if _in_parts(start, upto, visit_stored):
                self._range_ids = max(1, self._range_ids // 2)

    def _ranges(self, connection: Connection, eraser: LogEraser, name: str) -> Iterator[tuple[int, int]]:
        """The ranges of ids to look at, up to the present end of the log. Events behind them are looked at later."""
        after = self._looked_at.get(name, 0)
        ends = eraser.ends(connection, after=after)
        if ends is None:
            return
        last = ends[1]
        while ends is not None and ends[0] <= last:
            # A segment that was closed early leaves a gap in the ids.
            after = ends[0] - 1
            upto = min(after + self._range_ids, last)
            yield after, upto
            ends = eraser.ends(connection, after=upto)
        self._looked_at[name] = last

    def _apply(
        self, connection: Connection, name: str, column: str, step: _Change, *, execute: bool, hold: bool
    ) -> int:
        """Count or change a part, and record a change in its transaction. Gives the number of events.

        With `hold`, the topic's transfer waits meanwhile: it would lock the same rows in another order.
        """
        if not execute:
            found = step(connection)
        else:

            def change(connection: Connection) -> Counter[str]:
                if hold:
                    connection.execute(Queries("log", self._schema)("await_topic"), {"topic": name})
                changed = step(connection)
                if changed:
                    self._note(connection, column, changed)
                return changed

            found = self._step(connection, change)
        self._counts[column] += found.total()
        return found.total()

    def _step(self, connection: Connection, step: Callable[[Connection], _Given]) -> _Given:
        """Run a step in a transaction; repeat it if other transactions are in its way. Raises `DatabaseBusyError`."""
        retry = Backoff(RETRY_SECONDS)
        while True:
            try:
                with connection.transaction():
                    # The server's limit of a statement must not end a wait for other transactions.
                    fetch_one(connection, self._records("limit_waits"), {"most": LOCK_SECONDS * 1_000})
                    return step(connection)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
                if not retry.lasts():
                    raise DatabaseBusyError(
                        f"other transactions hold events of topic {self.names[0]!r}: run the erasure again for the rest"
                    ) from error

    def _erased(self, event: EncodedEvent) -> EncodedEvent:
        """The erased form of an event of a staged block; the event itself if it is not to be erased."""
        if event.key not in self._encoded:
            return event
        if _ONLY_MARKED.fullmatch(event.metadata) and not event.value:
            return event
        return event._replace(value=b"", metadata=f"{self._mark}}}".encode())

    # After the events

    def _clear_failures(self, connection: Connection, name: str) -> None:
        eraser, log = self._erasers[name], LogReader(self._schema)
        # Deliveries first: a consumer's row gets its text from a delivery.
        failed = eraser.failed_deliveries(connection)
        for start in range(0, len(failed), FAILURES):
            found = log.read_ids(connection, name, failed[start : start + FAILURES])
            if erased := [event.id for event in found if event.erased]:
                self._step(connection, partial(eraser.replace_failures_of_deliveries, events=erased))
        # A process may have read a text before it was replaced, and not have written it into the consumer's row yet.
        self._step(connection, partial(await_copies, schema=self._schema, topic=name))

        last = MAX_OFFSET if self._resumed else max((upto for _, upto in self._changed[name]), default=0)
        for consumer, partition, event in eraser.failures(connection):
            # The failure of a range is noted at its first event, and may quote any other event of it.
            if event <= last or any(each.erased for each in log.read(connection, name, after=event - 1, upto=event)):
                replace_failure = partial(eraser.replace_failure, consumer=consumer, partition=partition, event=event)
                self._step(connection, replace_failure)

    def _check_leaving(self, connection: Connection, name: str) -> None:
        """Wait for retention to drop the segments that it has taken out of the log. Raises `DatabaseBusyError`."""
        retry = Backoff(RETRY_SECONDS)
        while leaving := self._erasers[name].leaving(connection):
            if not retry.lasts():
                raise DatabaseBusyError(
                    f"{', '.join(leaving)} left the log of topic {name!r} and may have events of these keys: let "
                    f"`eventsql topic retain {name} --execute` end that, and erase again"
                )

    def vacuum(self, connection: Connection) -> bool:
        """Remove the former versions of changed rows from the disk. False if some may stay."""
        tables: list[str] = []
        for name, ranges in self._changed.items():
            tables += self._erasers[name].changed_tables(connection, [(0, MAX_OFFSET)] if self._resumed else ranges)
        return vacuum(connection, self._schema, tables)


def _in_parts(after: int, upto: int, visit: Callable[[int, int], None]) -> bool:
    """Visit a range of ids. Halve it if it is too much for the server, for example for its `statement_timeout`.

    Gives whether it was too much.
    """
    try:
        visit(after, upto)
    except psycopg.Error as error:
        if upto - after <= 1 or not too_much(error):
            raise
        middle = (after + upto) // 2
        _in_parts(after, middle, visit)
        _in_parts(middle, upto, visit)
        return True
    return False


def prune_records(connection: Connection, schema: str) -> None:
    """Delete the records of erasures that finished and began more than `KEPT_DAYS` ago."""
    connection.execute(Queries("erasures", schema)("prune"), {"days": KEPT_DAYS})


def check_keys(keys: Collection[str]) -> frozenset[str]:
    """The keys of an erasure. Raises `ValidationError`."""
    if isinstance(keys, str) or not keys:
        raise ValidationError("there are no keys to erase: give a list of keys, one at least")
    if len(keys) > MOST_KEYS:
        raise ValidationError(f"{len(keys)} keys are too many for one erasure: give {MOST_KEYS} at most")
    return frozenset(check_text("key", key, most=MAX_KEY_BYTES) for key in keys)
