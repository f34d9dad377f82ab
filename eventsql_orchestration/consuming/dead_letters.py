"""Dead letters: events that failed their consumer's last attempt, kept in the topic `{topic}_dlt`.

A dead letter has the key, value and metadata of its event and, in further metadata, why it is one (`dlt_*`). Redriven,
it becomes an event of its topic again: without `dlt_*`, in the partition that it came from, and traceable by

- `redriven_from`: the dead letter, as `topic:id`;
- `redriven_consumer`: the consumer that had given it up;
- `redriven_origin`: the event that was published first, as `topic:partition:id`, however often it was redriven since;
- `redriven_before`: the dead letters that it was redriven from before, oldest first, where there are any.

A letter that fails again keeps all of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from psycopg import sql
from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import DatabaseError, EventSQLError, TopicNotFoundError, ValidationError
from eventsql_orchestration.log.load import too_much
from eventsql_orchestration.log.publisher import Publisher
from eventsql_orchestration.log.reader import Reader
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.side_consumers import backfill_of
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, MAX_PARTITIONS, ConsumerState, Event, Publication, Topic
from eventsql_orchestration.rules import NO_METADATA, check_metadata, check_range, check_text, check_whole, shown
from eventsql_orchestration.sharding import ANYWHERE

CONSUMER: Final = "dlt_consumer"
EXCEPTION: Final = "dlt_exception"
MESSAGE: Final = "dlt_message"
ATTEMPTS: Final = "dlt_attempts"
SOURCE_TOPIC: Final = "dlt_topic"
SOURCE_PARTITION: Final = "dlt_partition"
SOURCE_OFFSET: Final = "dlt_offset"
BACKFILL: Final = "dlt_backfill"
"""The id of the backfill whose side consumer gave the event up."""

_CAUSE: Final = frozenset({
    CONSUMER, EXCEPTION, MESSAGE, ATTEMPTS, SOURCE_TOPIC, SOURCE_PARTITION, SOURCE_OFFSET, BACKFILL,
})  # fmt: skip

REDRIVEN_FROM: Final = "redriven_from"
REDRIVEN_CONSUMER: Final = "redriven_consumer"
REDRIVEN_ORIGIN: Final = "redriven_origin"
REDRIVEN_BEFORE: Final = "redriven_before"

MAX_CHAIN: Final = 100
"""Letters that `redriven_before` names at most, the last ones: an event may be redriven for ever."""

MAX_MESSAGE_LENGTH: Final = 2_000

NEVER: Final = 100 * 365 * 86_400.0
"""Seconds after which an event that its factory makes no dead letter of is due again: not before somebody resumes."""

BATCH: Final = 1_000
"""Letters that are redriven in one transaction at most."""

BATCH_BYTES: Final = 32 * 1024 * 1024
"""The values of a batch together, so that a thousand large ones need not fit into memory; one letter always goes."""

_UNKNOWN_SHOWN: Final = 5


def describe(error: BaseException) -> str:
    """A failure as one storable line: `Type: message`, without NUL characters and cut at 2,000 characters."""
    text = f"{type(error).__name__}: {error}".replace("\x00", "�")
    return text.encode(errors="replace").decode()[:MAX_MESSAGE_LENGTH]


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """Why an event was given up: `exception` is the name of the type of `error`, `attempts` how often it was tried."""

    consumer: str
    exception: str
    message: str
    attempts: int
    error: BaseException

    @classmethod
    def of(cls, consumer: str, error: BaseException, attempts: int) -> DeadLetterCause:
        """The cause with its texts as they can be stored."""
        exception, _, message = describe(error).partition(": ")
        return cls(consumer, exception, message, attempts, error)


DeadLetterFactory: TypeAlias = Callable[[Event, DeadLetterCause], Publication | None]
"""Makes the dead letter of an event, or None where there is to be none: its partition stops there."""


def dead_letter(event: Event, cause: DeadLetterCause) -> Publication:
    """The dead letter that is made where no factory is configured; a factory may change it."""
    return event.as_publication(
        event.topic + DEAD_LETTER_SUFFIX,
        **{
            CONSUMER: cause.consumer,
            EXCEPTION: cause.exception,
            MESSAGE: cause.message,
            ATTEMPTS: str(cause.attempts),
            SOURCE_TOPIC: event.topic,
            SOURCE_PARTITION: str(event.partition),
            SOURCE_OFFSET: str(event.id),
        },
    )


def refused(state: ConsumerState) -> bool:
    """Whether no dead letter was to be made of the event that a partition is retrying: it waits to be resumed."""
    half = timedelta(seconds=NEVER / 2)
    return state.spent and state.retry_at is not None and state.retry_at > datetime.now(UTC) + half


class DeadLetter(Event):
    """An event of a dead letter topic. `redriven_at` is when it was redriven last, None when it never was.

    `shard` is where it lies, where a platform of several lists it.
    """

    __slots__ = ("_redriven_at", "shard")

    def __init__(self, topic: str, *columns: Any, redriven_at: datetime | None = None) -> None:
        super().__init__(topic, *columns)
        self._redriven_at = redriven_at
        self.shard: str | None = None

    @property
    def redriven_at(self) -> datetime | None:
        return self._redriven_at

    @property
    def consumer(self) -> str | None:
        """The consumer that gave it up."""
        return _text(self.metadata, CONSUMER)

    @property
    def origin(self) -> str | None:
        """The event that was given up, as `topic:partition:id`; None where the letter does not say."""
        parts = [_text(self.metadata, name) for name in (SOURCE_TOPIC, SOURCE_PARTITION, SOURCE_OFFSET)]
        return None if None in parts else ":".join(map(str, parts))


def _text(metadata: Mapping[str, Any], name: str) -> str | None:
    """A value as text, which another publisher may have written as other JSON."""
    value = metadata.get(name)
    return value if value is None or isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which dead letters are meant: those that meet all that is given, and without anything all but those of backfills.

    A backfill hands a consumer events that others have consumed well. So the letters of a backfill are meant only where
    `backfill` is its id, or `ids` names them.

    `consumer` gave them up, for an `exception` of this type's name; they have this `key` and all of this `metadata`.
    `ids` are their offsets in the dead letter topic, of which `after` is exclusive and `upto` inclusive. They were
    given up at `since` or later and before `until`, times with a time zone.

    Raises `ValidationError`.
    """

    consumer: str | None = None
    backfill: str | None = None
    exception: str | None = None
    key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    after: int = 0
    upto: int | None = None
    ids: Collection[int] | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        for what in ("consumer", "backfill", "exception", "key"):
            if (text := getattr(self, what)) is not None:
                check_text(what, text)
        object.__setattr__(self, "metadata", check_metadata(self.metadata))
        check_whole("after", self.after, least=0)
        if self.upto is not None and check_whole("upto", self.upto, least=0) < self.after:
            raise ValidationError(f"no range of offsets: after {self.after} up to {self.upto}")
        if self.ids is not None:
            if isinstance(self.ids, str | bytes) or not isinstance(self.ids, Iterable):
                raise ValidationError(f"ids must be whole numbers, not {shown(self.ids)}")
            ids = sorted({check_whole("the id of a dead letter", each, least=1) for each in self.ids})
            object.__setattr__(self, "ids", tuple(ids))
        check_range(self.since, self.until)
        if self.since is not None and self.until is not None and self.since > self.until:
            raise ValidationError(f"no range of times: since {self.since} until {self.until}")

    def parameters(self) -> dict[str, object]:
        """Everything but the ids, as the statements take it."""
        return {
            "consumer": self.consumer,
            "backfill": self.backfill,
            "exception": self.exception,
            "key": self.key,
            "names": list(self.metadata) or None,
            "texts": list(self.metadata.values()),
            "since": self.since,
            "until": self.until,
        }


@dataclass(frozen=True, slots=True)
class RedrivePlan:
    """What a redrive would do: of `letters` that are meant, `redriven_before` were redriven, `redrives` would be."""

    letters: int
    redriven_before: int
    redrives: int


@dataclass(frozen=True, slots=True)
class _Window:
    """Ids of a dead letter topic: a range, and of that some or all."""

    after: int
    upto: int
    ids: Sequence[int] | None


_COUNT: Final = sql.SQL("SELECT pg_catalog.count(*), pg_catalog.count(matching.eql_redriven_at) FROM ({}) matching")


@checked
class DeadLetters:
    """Makes, lists and redrives the dead letters of topics."""

    def __init__(self, database: Database, registry: Registry, publisher: Publisher, reader: Reader) -> None:
        self._database = database
        self._registry = registry
        self._publisher = publisher
        self._reader = reader
        self._factory: DeadLetterFactory | None = None
        self._queries = Queries("dead_letters", database.schema)
        self._log_queries = Queries("log", database.schema)

    # Giving events up

    def configure(self, factory: DeadLetterFactory | None) -> None:
        """Make the dead letters of this object's consumers by `factory(event, cause)`; None is the default again.

        The factory runs in the transaction that holds the partition. What it gives is published in that transaction, to
        whichever topic it names; `list` and `redrive` know those of `{topic}_dlt`. Where it gives None, the partition
        stops at the event until the consumer is resumed. Where it raises, or what it gives cannot be published, the
        event is tried again with backoff, and the partition's failure says so.
        """
        self._factory = factory

    def topic_of(self, topic: str, connection: Connection | None = None) -> str | None:
        """The name of the topic's dead letter topic, or None where none is registered."""
        if connection is None:
            with self._database.connection() as pooled:
                return self.topic_of(topic, pooled)
        name = topic + DEAD_LETTER_SUFFIX
        with self._database.errors(connection):
            # The connection may be a handler's, with a row factory of its own.
            cursor = connection.cursor(row_factory=tuple_row)
            row = cursor.execute(self._log_queries("topic_exists"), {"topic": name}).fetchone()
        return name if row == (True,) else None

    def accepts(self, topic: str, connection: Connection | None = None) -> bool:
        """Whether there is anything that may take an event of `topic` whose attempts are spent."""
        return self._factory is not None or self.topic_of(topic, connection) is not None

    def blocking(self, state: ConsumerState, connection: Connection | None = None) -> str | None:
        """Why a partition stays at the event that it is retrying; None when the event is tried again some time."""
        if not state.spent:
            return None
        if refused(state):
            return "no dead letter was to be made of it"
        if not self.accepts(state.topic, connection):
            return f"topic {state.topic}{DEAD_LETTER_SUFFIX} does not exist"
        return None

    def bury(self, connection: Connection, event: Event, cause: DeadLetterCause) -> bool:
        """Publish the dead letter of `event` in the caller's transaction; False where there is to be none.

        Raises what the factory and the publisher raise.
        """
        letter: object = (self._factory or dead_letter)(event, cause)
        if letter is None:
            return False
        if not isinstance(letter, Publication):
            raise ValidationError(f"a dead letter factory gives a Publication or None, not {type(letter).__name__}")
        if (backfill := backfill_of(cause.consumer)) is not None:
            letter = replace(letter, metadata={**letter.metadata, BACKFILL: backfill})
        # On the shard of the event, whichever its key belongs to by now.
        self._publisher.publish(letter, connection=connection, placed=ANYWHERE)
        return True

    # Redriving

    def plan_redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> RedrivePlan:
        """What `redrive` would do now. Nothing is written. Raises as `redrive`."""
        wanted = letters or LetterFilter()
        self._registry.topic(topic)
        source = self._source(topic)
        matching = before = 0
        windows = self._windows(source, wanted)
        with self._database.connection() as connection:
            for window in windows:
                query, values = self._matching(source, wanted, window, limit=None, redriven=None)
                row = connection.execute(_COUNT.format(query), values, prepare=False).fetchone()
                assert row is not None, "an aggregate gives one row"
                matching += row[0]
                before += row[1]
        redrives = matching if again else matching - before
        return RedrivePlan(matching, before, redrives if limit is None else min(limit, redrives))

    def redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> int:
        """Publish dead letters of `topic` to it again, in order, the oldest `limit` of those that `letters` means.

        Gives their number. Each is redriven once, whoever redrives by whatever filters and whatever crashes; with
        `again`, those that were redriven before are redriven too. Every 1,000 are one transaction: what is committed
        stays, when a later one fails. Letters that come while this runs are left for the next redrive, so that events
        which fail again at once do not keep it going.

        Raises `TopicNotFoundError` where the topic or its dead letter topic does not exist, `EventSQLError` for ids
        that no dead letter has, before anything is redriven; otherwise as `Publisher.publish_all`.
        """
        wanted = letters or LetterFilter()
        target, source = self._registry.topic(topic), self._source(topic)
        with self._database.connection() as connection:
            connection.execute(self._queries("prune_former", topic=source), {"letters": source})
        redriven, most = 0, BATCH
        for window in self._windows(source, wanted):
            after: int | None = window.after
            while after is not None and (limit is None or redriven < limit):
                batch = most if limit is None else min(most, limit - redriven)
                try:
                    done, after = self._redrive_batch(
                        target, source, wanted, replace(window, after=after), limit=batch, again=again
                    )
                except (DatabaseError, MemoryError) as error:
                    if batch == 1 or not too_much(error):
                        raise
                    most = batch // 2
                    continue
                redriven += done
        return redriven

    def _redrive_batch(
        self, target: Topic, source: str, wanted: LetterFilter, window: _Window, *, limit: int, again: bool
    ) -> tuple[int, int | None]:
        """Redrive the first letters of a window; gives their number and where to go on, None at the window's end."""
        with self._database.transaction() as connection:
            connection.execute(self._queries("by_id"))
            query, values = self._matching(source, wanted, window, limit=limit, redriven=None if again else False)
            found = connection.execute(query, values, prepare=False).fetchall()
            if not found:
                return 0, None
            ids = _fitting([(letter, size) for letter, size, _ in found])
            marked = connection.execute(self._queries("mark"), {"letters": source, "ids": ids, "again": again})
            letters = self._read(connection, source, [letter for (letter,) in marked])
            redriven = (_redriven(target, letter) for letter in letters)
            self._publisher.publish_all(redriven, connection=connection, placed=ANYWHERE)
            return len(letters), ids[-1]

    def prune(self, topic: str | None = None) -> int:
        """Forget the redrives of dead letters, of `topic` or of all, that retention has removed; gives their number.

        Raises `TopicNotFoundError` where the topic has no dead letter topic.
        """
        sources = (
            [each.name for each in self._registry.topics() if each.name.endswith(DEAD_LETTER_SUFFIX)]
            if topic is None
            else [self._source(topic)]
        )
        with self._database.connection() as connection:
            removed = connection.execute(self._queries("prune_deleted")).rowcount
            for source in sources:
                for name in ("prune_former", "prune"):
                    removed += connection.execute(self._queries(name, topic=source), {"letters": source}).rowcount
        return removed

    # Looking

    def show(self, topic: str, letter_id: int) -> DeadLetter:
        """One dead letter of `topic`. Raises `TopicNotFoundError`, and `EventSQLError` where none has this id."""
        check_whole("the id of a dead letter", letter_id, least=1)
        source = self._source(topic)
        with self._database.connection() as connection:
            found = self._read(connection, source, [letter_id])
        if not found:
            raise _unknown(source, [letter_id])
        return found[0]

    def list(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int = 100, redriven: bool | None = None
    ) -> list[DeadLetter]:
        """The oldest dead letters of `topic` that `letters` means, of those that were `redriven`, were not, or of all.

        Raises `TopicNotFoundError` where it has no dead letter topic, `EventSQLError` for ids that no letter has.
        """
        wanted = letters or LetterFilter()
        source = self._source(topic)
        windows = self._windows(source, wanted)
        ids: list[int] = []
        with self._database.connection() as connection:
            for window in windows:
                query, values = self._matching(source, wanted, window, limit=limit - len(ids), redriven=redriven)
                ids += [row[0] for row in connection.execute(query, values, prepare=False)]
            return list(self._read(connection, source, ids))

    def of_backfills(self, topic: str) -> dict[str, int]:
        """How many dead letters of `topic` that were not redriven each backfill has left, by its id.

        Raises `TopicNotFoundError` where it has no dead letter topic.
        """
        source = self._source(topic)
        with self._database.connection() as connection:
            rows = connection.execute(self._queries("of_backfills", topic=source), {"letters": source})
            return {str(backfill): int(letters) for backfill, letters in rows}

    def _source(self, topic: str) -> str:
        source = topic + DEAD_LETTER_SUFFIX
        try:
            return self._registry.topic(source).name
        except TopicNotFoundError:
            self._registry.topic(topic)
            raise TopicNotFoundError(
                f"topic {topic!r} has no dead letter topic: create it with `eventsql topic create {source}`"
            ) from None

    def _windows(self, source: str, wanted: LetterFilter) -> Sequence[_Window]:
        """What to look through, as far as the log goes now. Raises `EventSQLError` for ids that no letter has."""
        end = self._reader.end(source)
        upto = end if wanted.upto is None else min(wanted.upto, end)
        if wanted.ids is None:
            return [_Window(wanted.after, upto, None)]
        ids = list(wanted.ids)
        windows = [_Window(wanted.after, upto, ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]
        query = self._queries("unknown", topic=source)
        with self._database.connection() as connection:
            for window in windows:
                unknown = connection.execute(query, {"ids": window.ids, "limit": _UNKNOWN_SHOWN}).fetchall()
                if unknown:
                    raise _unknown(source, [letter for (letter,) in unknown])
        return windows

    def _matching(
        self, source: str, wanted: LetterFilter, window: _Window, *, limit: int | None, redriven: bool | None
    ) -> tuple[sql.SQL, dict[str, object]]:
        return self._queries("matching", topic=source), {
            **wanted.parameters(),
            "letters": source,
            "after": window.after,
            "upto": window.upto,
            "ids": window.ids,
            "limit": limit,
            "redriven": redriven,
        }

    def _read(self, connection: Connection, source: str, ids: Sequence[int]) -> Sequence[DeadLetter]:
        rows = connection.execute(
            self._queries("letters", topic=source), {"letters": source, "ids": ids}, binary=True, prepare=False
        )
        return [DeadLetter(source, *columns, redriven_at=redriven_at) for *columns, redriven_at in rows]


def _unknown(source: str, ids: Sequence[int]) -> EventSQLError:
    offsets = f"offset{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
    topic = source.removesuffix(DEAD_LETTER_SUFFIX)
    return EventSQLError(
        f"topic {source!r} has no event at {offsets}: list its dead letters with `eventsql dlt list {topic}`"
    )


def _fitting(sizes: Sequence[tuple[int, int]]) -> Sequence[int]:
    """The ids, of ids with bytes, of the first letters that fit into a batch; at least one."""
    ids: list[int] = []
    left = BATCH_BYTES
    for letter, size in sizes:
        left -= size
        if ids and left < 0:
            break
        ids.append(letter)
    return ids


def _redriven(target: Topic, letter: DeadLetter) -> Publication:
    """The event of a letter as it was, but for where it comes from."""
    publication = letter.as_publication(target.name)
    metadata = {name: text for name, text in publication.metadata.items() if name not in _CAUSE}
    if (before := metadata.get(REDRIVEN_FROM)) is not None:
        chain = [*metadata.get(REDRIVEN_BEFORE, "").split(), before]
        metadata[REDRIVEN_BEFORE] = " ".join(chain[-MAX_CHAIN:])
    metadata[REDRIVEN_FROM] = f"{letter.topic}:{letter.id}"
    if letter.consumer is not None:
        metadata[REDRIVEN_CONSUMER] = letter.consumer
    if letter.origin is not None:
        metadata.setdefault(REDRIVEN_ORIGIN, letter.origin)
    return replace(publication, metadata=metadata, partition=_partition(target, letter))


def _partition(target: Topic, letter: DeadLetter) -> int | None:
    """The partition that a letter's event was in, which need not be that of its key; None where the topic was made
    anew or repartitioned since, or has no such partition: the publisher chooses then.
    """
    if target.created_at is not None and target.created_at > letter.buffered_at:
        return None
    partition = _text(letter.metadata, SOURCE_PARTITION)
    if _text(letter.metadata, SOURCE_TOPIC) != target.name or partition is None:
        return None
    if target.layout > 1 and letter.as_publication(target.name).key is not None:
        # Where it was may not be where its key's events are by now.
        return None
    # Whoever else wrote the letter may have written anything.
    known = partition.isdecimal() and len(partition) <= len(str(MAX_PARTITIONS)) and int(partition) < target.partitions
    return int(partition) if known else None
