"""The claims that a task consumes: the claims that triggered its run, the claims that no run comes for, and its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Shard
from eventsql_orchestration.airflow.claim_producer import ClaimEvent
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.errors import ClaimLostError, DatabaseUnavailableError
from eventsql_orchestration.orchestration.drain import Consume, Drained, Draining
from eventsql_orchestration.orchestration.errors import FinalRunError
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.orchestration.owners import AIRFLOW_TRIGGER
from eventsql_orchestration.orchestration.shards import partition_label, rows_of

logger = logging.getLogger("airflow.task")


@dataclass
class TaskClaims:
    """Consumes claims of one consumer: first a range of each partition, then further ranges of each in turn.

    A partition that an event or a range holds up delays no other, nor does a shard that is down. `partition` limits the
    task to one partition. `retried` says that the task was tried before. `consume_on` gives the function that consumes
    on a shard.
    """

    hook: EventSQLHook
    topic: str
    consumer: str
    partition: int | None
    limits: RunLimits
    owner: str
    retried: bool
    consume_on: Callable[[Shard], Consume]
    drained: Drained = field(default_factory=Drained, init=False)
    _drainings: dict[Shard, Draining] = field(default_factory=dict, init=False)
    _begun: dict[Shard, dict[int, None]] = field(default_factory=dict, init=False)
    _down: dict[str, DatabaseUnavailableError] = field(default_factory=dict, init=False)
    _failed: list[FinalRunError] = field(default_factory=list, init=False)

    def of_events(self, requested: Sequence[ClaimEvent], *, alone: bool) -> None:
        """Consume the claims of asset events and, unless `alone`, the claims that may have no run of their own.

        At the end, raises `DatabaseUnavailableError` if the shard of a requested claim is down, and `FinalRunError`.
        """
        left = [] if alone else list(self._left(requested))
        for event in requested:
            self._try(event.shard or self.hook.shards[0].label, self._consume_requested, event)
        down = list(self._down.values())
        for shard, partition, claim in left:
            self._try(shard.label, self._consume_left, shard, partition, claim)
        self._go_on()
        if down:
            raise down[0]
        self._raise_failed()

    def of_waiting(self) -> None:
        """Consume the waiting events of each partition, on each shard that can be reached.

        At the end, raises `DatabaseUnavailableError` if all shards are down, and `FinalRunError`.
        """
        shards = self.hook.shards
        for shard in shards:
            self._try(shard.label, self._consume_waiting, shard)
        if len(self._down) == len(shards):
            raise next(iter(self._down.values()))
        if self._down:
            self.drained.add_note(f"events are left on {', '.join(self._down)}, which cannot be reached")
        self._go_on()
        self._raise_failed()

    def earlier(self, requested: Sequence[ClaimEvent] | None) -> list[dict[str, int | str]]:
        """The ranges that earlier tries of the run have consumed to their ends; of `requested` claims, unless None."""
        ranges: list[dict[str, int | str]] = []
        for shard in self.hook.shards:
            self._try(shard.label, self._add_earlier, shard, requested, ranges)
        return ranges

    def _add_earlier(
        self, shard: Shard, requested: Sequence[ClaimEvent] | None, ranges: list[dict[str, int | str]]
    ) -> None:
        named = None if requested is None else {event.claim for event in requested if event.shard == shard.name}
        mine = {claim.id for claim, _ in self.drained.claims if claim.shard == shard.name}
        span = {"first": datetime.min.replace(tzinfo=UTC), "last": datetime.now(UTC)}
        rows = rows_of(shard, "lineage", "claims_of_run", {"owner": self.owner, **span})
        for claim, topic, consumer, partition, after, upto, events, state in rows:
            if (topic, consumer, state) != (self.topic, self.consumer, "committed") or not self._is_mine(partition):
                continue
            if claim not in mine and (named is None or claim in named):
                of = {} if shard.name is None else {"shard": shard.name}
                place = {"claim": claim, "partition": partition, "after": after, "upto": upto, "events": events}
                ranges.append({**of, **place})

    def _is_mine(self, partition: int) -> bool:
        return self.partition in (None, partition)

    def _try(self, shard: str, consume: Callable[..., None], *given: Any) -> None:
        """Consume on a shard, unless it is down, or the task has lost a claim. Errors wait for the end of the task."""
        if shard in self._down or self.drained.lost is not None:
            return
        try:
            consume(*given)
        except DatabaseUnavailableError as error:
            logger.warning("shard %s is down: %s", shard, error)
            self._down[shard] = error
        except FinalRunError as error:
            logger.error("%s", error)
            self._failed.append(error)

    def _raise_failed(self) -> None:
        if self._failed:
            raise self._failed[0]

    def _go_on(self) -> None:
        """Consume the events that come after the first ranges."""
        for shard, draining in self._drainings.items():
            self._try(shard.label, draining.go_on, self._begun.get(shard, ()))

    def _consume_requested(self, event: ClaimEvent) -> None:
        self._consume(self._draining(self.hook.shard(event.shard)), event.partition, event)

    def _consume_waiting(self, shard: Shard) -> None:
        draining = self._draining(shard)
        for partition in draining.partitions() if self.partition is None else [self.partition]:
            self._try(shard.label, self._consume, draining, partition)

    def _consume_left(self, shard: Shard, partition: int, claim: Claim | None) -> None:
        draining = self._draining(shard)
        if claim is None:
            self._consume(draining, partition)
        # The claim's run may come meanwhile, or the trigger may claim the events again for a new run.
        elif (found := draining.take_over_held(claim)) is not None:
            self._run(draining, found)

    def _consume(self, draining: Draining, partition: int, event: ClaimEvent | None = None) -> None:
        """Take over the claim that triggered the run, or a claim that waits for its run, or claim waiting events."""
        found: Claim | NoClaim | None = None if event is None else self._requested_claim(draining, event)
        named = partition == self.partition
        found = found or draining.take_over_live(partition, self._is_free) or draining.claim(partition, named=named)
        if isinstance(found, Claim):
            self._run(draining, found)
            return
        place = partition_label(self.topic, partition)
        logger.info("nothing to consume of topic %s: %s", place, found.reason)
        if found.waiting is None:
            # Somebody else has the partition, or it has to wait.
            self.drained.add_note(f"topic {place}: {found.reason}")

    def _run(self, draining: Draining, claim: Claim) -> None:
        logger.info("this task consumes %s", claim)
        if draining.consume_one(claim):
            self._begun.setdefault(draining.shard, {})[claim.range.partition] = None

    def _left(self, requested: Sequence[ClaimEvent]) -> Iterator[tuple[Shard, int, Claim | None]]:
        """Claims that may have no run of their own: by partition, the trigger's claim that no task has taken over yet.

        If Airflow stores an asset event, and then a second one before it has made the run for the first, it makes no
        run for the second. The claim of the second is then older than the run of the first, so one look at the
        beginning finds it. In a retry, the result also has the claims of the try before, and the partitions that this
        run had last and that have no claim now, because an event of such a partition may have failed.
        """
        named = {(event.shard, event.partition) for event in requested}
        for shard in self.hook.shards:
            try:
                standings = shard.claims.standings(self._draining(shard).consumer)
            except DatabaseUnavailableError as error:
                logger.warning("shard %s is down: %s", shard.label, error)
                continue
            for standing in standings:
                if (shard.name, standing.partition) in named or not self._is_mine(standing.partition):
                    continue
                claim, last = standing.claim, standing.last
                if claim is not None and self._is_free(claim):
                    yield shard, standing.partition, claim
                elif self.retried and claim is None and last is not None and last.owner == self.owner:
                    yield shard, standing.partition, None

    def _requested_claim(self, draining: Draining, event: ClaimEvent) -> Claim | None:
        with suppress(ClaimLostError):
            claim, _ = draining.shard.claims.get(event.claim)
            # Ids of claims come again in a database that is restored or made anew.
            if self._is_free(claim) and event.names(claim):
                return draining.take_over_held(claim)
        return None

    def _is_free(self, claim: Claim) -> bool:
        """Whether no task has taken a claim over yet, or a try before of this run has.

        The run that the claim is for may never come. Another run or another task of this run would lose its claim.
        """
        return claim.owner == AIRFLOW_TRIGGER or (self.retried and claim.owner == self.owner)

    def _draining(self, shard: Shard) -> Draining:
        if shard not in self._drainings:
            states = shard.registry.consumer(self.topic, self.consumer)
            consumer = Consumer(self.topic, self.consumer, states[0].partition != NOT_PARTITIONED)
            self._drainings[shard] = Draining(
                shard, consumer, self.consume_on(shard), self.limits, self.owner, self.drained
            )
        return self._drainings[shard]
