"""Consuming and transferring on all shards: on each by itself, on those that are down when they are back."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    PartitionOutOfRangeError,
)
from eventsql_orchestration.log.consumer import Consumers
from eventsql_orchestration.log.consumption import BatchHandler, EventHandler
from eventsql_orchestration.log.leased import LeasedHandler
from eventsql_orchestration.log.pacing import Paces
from eventsql_orchestration.log.retention import RUN_SECONDS, Dropped, Retainer
from eventsql_orchestration.log.running import MAX_WORKERS, Consumption
from eventsql_orchestration.log.transfer import Transfer
from eventsql_orchestration.rules import Duration
from eventsql_orchestration.sharded.decisions import Decisions
from eventsql_orchestration.sharded.gates import Gates
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members
from eventsql_orchestration.sharded.registry import ShardedRegistry


@checked
class ShardedConsumption(Consumption):
    """A running consumer of this process, on all shards. Shards that are down, or join later, are taken up then."""

    def __init__(self, members: Members, begin: Callable[[Member], Consumption]) -> None:
        self._members = members
        self._begin_on = begin
        self._ending = False
        self._on: dict[Member, Consumption] = {}
        self._taking = threading.Lock()
        try:
            for member in members.up():
                self._take(member)
        except BaseException:
            self.stop()
            raise
        members.attend(self._take_missing)

    def _take(self, member: Member) -> None:
        with self._taking:
            if member not in self._on and not self._ending:
                try:
                    with self._members.using(member):
                        self._on[member] = self._begin_on(member)
                except DatabaseUnavailableError:
                    # Taken up when it is back; where none is there, nothing could be.
                    self._members.up()

    def _take_missing(self) -> None:
        for member in self._members.known():
            if member.down is None and member not in self._on:
                self._take(member)

    def stop(self, timeout: float = 10.0) -> bool:
        self.stop_soon()
        return self.await_end(time.monotonic() + timeout)

    def stop_soon(self) -> None:
        self._members.neglect(self._take_missing)
        with self._taking:
            self._ending = True
        for each in list(self._on.values()):
            each.stop_soon()

    def await_end(self, deadline: float) -> bool:
        # Each of them: what the last ones are at must be rolled back too.
        ended = [each.await_end(deadline) for each in list(self._on.values())]
        return all(ended)

    def __enter__(self) -> ShardedConsumption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


@checked
class ShardedConsumers(Consumers):
    """`Consumers` over shards. `workers` is per shard, and so are the offsets of events.

    A handler that must know its shard is started on each by itself: `for shard in platform.shards:
    shard.consumers.start(topic, consumer, partial(handle, shard.shard))`.
    """

    def __init__(self, members: Members, registry: ShardedRegistry, gates: Gates) -> None:
        self._members = members
        self._sharded = registry
        self._gates = gates
        self.paces = Paces()
        for platform in members.platforms:
            self.join(platform.consumers)
        self._started: weakref.WeakSet[ShardedConsumption] = weakref.WeakSet()

    def join(self, consumers: Consumers) -> None:
        """Have the consumers of a shard keep pace with those of the others."""
        consumers.paces = self.paces

    def start(
        self,
        topic: str,
        consumer: str,
        handler: EventHandler,
        *,
        polling_delay: Duration = 1.0,
        workers: int = MAX_WORKERS,
    ) -> Consumption:
        return self._start_on_all(
            topic,
            consumer,
            lambda member: member.platform.consumers.start(
                topic, consumer, handler, polling_delay=polling_delay, workers=workers
            ),
        )

    def start_batch(
        self,
        topic: str,
        consumer: str,
        handler: BatchHandler,
        *,
        min_events: int = 1,
        max_events: int = 1_000,
        polling_delay: Duration = 1.0,
        max_polling_delay: Duration = 10.0,
        workers: int = MAX_WORKERS,
    ) -> Consumption:
        return self._start_on_all(
            topic,
            consumer,
            lambda member: member.platform.consumers.start_batch(
                topic, consumer, handler, min_events=min_events, max_events=max_events, polling_delay=polling_delay,
                max_polling_delay=max_polling_delay, workers=workers,
            ),
        )  # fmt: skip

    def start_leased(
        self,
        topic: str,
        consumer: str,
        handler: LeasedHandler,
        *,
        lease: Duration = 60.0,
        min_events: int = 1,
        max_events: int = 1_000,
        polling_delay: Duration = 1.0,
        max_polling_delay: Duration = 10.0,
        workers: int = MAX_WORKERS,
    ) -> Consumption:
        return self._start_on_all(
            topic,
            consumer,
            lambda member: member.platform.consumers.start_leased(
                topic, consumer, handler, lease=lease, min_events=min_events, max_events=max_events,
                polling_delay=polling_delay, max_polling_delay=max_polling_delay, workers=workers,
            ),
        )  # fmt: skip

    def _start_on_all(self, topic: str, consumer: str, begin: Callable[[Member], Consumption]) -> Consumption:
        self._sharded.check_same_consumer(topic, consumer)
        started = ShardedConsumption(self._members, begin)
        self._started.add(started)
        self._members.attend(self._gates.settle)
        return started

    def consume_once(
        self, topic: str, consumer: str, handler: BatchHandler, *, partition: int | None = None, max_events: int = 1_000
    ) -> int:
        """One pass over the consumer's partitions on each shard that is up; `partition` is that of every shard."""
        self._gates.settle()
        states = self._sharded.consumer(topic, consumer)
        if partition is not None and partition not in {state.partition for state in states}:
            raise PartitionOutOfRangeError(f"consumer {consumer!r} of topic {topic!r} has no partition {partition}")
        on = {state.shard for state in states if partition is None or state.partition == partition}
        consumed = 0
        for member in self._members.up():
            if member.name in on:
                with self._members.using(member):
                    consumed += member.platform.consumers.consume_once(
                        topic, consumer, handler, partition=partition, max_events=max_events
                    )
        return consumed

    def close(self, timeout: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout
        self._members.neglect(self._gates.settle)
        stopping = list(self._started)
        self._started.clear()
        for each in stopping:
            each.stop_soon()
        ended = [each.await_end(deadline) for each in stopping]
        # What was started on a shard by itself.
        ended += [
            platform.consumers.close(max(0.0, deadline - time.monotonic())) for platform in self._members.platforms
        ]
        return all(ended)


@checked
class ShardedTransfer(Transfer):
    """A `Transfer` over shards. Finishes what was published over several at once, too."""

    def __init__(self, members: Members, gates: Gates) -> None:
        self._members = members
        self._gates = gates
        self.decisions = Decisions(
            lambda: {member.name: member.platform for member in members.known() if member.down is None}
        )

    def run_once(self, topics: Iterable[str] | None = None, *, deadline: float | None = None) -> dict[str, int]:
        """As on one database, on each shard that is up; gives the number of events moved per topic on all together."""
        wanted = None if topics is None else list(topics)
        moved: dict[str, int] = {}
        failed: list[EventSQLError] = []
        self.decisions.finish()
        for member in self._members.up():
            try:
                with self._members.using(member):
                    counts = member.platform.transfer.run_once(wanted, deadline=deadline)
            except DatabaseUnavailableError:
                continue
            except DatabaseError as error:
                failed.append(error)
                continue
            for topic, count in counts.items():
                moved[topic] = moved.get(topic, 0) + count
        if failed:
            raise failed[0]
        self._members.up()
        self._gates.settle()
        return moved

    def run(
        self,
        stop: threading.Event,
        *,
        polling_delay: float | Callable[[], float] = 0.2,
        wake: threading.Event | None = None,  # noqa: ARG002 - each shard has its own
        on_moved: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        """Transfer on every shard until `stop` is set, each in a thread of its own; shards that join are taken up."""
        running: dict[Member, threading.Thread] = {}
        reporting = threading.Lock()

        def report(moved: dict[str, int]) -> None:
            if on_moved is not None:
                with reporting:
                    on_moved(moved)

        while not stop.is_set():
            for member in self._members.known():
                if member not in running:
                    running[member] = threading.Thread(
                        target=member.platform.transfer_until,
                        args=(stop,),
                        kwargs={"polling_delay": polling_delay, "on_moved": report},
                        name=f"eventsql-transfer-{member.name}",
                        daemon=True,
                    )
                    running[member].start()
            self.decisions.finish()
            self._gates.settle()
            stop.wait(1.0)
        for thread in running.values():
            thread.join(10.0)

    def close(self) -> None:
        for platform in self._members.platforms:
            platform.transfer.close()


@checked
class ShardedRetainer(Retainer):
    """A `Retainer` over shards: each keeps of a topic what its retention says."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def run_once(
        self, topics: Iterable[str] | None = None, *, force: bool = False, execute: bool = True
    ) -> list[Dropped]:
        wanted = None if topics is None else list(topics)
        dropped: list[Dropped] = []
        for member in self._members.up():
            with self._members.using(member):
                dropped += member.platform.retention.run_once(wanted, force=force, execute=execute)
        return dropped

    def run(self, stop: threading.Event, *, every: float = RUN_SECONDS) -> None:
        threads = [
            threading.Thread(target=platform.retention.run, args=(stop,), kwargs={"every": every}, daemon=True)
            for platform in self._members.platforms
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
