"""Publishing staged blocks of events, once for each batch of a writer: in one transaction, or in one on each shard.

Over several shards, one transaction decides: that of the shard whose claim is committed, or else of the one that was
there first, whatever was added since. It records (writer, batch), and from its commit on the events of all shards are
published. It is open from before the publication is announced: where it has ended without deciding, nobody will.
Before it commits, the events of each other shard are prepared, so that no crash and no sweep takes them away, and a
transaction there has placed them and holds what they were placed by. That one commits after the one that decides; where
it cannot, whoever comes publishes what was prepared (`sharded/decisions.py`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import psycopg

from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    PublicationUnfinishedError,
    RedefinitionError,
    ShardSetError,
)
from eventsql_orchestration.log.leased import owner_name
from eventsql_orchestration.log.parts import Part
from eventsql_orchestration.log.patience import Patience
from eventsql_orchestration.log.shard_store import ShardStore
from eventsql_orchestration.log.staged import swept
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.spark.ledger import UNNAMED, Batch, ClaimHold, Ledger, Portion
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.places import places
from eventsql_orchestration.spark.staging import Attempt, Place

if TYPE_CHECKING:
    from eventsql_orchestration.sharded.decisions import Decisions, Unfinished

logger = logging.getLogger(__name__)

FINISH_SECONDS: Final = 10.0
"""How long a publication that is decided is waited for where a shard does not take its part; also by the next one."""

FORGET_SECONDS: Final = 86_400.0
"""How long it is known which events of a publication each shard got, after it was finished."""

GIVE_UP_SECONDS: Final = 0.25
"""How long each part of a publication that does not take place is waited for; whoever comes next gives it up too."""


class Publications:
    """Publishes what was staged. One object for one commit; close it, or use it as a context manager."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._platform = EventSQL(*source.urls, schema=source.schema, migrate=False, transfer=False)
        self._sharded = len(source.urls) > 1
        self._opened: dict[str | None, Ledger] = {}

    def __enter__(self) -> Publications:
        return self

    def __exit__(self, *_: object) -> None:
        self._platform.close()

    @property
    def _ledgers(self) -> Mapping[str | None, Ledger]:
        """By the names of the shards; by None where there is one database."""
        if not self._opened:
            if self._sharded:
                # One that is down may have no name yet.
                shards = self._platform.open().shards
                self._opened = {each.shard: Ledger(each) for each in shards if each.shard is not None}
            else:
                self._opened = {None: Ledger(self._platform)}
        return self._opened

    @property
    def _decisions(self) -> Decisions:
        # Whoever has one database does not load what many need.
        from eventsql_orchestration.sharded.decisions import Decisions  # noqa: PLC0415

        return Decisions(lambda: {str(name): ledger.platform for name, ledger in self._ledgers.items()})

    def _first(self) -> str | None:
        """The shard that was there first, whatever was added since; None where there is one database."""
        if not self._sharded:
            return None
        failed: EventSQLError | None = None
        for ledger in self._ledgers.values():
            try:
                return ShardStore(ledger.platform.database).state().first
            except DatabaseUnavailableError as error:
                failed = error
        assert failed is not None, "there are shards"
        raise failed

    def _ledger(self, shard: str | None, option: str) -> Ledger:
        try:
            return self._ledgers[shard]
        except KeyError:
            names = ", ".join(map(str, self._ledgers))
            raise ShardSetError(f"{option}: there is no shard {shard!r} among those that are up, {names}") from None

    # Planning

    def places(self, topic: str | None, headers: Mapping[str, str]) -> tuple[Place, ...]:
        """Where events of one topic, or of any, are staged, as it is now: in one database, or on each shard.

        Raises `TopicNotFoundError`; `ShardError` where shards are missing, and `ShardPendingError` where one that is
        being added takes no events for too long.
        """
        platforms = {name: ledger.platform for name, ledger in self._ledgers.items()}
        return places(self._source, platforms, topic, headers)

    def hold(self, claim_id: int, shard: str | None = None) -> ClaimHold:
        """A claim as it is now, for a commit to come; `shard` is the one that it is of, where there are several.

        Raises `ClaimLostError` for an unknown id, `ShardSetError` for an unknown shard.
        """
        if shard is None and self._sharded:
            raise ConfigurationError(
                f"option claimShard is missing: each shard numbers its claims, name that of claim {claim_id}"
            )
        if shard is not None and not self._sharded:
            raise ConfigurationError("option claimShard cannot be used here: there is one database")
        claim, _ = self._ledger(shard, "option claimShard").platform.claims.get(claim_id)
        return ClaimHold(claim.id, claim.epoch, shard)

    # Publishing

    def publish(
        self,
        writer: str,
        batch: int,
        attempts: Sequence[Attempt],
        claim: ClaimHold | None = None,
        *,
        replayed: bool = False,
    ) -> bool:
        """Publish the events of `attempts`, in that order, unless `writer` has published `batch` before.

        With `claim`, its range is committed in the same transaction. False when there was nothing left to do. With
        `replayed`, a batch that was published before must be the same again: `ConfigurationError` when it has another
        number of events, which would be lost. Raises `ClaimLostError`, `TopicNotFoundError`, `RedefinitionError` or
        `DatabaseError`; then nothing was published. Over several shards also `PublicationUnfinishedError`: it is
        published, and some of its events are not where they are read yet. `DatabaseBusyError` where that holds for a
        publication before this one, on a shard of both.
        """
        given = Batch(writer, batch, tuple(attempts), claim, replayed)
        decider = claim.shard if claim is not None else self._first()
        deciding = self._ledger(decider, "the shard that decides")
        portions = given.portions()
        if portions.keys() <= {decider}:
            if self._sharded and portions and not deciding.recorded(given):
                self._await_earlier(given, portions)
            first = self._publish_alone(deciding, given, portions.get(decider, Portion()))
        else:
            first = self._publish_over(str(decider), deciding, given, portions)
        if self._sharded and not first:
            self._await_finished(deciding, given)
            self.discard(attempts)
        self._sweep(deciding, given)
        return first

    def _publish_alone(self, ledger: Ledger, batch: Batch, portion: Portion) -> bool:
        """Publish in one database, in one transaction."""
        with ledger.platform.database.transaction() as connection:
            # Nobody can write the batch of a writer without a name again, and no part of it is anywhere else.
            once = not self._sharded and UNNAMED.has(batch.writer)
            first = once or ledger.record(connection, batch, uuid.uuid4())
            if first:
                self._publish_own(ledger, connection, batch, portion)
            else:
                ledger.check_repeated(connection, batch)
            # Those of the publication are published, or were copied into the buffer.
            ledger.delete(connection, portion.attempts)
        return first

    def _publish_own(self, ledger: Ledger, connection: psycopg.Connection, batch: Batch, portion: Portion) -> None:
        if portion.events:
            ledger.publish(connection, portion)
        if batch.claim is not None:
            ledger.commit(connection, batch.claim)

    def discard(self, attempts: Sequence[Attempt]) -> None:
        """Give up what these attempts staged, where it is not published and will not be. A sweep takes what is left."""
        for shard, portion in Batch("", 0, tuple(attempts)).portions().items():
            # Whoever gives up has failed before, and is to hear of that, not of a shard that is down now, too.
            with suppress(EventSQLError, psycopg.Error):
                ledger = self._ledger(shard, "what was staged")
                ledger.give_up(portion.attempts)

    def _sweep(self, deciding: Ledger, batch: Batch) -> None:
        try:
            deciding.prune(batch.writer)
            for ledger in self._ledgers.values():
                ledger.sweep()
            if self._sharded:
                self._decisions.finish()
                for ledger in self._ledgers.values():
                    ledger.parts.forget(FORGET_SECONDS)
        except (EventSQLError, psycopg.Error) as error:
            # The events are published, and Spark must not hear otherwise; the next publication sweeps again.
            logger.warning("staged events of dead attempts are left for the next publication: %s", error)

    # Over several shards

    def _publish_over(
        self, decider: str, deciding: Ledger, batch: Batch, portions: Mapping[str | None, Portion]
    ) -> bool:
        if self._is_repeated(deciding, batch):
            return False
        self._await_earlier(batch, portions)
        part = Part(uuid.uuid4(), decider, batch.writer, batch.number)
        others = {str(shard): portion for shard, portion in portions.items() if shard != decider}
        try:
            self._commit_on_all(part, deciding, batch, others, portions.get(decider, Portion()))
        except Exception as error:
            decided = self._is_decided(part, deciding, batch, others)
            if not decided:
                over = decided is None or isinstance(error, _PublishedBeforeError)
                if over and self._is_repeated(deciding, batch):
                    return False
                raise
            logger.warning("%s is decided, and to be finished after: %s", batch, error)
            self._await_finished(deciding, batch)
        else:
            # Otherwise the next who comes finds nothing to do, and does this.
            with suppress(DatabaseError, psycopg.Error):
                deciding.parts.finish(part.id)
        return True

    def _is_repeated(self, deciding: Ledger, batch: Batch) -> bool:
        """Whether the batch was published before. Raises where it was another one."""
        if not deciding.recorded(batch):
            return False
        with deciding.platform.database.connection() as connection:
            deciding.check_repeated(connection, batch)
        return True

    def _commit_on_all(
        self, part: Part, deciding: Ledger, batch: Batch, others: Mapping[str, Portion], own: Portion
    ) -> None:
        """Prepare what the others get, place the events of all, commit on the one that decides, then on the others.

        Whatever raises before the first commit rolls all of them back, whatever does after it those that are left.
        """
        with ExitStack() as following, deciding.platform.database.transaction() as connection:
            deciding.parts.bound(connection)
            deciding.parts.attend(connection, part.id)
            deciding.parts.announce(part, list(others), owner_name())
            for shard, portion in others.items():
                self._ledger(shard, "what was staged").prepare(part, portion)
                # It would be ended as idle where all of them together take long, here and in what follows.
                deciding.parts.bound(connection)
            for shard, portion in others.items():
                self._place(part, batch, self._ledgers[shard], portion, following)
                deciding.parts.bound(connection)
            if not deciding.record(connection, batch, part.id):
                raise _PublishedBeforeError
            if not deciding.parts.decide(connection, part.id):
                raise _given_up(batch)
            self._publish_own(deciding, connection, batch, own)
            deciding.delete(connection, own.attempts)

    def _place(self, part: Part, batch: Batch, ledger: Ledger, portion: Portion, following: ExitStack) -> None:
        """Publish what a shard has of a publication, in a transaction that `following` ends."""
        connection = following.enter_context(ledger.platform.database.transaction())
        ledger.parts.bound(connection)
        missing = ledger.parts.publish(connection, part.id)
        if missing is None:
            raise _given_up(batch)
        ledger.check_topics(connection, portion)
        if missing:
            raise swept()

    def _is_decided(self, part: Part, deciding: Ledger, batch: Batch, others: Iterable[str]) -> bool | None:
        """Whether a publication that failed takes place; gives it up where that can still be said.

        None where somebody else has given it up.
        """
        try:
            given_up = deciding.parts.give_up(part.id, patience=FINISH_SECONDS)
            # Once it is finished, only the record tells.
            if not given_up and (deciding.parts.is_decided(part.id) or deciding.parts.took_place(part)):
                return True
        except EventSQLError as error:
            logger.warning("whether %s takes place is found out by the next publication: %s", batch, error)
            return False
        for shard in others:
            # Its blocks are discarded with those of every write that fails; else both are swept.
            with suppress(EventSQLError):
                self._ledgers[shard].parts.give_part_up(part.id, patience=GIVE_UP_SECONDS)
        return False if given_up else None

    def _await_earlier(self, batch: Batch, portions: Mapping[str | None, Portion]) -> None:
        """Publish what is decided and not finished on a shard of this batch: its events come before these.

        Raises `DatabaseBusyError`, and then nothing of this batch is published.
        """
        patience = Patience(FINISH_SECONDS)
        while left := self._earlier(portions):
            if not patience.lasts():
                raise DatabaseBusyError(
                    f"{batch} was not published, because {'; '.join(map(str, left))}: its events come first; write "
                    "again when the shard takes them"
                )

    def _earlier(self, portions: Mapping[str | None, Portion]) -> list[Unfinished]:
        """What is decided, and could not be finished on a shard of these."""
        unfinished = self._decisions.finish()
        return [each for each in unfinished if each.decided and not portions.keys().isdisjoint(each.shards)]

    def _await_finished(self, deciding: Ledger, batch: Batch) -> None:
        """Publish what is left of a batch that is decided. Raises `PublicationUnfinishedError`."""
        patience = Patience(FINISH_SECONDS)
        while left := self._left(deciding, batch):
            if not patience.lasts():
                raise PublicationUnfinishedError(
                    f"{batch} is published, and some of its events are not where they are read yet: {'; '.join(left)}; "
                    "the same write again, or `eventsql transfer` with the URLs of all shards, finishes it"
                )

    def _left(self, deciding: Ledger, batch: Batch) -> list[str]:
        """Why a batch that is decided could not be finished; nothing where it is."""
        reasons = {each.id: each.reason for each in self._decisions.finish(patience=1.0)}
        try:
            return [
                reasons.get(each.id, "it is being finished")
                for each in deciding.parts.announced()
                if each.decided and (each.writer, each.batch) == (batch.writer, batch.number)
            ]
        except EventSQLError as error:
            return [str(error)]


class _PublishedBeforeError(Exception):
    """Internal: another publication of the same batch was faster."""


def _given_up(batch: Batch) -> RedefinitionError:
    return RedefinitionError(
        f"{batch} was given up, because a shard is being added, a topic repartitioned, or it took too long: nothing "
        "was published, write again"
    )
