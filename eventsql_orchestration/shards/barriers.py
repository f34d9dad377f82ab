"""Holding consumers of a shard that joined back, until the shards that were there before are consumed up to then.

The keys that moved to it have their older events on the other shards, before the fences there. A consumer that reads
everything again, from the beginning or from another place, is held back anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A consumer that gets no events from `shard` before it has consumed those of `waits_for` up to their fences."""

    topic: str
    consumer: str
    shard: str
    waits_for: tuple[str, ...]


class Gates:
    """Holds consumers back on shards that joined, and lets them go."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def joined(self) -> list[Member]:
        """The shards that were not there from the beginning."""
        return [member for member in self._members.known() if self._members.generation_of(member)]

    def settle(self) -> list[HeldBack]:
        """Let go the consumers that have come to the fences of the other shards; gives those that have not."""
        left: list[HeldBack] = []
        for member in self.joined():
            if member.down is not None:
                continue
            with self._members.using(member):
                held = member.store.held()
                if not held:
                    continue
                with member.store.gate(wait=False) as mine:
                    for topic, consumer in held:
                        waits_for = self._waits_for(member, topic, consumer)
                        if mine and not waits_for:
                            member.store.let_go(topic, consumer)
                            logger.info("consumer %r of topic %r goes on with shard %r", consumer, topic, member.name)
                            member.platform.announce([topic])
                        elif waits_for:
                            left.append(HeldBack(topic, consumer, member.name, waits_for))
        return left

    def _waits_for(self, member: Member, topic: str, consumer: str) -> tuple[str, ...]:
        joined = self._members.state.before(member.name)
        if joined is None:
            return ()
        generation, before = joined
        return tuple(
            name
            for name in sorted(before)
            if not self._consumed(self._members.named(name), generation, topic, consumer)
        )

    def _consumed(self, member: Member, generation: int, topic: str, consumer: str) -> bool:
        if member.down is not None:
            return False
        try:
            with self._members.using(member):
                return member.store.consumed_before(generation, topic, consumer)
        except DatabaseUnavailableError:
            return False

    @contextmanager
    def moving(self, topic: str, consumer: str) -> Iterator[None]:
        """The block moves a consumer: it is held back on the shards that joined, until `settle` lets it go."""
        with ExitStack() as stack:
            for member in self.joined():
                stack.enter_context(member.store.gate())
                member.store.hold(topic, consumer)
            yield
            for member in self.joined():
                # Where the topic's partitions have changed there, the move itself has said how far it may go.
                member.store.hold(topic, consumer)
        self.settle()
