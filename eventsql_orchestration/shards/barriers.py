"""Barriers: consumers wait on a shard that joined, until they have consumed the older shards up to their fences.

The keys that moved to the new shard have their older events on the other shards, before the fences. A consumer that
seeks waits again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.shard import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A consumer that gets no events from `shard` until it has consumed the shards `waits_for` up to their fences.

    If `waits_for` is empty, the consumer waits for a process that may release it: this process may not write.
    """

    topic: str
    consumer: str
    shard: str
    waits_for: tuple[str, ...]


class Barriers:
    """Holds consumers back on shards that joined, and releases them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _joined(self) -> list[Shard]:
        """The shards that were not there from the beginning."""
        return [shard for shard in self._cluster.known() if self._cluster.generation_of(shard)]

    def settle(self) -> list[HeldBack]:
        """Release consumers that have reached the fences of the other shards; gives the consumers that have not.

        Leaves out shards that are down.
        """
        return self._on_joined(self._settle)

    def release(self) -> None:
        """As `settle`, on the shards whose consumers this process may release: a role of a transfer cannot see them."""
        self._on_joined(lambda shard: self._settle(shard) if shard.store.may_release() else ())

    def _on_joined(self, settle: Callable[[Shard], Iterable[HeldBack]]) -> list[HeldBack]:
        left: list[HeldBack] = []
        for shard in self._joined():
            if shard.down is None:
                with suppress(DatabaseUnavailableError), self._cluster.using(shard):
                    left += settle(shard)
        return left

    def _settle(self, shard: Shard) -> Iterator[HeldBack]:
        held = shard.store.held()
        if not held:
            return
        with shard.store.barrier(wait=False) as mine:
            for topic, consumer in held:
                waits_for = self._waits_for(shard, topic, consumer)
                if waits_for or (mine and not self._release(shard, topic, consumer)):
                    yield HeldBack(topic, consumer, shard.label, waits_for)

    def _release(self, shard: Shard, topic: str, consumer: str) -> bool:
        """Release a consumer; False for a role that only reads, or a read-only server."""
        try:
            shard.store.let_go(topic, consumer)
        except DatabaseUnavailableError:
            raise
        except DatabaseError as error:
            logger.info("consumer %r of topic %r is left to another process: %s", consumer, topic, error)
            return False
        logger.info("consumer %r of topic %r goes on with shard %r", consumer, topic, shard.label)
        shard.announce([topic])
        return True

    def _waits_for(self, shard: Shard, topic: str, consumer: str) -> tuple[str, ...]:
        joined = self._cluster.state.before(shard.label)
        if joined is None:
            return ()
        generation, before = joined
        return tuple(name for name in sorted(before) if not self._consumed(name, generation, topic, consumer))

    def _consumed(self, name: str, generation: int, topic: str, consumer: str) -> bool:
        try:
            shard = self._cluster.named(name)
            if shard.down is not None:
                return False
            with self._cluster.using(shard):
                return shard.store.consumed_before(generation, topic, consumer)
        except DatabaseUnavailableError:
            return False

    @contextmanager
    def moving(self, topic: str, consumer: str) -> Iterator[None]:
        """The block moves a consumer. Shards that joined hold the consumer back until `settle` releases it."""
        with ExitStack() as stack:
            for shard in self._joined():
                stack.enter_context(shard.store.barrier())
                shard.store.hold(topic, consumer)
            yield
            for shard in self._joined():
                # The shard may have joined meanwhile.
                shard.store.hold(topic, consumer)
        self.settle()
