"""Seeking, erasure, compaction, retention, repartitioning and lag, on one database or over several shards."""

from __future__ import annotations

import threading
import time
from builtins import list as list_of
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.client.registry import ClusterRegistry
from eventsql_orchestration.consuming.lag import ConsumerLag, LagCause
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    EventSQLError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.maintenance.compaction import Compaction
from eventsql_orchestration.maintenance.erasure import Erasure, ErasureRecord
from eventsql_orchestration.maintenance.repartitioning import RETRY_SECONDS, Repartitioning
from eventsql_orchestration.maintenance.retention import RUN_SECONDS, Dropped
from eventsql_orchestration.maintenance.seek import Move
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.shards.barriers import Barriers, HeldBack
from eventsql_orchestration.shards.bootstrap import unnamed
from eventsql_orchestration.shards.cluster import ONE_SHARD, Cluster
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.two_phase_coordinator import SUPERSEDED_SECONDS, TwoPhaseCoordinator, Unfinished
from eventsql_orchestration.threads import Wake, start_thread
from eventsql_orchestration.topics.catalog import choose_partitions
from eventsql_orchestration.topics.positions import AtOffset, Position
from eventsql_orchestration.validation import Duration, in_seconds


@checked
class ClusterSeeker:
    """Moves a consumer to another position. Several shards move it one after the other."""

    def __init__(self, cluster: Cluster, registry: ClusterRegistry, barriers: Barriers) -> None:
        self._cluster = cluster
        self._lone = None if cluster.lone is None else cluster.lone.seeker
        self._registry = registry
        self._barriers = barriers

    def plan(self, topic: str, consumer: str, position: Position, *, partition: int | None = None) -> list[Move]:
        """The moves that `execute` would make now, in one partition or in all. Changes nothing.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `PartitionOutOfRangeError`.
        """
        if self._lone is not None:
            return self._lone.plan(topic, consumer, position, partition=partition)
        self._check(topic, consumer, position, partition)
        planned = self._cluster.each_up(lambda shard: shard.seeker.plan(topic, consumer, position, partition=partition))
        return [replace(move, shard=shard.label) for shard, moves in planned for move in moves]

    def execute(
        self, topic: str, consumer: str, position: Position, *, partition: int | None = None, force: bool = False
    ) -> list[Move]:
        """Move a consumer to `position`, in one partition or in all at once. Gives the moves.

        Running and later consumptions go on from the new position. The failures of the failing event are forgotten, and
        an uncommitted claim is released. The counts of consumed events stay, because they count handlings.

        Waits at most 10 seconds for batches under way, then raises `DatabaseBusyError`. Raises `PartitionLeasedError`
        if somebody leases a partition. With `force`, that owner is fenced off instead and cannot commit any more.
        Raises `ValidationError` in a handler that it would wait for, otherwise as `plan`. If it raises, no partition of
        the shard has moved.

        All shards must be up. If a shard fails, the error says which shards have moved the consumer. If shards were
        added, the consumer gets the events of the new shards after it has consumed the older events of the old shards:
        a key's events come in their order again.
        """
        if self._lone is not None:
            return self._lone.execute(topic, consumer, position, partition=partition, force=force)
        self._check(topic, consumer, position, partition)
        with self._barriers.moving(topic, consumer):
            done = self._cluster.fan_out(
                lambda shard: shard.seeker.execute(topic, consumer, position, partition=partition, force=force)
            )
        return [replace(each, shard=shard.label) for shard, moves in done.items() for each in moves]

    def _check(self, topic: str, consumer: str, position: Position, partition: int | None) -> None:
        if isinstance(position, AtOffset):
            raise ValidationError(f"each shard counts its offsets by itself: seek to a time, or {ONE_SHARD}")
        states = self._registry.consumer(topic, consumer)
        choose_partitions([state for state in states if state.shard == states[0].shard], partition)


@checked
class ClusterEraser:
    """Erases the values and metadata of the events of keys, for example because a person demands it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def plan(self, topic: str, keys: Collection[str]) -> Erasure:
        """Count the events that `execute` would erase, without writing. Raises as `execute`."""
        return self._on_all(topic, lambda shard: shard.eraser.plan(topic, keys))

    def execute(self, topic: str, keys: Collection[str], *, requested_by: str | None = None) -> Erasure:
        """Erase the events of `topic` with one of `keys`, at most 1,000 keys: in the log, the buffer and staged blocks,
        and their dead letters in `{topic}_dlt`. Gives what was erased now.

        Their values are empty then, and their metadata is `{"eventsql_erased": TIME}`, with the cause of a dead letter.
        Keys, offsets, partitions and times stay. Events that are published while it runs may stay: call it when the
        key is not published any more. Publishers, transfers and consumers go on. If it is interrupted, each event is
        erased or not; call it again, and it goes on. `requested_by` is a note for the record, such as a ticket.

        All shards must be up. Raises `TopicNotFoundError`, `ValidationError`, and `DatabaseBusyError` if other
        transactions are in the way for 30 seconds, or if the topic got a dead letter topic meanwhile: call it again.
        Raises `ShardSetError` on a platform with the URL of one of several shards: a key's events may be on other
        shards.
        """
        return self._on_all(topic, lambda shard: shard.eraser.execute(topic, keys, requested_by=requested_by))

    def _on_all(self, topic: str, run: Callable[[Shard], Erasure]) -> Erasure:
        lone = self._cluster.lone
        shards = None if lone is None else lone.registry.topic(topic).shards
        if shards is not None and len(shards.names) > 1:
            raise unnamed(shards.names, {shards.own})
        first, *others = self._cluster.fan_out(run).values()
        for each in others:
            first = replace(
                first, events=first.events + each.events, buffered=first.buffered + each.buffered,
                dead_letters=first.dead_letters + each.dead_letters, vacuumed=first.vacuumed and each.vacuumed,
            )  # fmt: skip
        return first

    def records(self, topic: str | None = None, *, key: str | None = None, limit: int = 100) -> list_of[ErasureRecord]:
        """The newest records of erasures, of a topic or a key or of all. They stay for ten years, even if the topic is
        deleted.
        """
        found: list_of[ErasureRecord] = []
        for shard, records in self._cluster.each_up(lambda shard: shard.eraser.records(topic, key=key, limit=limit)):
            found += [replace(each, shard=shard.name) for each in records]
        return sorted(found, key=lambda record: record.started_at, reverse=True)[:limit]


@checked
class ClusterCompactor:
    """Merges the small blocks that single publications leave in a log in blocks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def plan(self, topic: str) -> Compaction:
        """Count the blocks that `execute` would merge, without writing. Raises as `execute`."""
        return self._merged(self._cluster.fan_out(lambda shard: shard.compactor.plan(topic)))

    def execute(self, topic: str) -> Compaction:
        """Merge the small blocks of `topic` into larger ones. Events keep their offsets, times and contents.

        Publishers, transfers and consumers go on. The newest 20,000 offsets of a log may stay as they are. If it is
        interrupted, call it again. Retention compacts all topics, too, some seconds at a time.

        A segment whose table is much larger than its blocks is written anew, so that the disk has the space again. If
        it is the newest segment, new events get offsets of the next segment. Other transactions may then have to wait
        several times within 10 seconds, half a second each time. While a transaction reads the log for longer, the
        segment stays as it is.

        Blocks around a broken block are left as they are: `unmerged` of the result names them.

        All shards must be up. Raises `TopicNotFoundError`, `RegistryError` for a topic in rows, and `DatabaseBusyError`
        if an erasure or a retention is in the way for 30 seconds.
        """
        return self._merged(self._cluster.fan_out(lambda shard: shard.compactor.execute(topic)))

    def _merged(self, found: Mapping[Shard, Compaction]) -> Compaction:
        first, *others = found.values()
        for each in others:
            into = None if first.into is None or each.into is None else first.into + each.into
            freed = None if first.freed is None or each.freed is None else first.freed + each.freed
            first = replace(
                first, blocks=first.blocks + each.blocks, events=first.events + each.events, into=into, freed=freed,
                unmerged=first.unmerged + each.unmerged,
            )  # fmt: skip
        return first


@checked
class ClusterRepartitioner:
    """Changes the number of a topic's partitions.

    Several shards change one after the other. Keys stay on their shard, and in order there.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._coordinator = TwoPhaseCoordinator(cluster.reachable)

    def repartition(self, topic: str, partitions: int, *, timeout: Duration = RETRY_SECONDS) -> Repartitioning | None:
        """Give a partitioned topic another number of partitions, more or fewer. None if it has that number already.

        Publishers and consumers go on meanwhile. The change takes effect at one offset of the log: events up to there
        have partitions by the old number, later events by the new number. A publisher that knows the old number notices
        in its transaction and chooses again. A partitioned consumer consumes all old partitions up to that offset
        before it goes on with the new partitions, so each key's events stay in order.

        Tries for up to `timeout` seconds while batches or publishers' transactions are under way. Each attempt makes
        other partitions wait for at most three seconds, and other publishers for half a second. Raises
        `DatabaseBusyError`, with nothing changed, if no attempt succeeds. Raises `TopicNotFoundError`,
        `RedefinitionError` for a topic that is not partitioned, `ValidationError`.

        With several shards, gives the result of the last shard that changed. Earlier publications over several shards
        come first, on all of them; if they are not finished in `timeout` seconds, nothing is changed. If a later shard
        fails, the shards before it have changed: call this again.
        """
        if self._cluster.lone is not None:
            return self._cluster.lone.repartitioner.repartition(topic, partitions, timeout=timeout)

        # Wait before the first shard changes, and only if all shards are up.
        await_finished = cache(lambda: self._await_finished(topic, in_seconds(timeout)))

        def change(shard: Shard) -> Repartitioning | None:
            await_finished()
            return shard.repartitioner.repartition(topic, partitions, finish=self._finish, timeout=timeout)

        done = self._cluster.fan_out(change)
        return next((change for change in reversed(list_of(done.values())) if change is not None), None)

    def _finish(self) -> list_of[Unfinished]:
        return self._coordinator.finish(abandoned_after=SUPERSEDED_SECONDS)

    def _await_finished(self, topic: str, timeout: float) -> None:
        """Wait until the publications that are announced now are finished or given up."""
        retry = Backoff(timeout)
        left = self._finish()
        # Each shard's repartitioning waits for publications that are announced later.
        known = {each.id for each in left}
        while left:
            if not retry.lasts():
                raise DatabaseBusyError(
                    f"topic {topic!r} keeps its partitions on all shards: {'; '.join(map(str, left))}; try again when "
                    "`eventsql shard status` shows no unfinished publication"
                )
            left = [each for each in self._finish() if each.id in known]


class ClusterLag:
    """The lag of consumers, with rows for shards that are down."""

    def __init__(self, cluster: Cluster, barriers: Barriers) -> None:
        self._cluster = cluster
        self._barriers = barriers

    def read(self, topic: str | None) -> list[ConsumerLag]:
        """The lag, by topic, consumer, shard and partition. Raises `TopicNotFoundError`, and if no shard is up."""
        if self._cluster.lone is not None:
            return self._cluster.lone.lag(topic)
        # Settle first: a consumer that is released now is not shown as held back.
        held = {(each.topic, each.consumer, each.shard): each for each in self._barriers.settle()}
        lags: list[ConsumerLag] = []
        for shard in self._cluster.up():
            try:
                with self._cluster.using(shard):
                    lags += [replace(lag, shard=shard.label) for lag in shard.lag(topic)]
            except DatabaseUnavailableError:
                # It is shown as unreachable. Raises if no shard is left.
                self._cluster.up()
            except TopicNotFoundError:
                if shard.active:
                    raise
        for shard in self._cluster.members():
            if shard.down is not None:
                lags += self._unreachable(shard, lags)
        return sorted(
            (self._held_back(lag, held.get((lag.topic, lag.consumer, lag.shard or ""))) for lag in lags),
            key=lambda lag: (lag.topic, lag.consumer, lag.shard or "", lag.partition),
        )

    def _unreachable(self, shard: Shard, others: Iterable[ConsumerLag]) -> list[ConsumerLag]:
        """The partitions of a shard that is down, known from the other shards; their lag is not known."""
        partitions = sorted({(lag.topic, lag.consumer, lag.partition) for lag in others})
        down = time.monotonic() - shard.down_since
        return [
            ConsumerLag(
                topic, consumer, partition, 0, down, 0, 0, 0, LagCause.UNREACHABLE, str(shard.down), shard.label
            )
            for topic, consumer, partition in partitions
        ]

    def _held_back(self, lag: ConsumerLag, held: HeldBack | None) -> ConsumerLag:
        if held is None or lag.cause is not LagCause.HELD_BACK:
            return lag
        down = {shard.label for shard in self._cluster.known() if shard.down is not None}
        if not held.waits_for:
            return replace(lag, detail="until a process that consumes or transfers on all shards releases it")
        names = ", ".join(f"{name} (down)" if name in down else name for name in held.waits_for)
        return replace(lag, detail=f"until it has consumed the earlier events on {names}")

    def buffered(self) -> dict[str, int]:
        """The number of events of each topic that wait in the buffer; topics without buffered events are left out."""
        counts: Counter[str] = Counter()
        for _, found in self._cluster.each_up(lambda shard: shard.buffered()):
            counts.update(found)
        return dict(counts)


@checked
class ClusterRetainer:
    """Drops events that their topic's retention no longer keeps. The retention applies to each shard separately."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def run_once(
        self, topics: Iterable[str] | None = None, *, force: bool = False, execute: bool = True
    ) -> list[Dropped]:
        """Drop the due segments of `topics`, or of all topics with a retention. Gives what was dropped by topic.

        A segment that a registered consumer has not passed stays, unless `force` is set; the consumer loses its events
        then. Closes the current segment when it holds an eighth of the events to keep. With `execute=False`, nothing
        changes.

        Raises the first error of a shard after the other shards are done: `TopicNotFoundError`, or `DatabaseBusyError`
        if a transaction reads a segment for too long. The next run continues.
        """
        wanted = None if topics is None else list(topics)
        failed: list[EventSQLError] = []

        def run(shard: Shard) -> list[Dropped]:
            try:
                return shard.retention.run_once(wanted, force=force, execute=execute)
            except DatabaseUnavailableError:
                raise
            except EventSQLError as error:
                failed.append(error)
                return []

        done = self._cluster.each_up(run)
        if failed:
            raise failed[0]
        return [replace(each, shard=shard.name) for shard, dropped in done for each in dropped]

    def held(self) -> dict[str, str]:
        """A consumer that keeps events beyond their retention, by topic. A look that waits for nobody.

        A role that may read logs, but not their segments alone, sees none.
        """
        found = self._cluster.each_up(lambda shard: shard.retention.held())
        return {topic: consumer for _, held in found for topic, consumer in held.items()}

    def run(self, stop: threading.Event, *, every: Duration = RUN_SECONDS) -> None:
        """Run once every `every` seconds until `stop` is set. Each shard has a thread, also a shard that joins."""
        running: dict[Shard, threading.Thread] = {}
        ending = Wake()
        try:
            while not stop.is_set():
                for shard in self._cluster.shards:
                    if shard not in running:
                        running[shard] = start_thread("retention", shard.retention.run, ending, every=every)
                stop.wait(1.0)
        finally:
            ending.set()
        for thread in running.values():
            thread.join()
