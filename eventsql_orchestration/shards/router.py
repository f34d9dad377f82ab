"""Choose the shards of the events of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eventsql_orchestration.model import Publication
from eventsql_orchestration.shards.cluster import Cluster


class Router:
    """Chooses the shards of a batch's events. All events without a key go to one shard."""

    def __init__(self, cluster: Cluster, check_topic: Callable[[str], object]) -> None:
        """`check_topic` is called once with each topic, and raises if the topic cannot be published to."""
        self._cluster = cluster
        self._check_topic = check_topic
        self.shards = cluster.current()
        self._keyless: str | None = None
        self._topics: set[str] = set()

    def refresh(self) -> None:
        """Choose by the newest set from now on."""
        self.shards, self._keyless = self._cluster.current(), None

    def groups(self, publications: Iterable[Publication]) -> dict[str, list[Publication]]:
        """Events by the name of their shard, in order."""
        owner, groups, keyless = self.shards.owner, dict[str, list[Publication]](), list[Publication]()
        for publication in publications:
            if publication.topic not in self._topics:
                self._check_topic(publication.topic)
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
            # A shard of the other events saves a commit, and the batch waits for it in any case.
            self._keyless = next(iter(groups), None) or self._cluster.any().label
        if groups.get(self._keyless):
            # Events with and without a key share a shard: keep the order of the batch.
            mine = set(map(id, groups[self._keyless])) | set(map(id, keyless))
            groups[self._keyless] = [each for each in publications if id(each) in mine]
        else:
            groups[self._keyless] = keyless
        return groups
