"""A queue in each database of a platform."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from eventsql_orchestration.consuming.running import AnyRunning, Keeper
from eventsql_orchestration.database import CallersConnection, Database
from eventsql_orchestration.errors import (
    ConnectionLostError,
    DatabaseUnavailableError,
    ShardError,
    ValidationError,
    WrongShardError,
)
from eventsql_orchestration.queue.options import QueueOptions
from eventsql_orchestration.queue.queue_table import QueueTable
from eventsql_orchestration.queue.values import Message, NewMessage, QueueDefinition
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.validation import check_kind


@runtime_checkable
class Platform(Protocol):
    """The part of `EventSQL` that a queue uses."""

    @property
    def shards(self) -> tuple[Shard, ...]: ...

    @property
    def consumers(self) -> Keeper: ...

    def opened(self) -> tuple[Shard, ...]: ...

    def shard_of(self, key: str) -> Shard: ...

    def using(self, shard: Shard) -> AbstractContextManager[None]: ...

    def reach(self, shard: Shard, since: float) -> None: ...

    def reconsider(self, error: WrongShardError, since: float) -> None: ...


Source: TypeAlias = Platform | Shard | Database

Given = TypeVar("Given")


class QueueShards:
    """The queue `name` in the databases of its source, and the choice of the database for a key or a connection."""

    def __init__(self, source: Source, name: str, options: QueueOptions) -> None:
        self._source = source
        self._name = name
        self._options = options
        self._tables: dict[Shard | Database, QueueTable] = {}

    def _places(self) -> Sequence[Shard | Database]:
        return (self._source,) if isinstance(self._source, Shard | Database) else self._source.shards

    def databases(self) -> list[Database]:
        return [place if isinstance(place, Database) else place.database for place in self._places()]

    def keep(self, running: AnyRunning) -> AnyRunning:
        """Let the close of a platform or a shard stop workers before their connections are closed. Gives them."""
        return running if isinstance(self._source, Database) else self._source.consumers.keep(running)

    def _table(self, place: Shard | Database) -> QueueTable:
        table = self._tables.get(place)
        if table is None:
            if isinstance(place, Database):
                table = QueueTable(place, self._name, self._options)
            else:
                table = QueueTable(
                    place.database, self._name, self._options, shard=place.name, listener=place.listener,
                    notifier=place.notifier, elsewhere=self._elsewhere,
                )  # fmt: skip
            # Another thread may have come first.
            table = self._tables.setdefault(place, table)
        return table

    def _only(self) -> QueueTable | None:
        """The queue of a platform that has one database."""
        places = self._places()
        return self._table(places[0]) if len(places) == 1 else None

    def lone(self) -> bool:
        """Whether the platform has one database. False if it has several and only one is up."""
        return self._only() is not None

    def _opened(self) -> Sequence[Shard]:
        """The shards of a platform that has several; connects first, so that their names are known."""
        assert not isinstance(self._source, Database | Shard)
        return self._source.opened()

    def all(self) -> list[QueueTable]:
        """The queue in each database that can be reached. Raises `DatabaseUnavailableError` if there is none."""
        if (only := self._only()) is not None:
            return [only]
        shards = self._opened()
        up = [shard for shard in shards if shard.down is None and shard.active]
        if not up:
            raise shards[0].unavailable()
        return [self._table(shard) for shard in up]

    def every(self) -> list[QueueTable]:
        """The queue in each database. Raises `DatabaseUnavailableError` if one of them cannot be reached."""
        if (only := self._only()) is not None:
            return [only]
        shards = self._opened()
        for shard in shards:
            if shard.down is not None:
                raise shard.unavailable()
        return [self._table(shard) for shard in shards]

    @contextmanager
    def using(self, table: QueueTable, *, since: float | None = None) -> Iterator[None]:
        """Use the queue on a shard, which counts as down from then on if the block finds it down.

        With `since`, a time of `time.monotonic`, waits first for a shard that is down, as far as its platform was told
        so. Raises `ShardUnavailableError` if it is down: the error of its database does not name the shard.
        """
        if isinstance(self._source, Database | Shard) or self.lone():
            yield
            return
        shard = next(shard for shard in self._source.shards if shard.database is table.database)
        if since is not None:
            self._source.reach(shard, since)
        elif shard.down is not None:
            raise shard.unavailable()
        try:
            with self._source.using(shard):
                yield
        except ConnectionLostError:
            raise
        except DatabaseUnavailableError as error:
            if shard.down is None:
                raise
            raise shard.unavailable() from error

    def each(self, tables: Iterable[QueueTable], action: Callable[[QueueTable], Given]) -> list[Given]:
        """Call `action` with one queue after the other; gives each result. Raises as `using`."""
        done: list[Given] = []
        for table in tables:
            with self.using(table):
                done.append(action(table))
        return done

    def _elsewhere(self, created: QueueTable) -> QueueDefinition | None:
        """The queue as another shard has it, so that a queue gets the same options on every shard."""
        for table in self.all():
            if table is not created:
                # Leave out a shard that is found down, as `all` leaves out the shards that are known to be down.
                with suppress(DatabaseUnavailableError), self.using(table):
                    if (found := table.existing()) is not None:
                        return found
        return None

    def of(self, message: Message, *, connected: bool = False) -> QueueTable:
        """The queue on a message's shard. A caller that is `connected` to a shard may use it while it counts as down.

        Raises `ShardUnavailableError` if the shard is down, and `ShardError` if this platform does not know it.
        """
        only = self._only()
        if only is not None:
            if only.shard == message.shard:
                return only
        else:
            for shard in self._opened():
                if shard.name is not None and shard.name == message.shard:
                    if shard.down is not None and not connected:
                        raise shard.unavailable()
                    return self._table(shard)
        raise ShardError(
            f"message {message.id} is on shard {message.shard!r}, which this platform does not reach now: open it with "
            "the URLs of all shards, or try again",
            shard=message.shard or "",
        )

    @contextmanager
    def holding(self, message: Message) -> Iterator[QueueTable]:
        """Use the queue on a message's shard. Raises as `of` and `using`."""
        table = self.of(message)
        with self.using(table):
            yield table

    def for_key(self, key: str | None, tables: Sequence[QueueTable]) -> QueueTable:
        if self.lone():
            return tables[0]
        if key is None:
            return random.choice(tables)  # noqa: S311 - no secret
        assert not isinstance(self._source, Database | Shard)
        return self._table(self._source.shard_of(key))

    def reconsider(self, error: WrongShardError, since: float) -> None:
        """Read the shards of a platform again after one of several refused messages. See `EventSQL.reconsider`."""
        assert not isinstance(self._source, Database | Shard)
        self._source.reconsider(error, since)

    def where(
        self, connection: CallersConnection, messages: Sequence[NewMessage], tables: Sequence[QueueTable]
    ) -> QueueTable:
        """The shard of a caller's connection; in an ordered queue, the keys must belong to it."""
        for table in tables:
            try:
                with table.database.callers(connection):
                    break
            except ValidationError:
                continue
        else:
            # Raises the error for a connection to another database.
            with tables[0].database.callers(connection):
                table = tables[0]
        if table.known().ordered:
            for message in messages:
                if message.key is not None and (owner := self.for_key(message.key, tables)) is not table:
                    raise ValidationError(
                        f"key {message.key!r} belongs to shard {owner.shard!r}, and the connection leads to "
                        f"{table.shard!r}: use a connection to platform.shard_of(key)"
                    )
        return table


def by_shard(messages: Iterable[Message]) -> list[list[Message]]:
    """The messages of each shard. Raises `ValidationError` if one of them is no message."""
    given = list(messages)
    if {type(message) for message in given} - {Message}:
        for message in given:
            check_kind("an item of messages", message, Message)
    shards = dict.fromkeys([message.shard for message in given])
    return [[message for message in given if message.shard == shard] for shard in shards]
