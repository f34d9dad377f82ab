"""Which shards the events of a batch go to."""

from __future__ import annotations

from collections.abc import Iterable

from eventsql_orchestration.model import Publication
from eventsql_orchestration.sharded.members import Members
from eventsql_orchestration.sharded.registry import ShardedRegistry


class Placing:
    """Chooses the shards of events; those of one batch that have no key go to one shard."""

    def __init__(self, members: Members, registry: ShardedRegistry) -> None:
        self.members = members
        self._registry = registry
        self.shards = members.open()
        self._keyless: str | None = None
        self._topics: set[str] = set()

    def refresh(self) -> None:
        self.shards, self._keyless = self.members.open(), None

    def groups(self, publications: Iterable[Publication]) -> dict[str, list[Publication]]:
        """Events by the names of their shards, in order."""
        owner, groups, keyless = self.shards.owner, dict[str, list[Publication]](), list[Publication]()
        for publication in publications:
            if publication.topic not in self._topics:
                self._registry.check_same(publication.topic)
                self._topics.add(publication.topic)
            if publication.key is None:
                keyless.append(publication)
            else:
                name = owner(publication.key)
                try:
                    groups[name].append(publication)
                except KeyError:
                    groups[name] = [publication]
        if not keyless:
            return groups
        if self._keyless is None:
            self._keyless = self._of_keyless(groups)
        if groups.get(self._keyless):
            # In the order that they had, on the shard that they share.
            mine = set(map(id, groups[self._keyless])) | set(map(id, keyless))
            groups[self._keyless] = [each for each in publications if id(each) in mine]
        else:
            groups[self._keyless] = keyless
        return groups

    def _of_keyless(self, groups: dict[str, list[Publication]]) -> str:
        """A shard of the others where one takes events and can be reached, so that there is no further commit."""
        for name in groups:
            member = self.members.named(name)
            if member.active and member.down is None:
                return name
        return self.members.any().name
