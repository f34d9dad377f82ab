"""Dead letters: events that failed their consumer's last attempt, kept in the topic `{topic}_dlt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.dead_letter_values import (
    BACKFILL,
    DeadLetter,
    DeadLetterCause,
    DeadLetterFactory,
    LetterFilter,
    RedrivePlan,
    dead_letter,
    describe,
    redriven,
    refused,
)
from eventsql_orchestration.consuming.handlers import ends_program, errors_of_handler
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.load import too_much
from eventsql_orchestration.database.rows import fetch_first, fetch_one, query_all, query_first
from eventsql_orchestration.errors import (
    ConsumptionError,
    DatabaseError,
    EventSQLError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, Event, Publication, Topic
from eventsql_orchestration.publishing.publisher import Publisher
from eventsql_orchestration.sharding import ANYWHERE
from eventsql_orchestration.storage.erasing import FAILURE, copy_events
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.reading import BATCH_BYTES, cursor_of_events
from eventsql_orchestration.topics.layouts import layouts
from eventsql_orchestration.topics.reader import Reader
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.topics.side_consumers import backfill_of
from eventsql_orchestration.validation import check_whole

__all__ = ["DeadLetter", "DeadLetterCause", "DeadLetterFactory", "DeadLetters", "LetterFilter", "RedrivePlan"]

BATCH: Final = 1_000
"""Maximum of letters that one transaction redrives."""

_UNKNOWN_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class _Window:
    """A range of ids of a dead letter topic, and the selected ids; None for all."""

    after: int
    upto: int
    ids: Sequence[int] | None


_COUNT: Final = sql.SQL("SELECT pg_catalog.count(*), pg_catalog.count(matching.eql_redriven_at) FROM ({}) matching")


@checked
class DeadLetters:
    """Makes, lists, redrives and dismisses the dead letters of topics."""

    def __init__(self, database: Database, registry: Registry, publisher: Publisher, reader: Reader) -> None:
        self._database = database
        self._registry = registry
        self._publisher = publisher
        self._reader = reader
        self._factory: DeadLetterFactory | None = None
        self._queries = Queries("dead_letters", database.schema)
        self._letters = LogQueries("dead_letters", database.schema)
        self._log_queries = Queries("log", database.schema)

    # Giving events up

    def configure(self, factory: DeadLetterFactory | None) -> None:
        """See `ClusterDeadLetters.configure`."""
        self._factory = factory

    def topic_of(self, topic: str, connection: Connection | None = None) -> str | None:
        """See `ClusterDeadLetters.topic_of`."""
        name = topic + DEAD_LETTER_SUFFIX
        query, values = self._log_queries("topic_exists"), {"topic": name}
        if connection is None:
            row = query_first(self._database, query, values)
        else:
            with self._database.errors(connection):
                row = fetch_first(connection, query, values)
        return name if row == (True,) else None

    def accepts(self, topic: str, connection: Connection | None = None) -> bool:
        """See `ClusterDeadLetters.accepts`."""
        return self._factory is not None or self.topic_of(topic, connection) is not None

    def blocking(self, state: ConsumerState, connection: Connection | None = None) -> str | None:
        """The reason why a partition stays at its failed event; None if the event is tried again."""
        if not state.spent:
            return None
        if refused(state):
            return "the dead letter factory made no dead letter of it"
        if not self.accepts(state.topic, connection):
            return f"topic {state.topic}{DEAD_LETTER_SUFFIX} does not exist"
        return None

    def _made(self, event: Event, cause: DeadLetterCause) -> object:
        """What the factory makes. Its errors are those of a handler: none of them ends a thread."""
        try:
            return (self._factory or dead_letter)(event, cause)
        except errors_of_handler() as error:
            if ends_program(error) or (isinstance(error, Exception) and not isinstance(error, psycopg.Rollback)):
                raise
            raise EventSQLError(f"the dead letter factory raised {describe(error)}") from error

    def bury(self, connection: Connection, event: Event, cause: DeadLetterCause, *, erased: Event | None) -> bool:
        """Publish the dead letter of `event` in the caller's transaction; False if the factory returned None.

        `erased` is what `erased_meanwhile` has found in this transaction: an erasure that has already passed the event
        would not find this copy of it. Raises errors of the factory and the publisher.
        """
        if erased is not None:
            # Message and error may quote the value, which the handler got before the erasure.
            event, cause = erased, replace(cause, message=FAILURE, error=ConsumptionError(erased, FAILURE))
        letter = self._made(event, cause)
        if letter is None:
            return False
        if not isinstance(letter, Publication):
            raise ValidationError(f"a dead letter factory gives a Publication or None, not {type(letter).__name__}")
        if (backfill := backfill_of(cause.consumer)) is not None:
            letter = replace(letter, metadata={**letter.metadata, BACKFILL: backfill})
        # Publish it on the shard of the event, even if its key belongs to another shard now.
        self._publisher.publish(letter, connection=connection, placed=ANYWHERE)
        return True

    # Redriving and dismissing

    def plan_redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> RedrivePlan:
        """See `ClusterDeadLetters.plan_redrive`."""
        wanted = letters or LetterFilter()
        self._registry.topic(topic)
        source = self._source(topic)
        matching = before = 0
        windows = self._windows(source, wanted)
        with self._database.connection() as connection:
            for window in windows:
                query, values = self._matching(source, wanted, window, limit=None, redriven=None)
                found, redriven = fetch_one(connection, _COUNT.format(query), values, prepare=False)
                matching, before = matching + found, before + redriven
        redrives = matching if again else matching - before
        return RedrivePlan(matching, before, redrives if limit is None else min(limit, redrives))

    def redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> int:
        """See `ClusterDeadLetters.redrive`."""
        with self._database.by_admin():
            return self._settle(topic, letters or LetterFilter(), limit=limit, again=again)

    def dismiss(self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None) -> int:
        """See `ClusterDeadLetters.dismiss`."""
        with self._database.by_admin():
            return self._settle(topic, letters or LetterFilter(), limit=limit, dismissed=True)

    def _settle(
        self, topic: str, wanted: LetterFilter, *, limit: int | None, again: bool = False, dismissed: bool = False
    ) -> int:
        target, source = self._registry.topic(topic), self._source(topic)
        # The publisher may still know the definition from before a change by another process.
        self._registry.forget(topic)
        with self._database.connection() as connection:
            connection.execute(self._letters("prune_former", topic=source), {"letters": source}, prepare=False)
        total, most = 0, BATCH
        for window in self._windows(source, wanted):
            after: int | None = window.after
            while after is not None and (limit is None or total < limit):
                batch = most if limit is None else min(most, limit - total)
                try:
                    done, after = self._settle_batch(
                        target, source, wanted, replace(window, after=after),
                        limit=batch, again=again, dismissed=dismissed,
                    )  # fmt: skip
                except (DatabaseError, MemoryError) as error:
                    if batch == 1 or not too_much(error):
                        raise
                    most = batch // 2
                    continue
                total += done
        return total

    def _settle_batch(
        self, target: Topic, source: str, wanted: LetterFilter, window: _Window,
        *, limit: int, again: bool, dismissed: bool,
    ) -> tuple[int, int | None]:  # fmt: skip
        """Redrive or dismiss the first letters of a window; returns their number and the last id, None at its end."""
        with self._database.transaction() as connection:
            copy_events(connection, self._database.schema, target.name)
            connection.execute(self._queries("by_id"))
            query, values = self._matching(source, wanted, window, limit=limit, redriven=None if again else False)
            found = connection.execute(query, values, prepare=False).fetchall()
            if not found:
                return 0, None
            # The first letters that fit into a batch, at least one.
            sizes = accumulate(size for _, size, _ in found)
            fitting = sum(size <= BATCH_BYTES for size in sizes)
            ids = [letter for letter, _, _ in found[: max(1, fitting)]]
            values = {"letters": source, "ids": ids, "again": again, "dismissed": dismissed}
            marked = [letter for (letter,) in connection.execute(self._queries("mark"), values)]
            if dismissed:
                return len(marked), ids[-1]
            letters = self._read(connection, source, marked)
            repartitioned = bool(layouts(connection, self._database.schema, target.name))
            events = (redriven(target, letter, repartitioned=repartitioned) for letter in letters)
            self._publisher.publish_all(events, connection=connection, placed=ANYWHERE)
            return len(letters), ids[-1]

    def prune(self, topic: str | None = None) -> int:
        """See `ClusterDeadLetters.prune`."""
        sources = (
            [each.name for each in self._registry.topics() if each.name.endswith(DEAD_LETTER_SUFFIX)]
            if topic is None
            else [self._source(topic)]
        )
        with self._database.connection() as connection:
            removed = connection.execute(self._queries("prune_deleted"), prepare=False).rowcount
            for source in sources:
                for name in ("prune_former", "prune"):
                    query = self._letters(name, topic=source)
                    removed += connection.execute(query, {"letters": source}, prepare=False).rowcount
        return removed

    # Looking

    def show(self, topic: str, letter_id: int) -> DeadLetter:
        """See `ClusterDeadLetters.show`."""
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
        """See `ClusterDeadLetters.list`."""
        wanted = letters or LetterFilter()
        source = self._source(topic)
        windows = self._windows(source, wanted)
        # An erased letter is not open: nobody can redrive it.
        erased = redriven is not False
        ids: list[int] = []
        with self._database.connection() as connection:
            for window in windows:
                query, values = self._matching(
                    source, wanted, window, limit=limit - len(ids), redriven=redriven, erased=erased
                )
                ids += [row[0] for row in connection.execute(query, values, prepare=False)]
            return list(self._read(connection, source, ids))

    def of_backfills(self, topic: str) -> dict[str, int]:
        """See `ClusterDeadLetters.of_backfills`."""
        source = self._source(topic)
        rows = query_all(
            self._database, self._letters("of_backfills", topic=source), {"letters": source}, prepare=False
        )
        return {str(backfill): int(letters) for backfill, letters in rows}

    def _source(self, topic: str) -> str:
        source = topic + DEAD_LETTER_SUFFIX
        try:
            return self._registry.topic(source).name
        except TopicNotFoundError:
            self._registry.topic(topic)
            remedy = f"create it with `eventsql topic create {source}`"
            if topic.endswith(DEAD_LETTER_SUFFIX):
                remedy = f"name the topic of the original events, {topic.removesuffix(DEAD_LETTER_SUFFIX)!r}"
            raise TopicNotFoundError(f"topic {topic!r} has no dead letter topic: {remedy}") from None

    def _windows(self, source: str, wanted: LetterFilter) -> Sequence[_Window]:
        """The windows to search, up to the current end of the log. Raises `EventSQLError` for unknown ids."""
        end = self._reader.end(source)
        upto = end if wanted.upto is None else min(wanted.upto, end)
        if wanted.ids is None:
            return [_Window(wanted.after, upto, None)]
        ids = list(wanted.ids)
        windows = [_Window(wanted.after, upto, ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]
        for window in windows:
            values = {"ids": window.ids, "limit": _UNKNOWN_SHOWN}
            if unknown := query_all(self._database, self._letters("unknown", topic=source), values, prepare=False):
                raise _unknown(source, [letter for (letter,) in unknown])
        return windows

    def _matching(
        self, source: str, wanted: LetterFilter, window: _Window,
        *, limit: int | None, redriven: bool | None, erased: bool = False,
    ) -> tuple[sql.SQL, dict[str, object]]:  # fmt: skip
        return self._letters("matching", topic=source), {
            **wanted.parameters(), "letters": source,
            "after": window.after, "upto": window.upto, "ids": window.ids, "limit": limit, "redriven": redriven,
            "erased": erased,
        }  # fmt: skip

    def _read(self, connection: Connection, source: str, ids: Sequence[int]) -> Sequence[DeadLetter]:
        values, cursor = {"letters": source, "ids": ids}, cursor_of_events(connection)
        rows = cursor.execute(self._letters("letters", topic=source), values, binary=True, prepare=False)
        return [
            DeadLetter(source, *columns, redriven_at=redriven_at, dismissed_at=dismissed_at)
            for *columns, redriven_at, dismissed_at in rows
        ]


def _unknown(source: str, ids: Sequence[int]) -> EventSQLError:
    offsets = f"offset{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
    return EventSQLError(
        f"topic {source!r} has no event at {offsets}: list its dead letters with "
        f"`eventsql dlt list {source.removesuffix(DEAD_LETTER_SUFFIX)}`"
    )
