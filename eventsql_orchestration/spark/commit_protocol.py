"""The commit protocol of writes: publishes staged blocks once for each batch of a writer.

On one database, one transaction publishes. Over several shards there is a transaction on each, and one of them decides:
on the shard of the committed claim, or else on the set's first shard, whatever was added since. It records (writer,
batch), and its commit publishes the events of all shards.

1. The deciding transaction begins and takes the publication's lock. If it ends without deciding, nobody else decides.
2. The publication is announced, and the blocks of each other shard are prepared: no crash and no sweep deletes them.
3. A transaction on each other shard publishes its part, and keeps topics and shards from changing.
4. The deciding transaction commits, then the others. If one of them cannot, anybody publishes its prepared part
   (`shards/two_phase_coordinator.py`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import psycopg

from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consuming.leases import owner_name
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseBusyError,
    DatabaseError,
    EventSQLError,
    PublicationUnfinishedError,
    RedefinitionError,
    ShardSetError,
)
from eventsql_orchestration.publishing.staged_blocks import missing_blocks
from eventsql_orchestration.publishing.two_phase_participant import PublicationPart
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.shards.shard_state import first_shard
from eventsql_orchestration.spark.commit_log import UNNAMED, Batch, CommitLog, Portion, portions_of, unnamed
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt, ClaimHold, StreamBatch, WriteTarget
from eventsql_orchestration.spark.write_targets import write_targets

if TYPE_CHECKING:
    from eventsql_orchestration.shards.two_phase_coordinator import TwoPhaseCoordinator

logger = logging.getLogger(__name__)

FINISH_SECONDS: Final = 10.0
"""How long to try to publish the parts of a decided publication. The next publication on the same shards tries for the
same time."""

GIVE_UP_SECONDS: Final = 0.25
"""How long to wait for each part of a publication that was given up. The next publication gives it up, too."""

_STAGED: Final = "the shard of staged events"


class Publications:
    """Publishes what was staged. Use one object for one commit, and close it or use it as a context manager."""

    def __init__(self, source: Source) -> None:
        self._platform = EventSQL(*source.urls, schema=source.schema, migrate=False, transfer=False)
        self._sharded = len(source.urls) > 1
        self._opened: dict[str | None, CommitLog] = {}

    def __enter__(self) -> Publications:
        return self

    def __exit__(self, *_: object) -> None:
        self._platform.close()

    @property
    def _logs(self) -> Mapping[str | None, CommitLog]:
        """The commit log of each shard by name, or of one database by None."""
        if not self._opened:
            if self._sharded:
                # A shard that is down may have no name yet.
                shards = self._platform.open().shards
                self._opened = {each.name: CommitLog(each) for each in shards if each.name is not None}
            else:
                self._opened = {None: CommitLog(self._platform.shards[0])}
        return self._opened

    @property
    def _coordinator(self) -> TwoPhaseCoordinator:
        # One database needs no coordinator.
        from eventsql_orchestration.shards.two_phase_coordinator import TwoPhaseCoordinator  # noqa: PLC0415

        return TwoPhaseCoordinator(lambda: {str(name): log.shard for name, log in self._logs.items()})

    def _first(self) -> str | None:
        """The set's first shard, whatever was added since. None for one database."""
        return first_shard(log.shard.database for log in self._logs.values()) if self._sharded else None

    def _log_of(self, shard: str | None, option: str) -> CommitLog:
        try:
            return self._logs[shard]
        except KeyError:
            names = ", ".join(map(str, self._logs))
            raise ShardSetError(f"{option}: shard {shard!r} does not exist or is down; these are up: {names}") from None

    # Planning

    def write_targets(self, topic: str | None, headers: Mapping[str, str]) -> tuple[WriteTarget, ...]:
        """The targets for staging events of one topic, or of any topic: one database, or each shard.

        Raises `TopicNotFoundError`, `ShardError` if shards are missing, `ShardPendingError` if a shard that is being
        added takes no events for too long.
        """
        return write_targets({name: log.shard for name, log in self._logs.items()}, topic, headers)

    def hold(self, claim_id: int, shard: str | None = None) -> ClaimHold:
        """A claim as it is now, to be committed later. `shard` is its shard, if there are several.

        Raises `ClaimNotFoundError`, and `ShardSetError` for an unknown shard.
        """
        if shard is None and self._sharded:
            raise ConfigurationError(
                f"option claimShard is missing: name the shard of claim {claim_id}; each shard numbers its own claims"
            )
        if shard is not None and not self._sharded:
            raise ConfigurationError("option claimShard cannot be used here: there is one database")
        claim, _ = self._log_of(shard, "option claimShard").shard.claims.get(claim_id)
        return ClaimHold(claim.id, claim.epoch, shard)

    # Publishing

    def publish(
        self,
        writer: str | None,
        batch: int,
        attempts: Sequence[Attempt],
        claim: ClaimHold | None = None,
        *,
        stream: StreamBatch | None = None,
    ) -> bool:
        """Publish the events of `attempts`, in that order, unless `writer` has published `batch` before.

        Without a `writer`, a new writer publishes. Gives whether this call published them. With `claim`, the same
        transaction commits its range. With `stream`, a batch that was published before must be the same:
        `ConfigurationError` if it has other events, which would be lost.

        Raises `ClaimLostError`, `TopicNotFoundError`, `RedefinitionError` or `DatabaseError`; nothing was published
        then. Over several shards also `PublicationUnfinishedError`: the batch is published, but some of its events
        cannot be read yet; and `DatabaseBusyError` if an earlier publication on one of its shards is in that state.
        """
        given = Batch(writer or unnamed(), batch, tuple(attempts), claim, stream)
        decider = claim.shard if claim is not None else self._first()
        deciding = self._log_of(decider, "the shard that decides")
        portions = portions_of(attempts)
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

    def _publish_alone(self, log: CommitLog, batch: Batch, portion: Portion) -> bool:
        """Publish in one database, in one transaction."""
        with log.shard.database.transaction() as connection:
            # An unnamed writer never repeats its batch, and the batch has no other part.
            once = not self._sharded and UNNAMED.has(batch.writer)
            first = once or log.record(connection, batch, uuid.uuid4())
            if first:
                self._publish_own(log, connection, batch, portion)
            else:
                log.check_repeated(connection, batch)
            # The blocks are published now, or their events were copied into the buffer.
            log.delete(connection, portion.attempts)
        return first

    def _publish_own(self, log: CommitLog, connection: psycopg.Connection, batch: Batch, portion: Portion) -> None:
        if portion.events:
            log.publish(connection, portion)
        if batch.claim is not None:
            log.commit(connection, batch.claim)

    def discard(self, attempts: Sequence[Attempt]) -> None:
        """Delete the blocks of attempts, unless they are published or prepared. A sweep deletes the rest."""
        for shard, portion in portions_of(attempts).items():
            # The caller reports an earlier error, not a shard that is down now.
            with suppress(EventSQLError, psycopg.Error):
                log = self._log_of(shard, _STAGED)
                with log.shard.database.connection() as connection:
                    log.delete(connection, portion.attempts)

    def _sweep(self, deciding: CommitLog, batch: Batch) -> None:
        try:
            deciding.prune(batch.writer)
            for log in self._logs.values():
                log.sweep()
            if self._sharded:
                self._coordinator.finish()
                for log in self._logs.values():
                    log.parts.forget()
        except (EventSQLError, psycopg.Error) as error:
            # The events are published, so Spark must see no error. The next publication sweeps again.
            logger.warning("staged events of dead attempts are not deleted yet, the next write tries again: %s", error)

    # Over several shards

    def _publish_over(
        self, decider: str, deciding: CommitLog, batch: Batch, portions: Mapping[str | None, Portion]
    ) -> bool:
        if self._is_repeated(deciding, batch):
            return False
        self._await_earlier(batch, portions)
        part = PublicationPart(uuid.uuid4(), decider, batch.writer, batch.number)
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
            logger.warning("%s is decided; finishing it after an error: %s", batch, error)
            self._await_finished(deciding, batch)
        else:
            # If this fails, the next publication does it.
            with suppress(DatabaseError, psycopg.Error):
                deciding.parts.finish(part.id)
        return True

    def _is_repeated(self, deciding: CommitLog, batch: Batch) -> bool:
        """Whether the batch was published before. Raises if that was another batch."""
        if not deciding.recorded(batch):
            return False
        with deciding.shard.database.connection() as connection:
            deciding.check_repeated(connection, batch)
        return True

    def _commit_on_all(
        self, part: PublicationPart, deciding: CommitLog, batch: Batch, others: Mapping[str, Portion], own: Portion
    ) -> None:
        """Prepare the other parts, publish all parts, commit the deciding transaction, then the others.

        An error before the first commit rolls back all of them; an error after it rolls back the rest.
        """
        with ExitStack() as following, deciding.shard.database.transaction() as connection:
            deciding.parts.limit_transaction(connection)
            deciding.parts.lock_publication(connection, part.id)
            deciding.parts.announce(part, list(others), owner_name())
            for shard, portion in others.items():
                self._log_of(shard, _STAGED).prepare(part, portion)
                # A statement, so that the server does not end the deciding transaction as idle.
                deciding.parts.limit_transaction(connection)
            for shard, portion in others.items():
                self._publish_part(part, batch, self._logs[shard], portion, following)
                deciding.parts.limit_transaction(connection)
            if not deciding.record(connection, batch, part.id):
                raise _PublishedBeforeError
            if not deciding.parts.decide(connection, part.id):
                raise _given_up(batch)
            self._publish_own(deciding, connection, batch, own)
            deciding.delete(connection, own.attempts)

    def _publish_part(
        self, part: PublicationPart, batch: Batch, log: CommitLog, portion: Portion, following: ExitStack
    ) -> None:
        """Publish a shard's part, in a transaction that `following` ends."""
        connection = following.enter_context(log.shard.database.transaction())
        log.parts.limit_transaction(connection)
        missing = log.parts.publish(connection, part.id)
        if missing is None:
            raise _given_up(batch)
        log.check_topics(connection, portion)
        if missing:
            raise missing_blocks()

    def _is_decided(
        self, part: PublicationPart, deciding: CommitLog, batch: Batch, others: Iterable[str]
    ) -> bool | None:
        """Whether a publication that failed is decided. Gives it up if that is still possible.

        None if somebody else has given it up. False, with a warning, if the deciding shard cannot be asked.
        """
        try:
            given_up = deciding.parts.give_up(part.id, timeout=FINISH_SECONDS)
            # The record is committed with the decision, and stays after the publication is finished.
            if not given_up and deciding.parts.took_place(part):
                return True
        except EventSQLError as error:
            logger.warning("whether %s is published is not known until the next write: %s", batch, error)
            return False
        for shard in others:
            # Otherwise the discarded blocks of this write would be missing from an open part.
            with suppress(EventSQLError):
                self._logs[shard].parts.give_part_up(part.id, timeout=GIVE_UP_SECONDS)
        return False if given_up else None

    def _await_earlier(self, batch: Batch, portions: Mapping[str | None, Portion]) -> None:
        """Finish decided publications on the shards of this batch: their events come first.

        Raises `DatabaseBusyError`, with nothing of this batch published.
        """
        backoff = Backoff(FINISH_SECONDS)
        while left := [
            str(each)
            for each in self._coordinator.finish()
            if each.decided and not portions.keys().isdisjoint(each.shards)
        ]:
            if not backoff.lasts():
                raise DatabaseBusyError(
                    f"{batch} was not published, because {'; '.join(left)}. Those events come first: write again when "
                    "the shard takes them"
                )

    def _await_finished(self, deciding: CommitLog, batch: Batch) -> None:
        """Finish a decided batch. Raises `PublicationUnfinishedError`."""
        backoff = Backoff(FINISH_SECONDS)
        while left := self._left(deciding, batch):
            if not backoff.lasts():
                raise PublicationUnfinishedError(
                    f"{batch} is published, and some of its events cannot be read yet: {'; '.join(left)}. To finish, "
                    "write it again, or run `eventsql transfer` with the URLs of all shards"
                )

    def _left(self, deciding: CommitLog, batch: Batch) -> list[str]:
        """Why a decided batch could not be finished; empty if it is finished."""
        reasons = {each.id: each.reason for each in self._coordinator.finish(timeout=1.0)}
        try:
            return [
                reasons.get(each.id, "it is being finished")
                for each in deciding.parts.announced()
                if each.decided and (each.writer, each.batch) == (batch.writer, batch.number)
            ]
        except EventSQLError as error:
            return [str(error)]


class _PublishedBeforeError(Exception):
    """Internal: another publication recorded the same batch first."""


def _given_up(batch: Batch) -> RedefinitionError:
    return RedefinitionError(
        f"{batch} was given up, because a shard is being added, a topic is being repartitioned, or it took too long. "
        "Nothing was published: write again"
    )
