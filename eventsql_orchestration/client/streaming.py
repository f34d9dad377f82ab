"""Publish a batch that is longer than memory over shards: read it while writing to all shards in parallel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Final

from eventsql_orchestration.errors import PartlyPublishedError
from eventsql_orchestration.model import Publication
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.router import Router
from eventsql_orchestration.shards.shard import Shard

_FEED_EVENTS: Final = 500
_FEED_CHUNKS: Final = 8
"""The most chunks of events that wait for a shard's connection."""


class _AbortedError(Exception):
    """Internal: another shard's part of the batch failed, or the caller's iterator failed."""


class _Feed:
    """One shard's part of a batch that is longer than memory: its thread reads the events of the caller's thread."""

    def __init__(self, cluster: Cluster, shard: Shard, placed: ShardSet) -> None:
        self.name = shard.label
        self.error: BaseException | None = None
        self.published = 0
        self._chunks: queue.Queue[list[Publication] | None] = queue.Queue(_FEED_CHUNKS)
        self._pending: list[Publication] = []
        self._aborted = False
        self._thread = threading.Thread(
            target=self._run, args=(cluster, shard, placed), name="eventsql-publish", daemon=True
        )
        self._thread.start()

    def _run(self, cluster: Cluster, shard: Shard, placed: ShardSet) -> None:
        try:
            with cluster.using(shard):
                self.published = shard.publisher.publish_all(self._read(), placed=placed)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            self.error = error

    def _read(self) -> Iterator[Publication]:
        while (chunk := self._chunks.get()) is not None:
            yield from chunk
        if self._aborted:
            raise _AbortedError

    def put(self, publication: Publication) -> None:
        self._pending.append(publication)
        if len(self._pending) >= _FEED_EVENTS:
            self._put(self._pending)
            self._pending = []

    def _put(self, chunk: list[Publication] | None) -> None:
        while True:
            if not self._thread.is_alive():
                raise self.error or _AbortedError()
            try:
                return self._chunks.put(chunk, timeout=0.1)
            except queue.Full:
                continue

    def end(self) -> None:
        """End the events, and commit."""
        if self._pending:
            self._put(self._pending)
        self._put(None)

    def abort(self) -> None:
        self._aborted = True
        while self._thread.is_alive():
            try:
                self._chunks.put(None, timeout=0.1)
                break
            except queue.Full:
                continue

    def join(self) -> None:
        self._thread.join()


class Stream:
    """One call of `publish_all` with a batch that is longer than memory."""

    def __init__(self, cluster: Cluster, router: Router) -> None:
        self._cluster = cluster
        self._router = router
        self._feeds: dict[str, _Feed] = {}

    def publish(self, publications: Iterator[Publication]) -> int:
        try:
            while chunk := list(islice(publications, _FEED_EVENTS)):
                for name, group in self._router.groups(chunk).items():
                    feed = self._feed(name)
                    for publication in group:
                        feed.put(publication)
        except BaseException:
            self._abort()
            raise
        # Commit only after all events were read.
        for feed in self._feeds.values():
            feed.end()
        for feed in self._feeds.values():
            feed.join()
        failed = {name: feed.error for name, feed in self._feeds.items() if feed.error is not None}
        for error in failed.values():
            if not isinstance(error, Exception):
                raise error
        if failed:
            committed = {name: feed.published for name, feed in self._feeds.items() if name not in failed}
            faults = {name: error for name, error in failed.items() if isinstance(error, Exception)}
            if committed:
                raise PartlyPublishedError(committed, faults) from next(iter(faults.values()))
            raise next(iter(faults.values()))
        return sum(feed.published for feed in self._feeds.values())

    def _feed(self, name: str) -> _Feed:
        if name not in self._feeds:
            shard = self._cluster.named(name)
            self._cluster.health.reach(shard)
            self._feeds[name] = _Feed(self._cluster, shard, self._router.shards)
        return self._feeds[name]

    def _abort(self) -> None:
        for feed in self._feeds.values():
            feed.abort()
        for feed in self._feeds.values():
            feed.join()
