"""Publish a batch that is longer than memory over shards: read it while writing to all shards in parallel."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, NoReturn

from eventsql_orchestration.errors import PartlyPublishedError, first_error
from eventsql_orchestration.model import Publication
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.router import Router
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.threads import SIGNAL_SECONDS, in_thread

_FEED_EVENTS: Final = 500
_FEED_CHUNKS: Final = 8
"""The most chunks of events that wait for a shard's connection."""


class _AbortedError(Exception):
    """Internal: another shard's part of the batch failed, or the caller's iterator failed."""


class _Feed:
    """One shard's part of a batch that is longer than memory: its thread takes events from the caller's thread.

    Ctrl-C in the caller's thread leaves no lock of a `SimpleQueue` taken. In the middle of `queue.Queue.put`, it would
    leave one, and nothing could end the events any more.
    """

    def __init__(self, cluster: Cluster, shard: Shard, placed: ShardSet) -> None:
        self.error: BaseException | None = None
        self._queue: queue.SimpleQueue[list[Publication] | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_FEED_CHUNKS):
            self._room.put(None)
        self._chunks = self._taken()
        self._pending: list[Publication] = []
        self._aborted = False
        self._running = in_thread("publish", partial(self._run, cluster, shard, placed))

    def _run(self, cluster: Cluster, shard: Shard, placed: ShardSet) -> int:
        try:
            with cluster.using(shard):
                return shard.publisher.publish_all(self._read(), placed=placed)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            self.error = error
            # The caller's thread must not wait for room.
            deque(self._chunks, maxlen=0)
            return 0

    def _taken(self) -> Iterator[list[Publication]]:
        while (chunk := self._queue.get()) is not None:
            self._room.put(None)
            yield chunk

    def _read(self) -> Iterator[Publication]:
        for chunk in self._chunks:
            yield from chunk
        if self._aborted:
            raise _AbortedError

    def put(self, publication: Publication) -> None:
        self._pending.append(publication)
        if len(self._pending) >= _FEED_EVENTS:
            self._await_room()
            self._queue.put(self._pending)
            self._pending = []

    def _await_room(self) -> None:
        while True:
            with suppress(queue.Empty):
                return self._room.get(timeout=SIGNAL_SECONDS)

    def check(self) -> None:
        """Raise the error of the shard, if it failed."""
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the events, and commit."""
        self._queue.put(self._pending)
        self._queue.put(None)

    def abort(self) -> None:
        """End the events, and roll back, unless they are committed. Does not wait for the shard."""
        self._aborted = True
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)

    def join(self) -> int:
        """Wait for the end; gives the number of events that are committed."""
        return self._running.result()


def publish_stream(cluster: Cluster, router: Router, publications: Iterator[Publication]) -> int:
    """Publish a batch that is longer than memory; gives the number of its events. Raises `PartlyPublishedError`."""
    feeds: dict[str, _Feed] = {}
    try:
        _feed(cluster, router, publications, feeds)
    except BaseException as error:
        # End the feeds even after Ctrl-C: a feed without an end would hold its topics for ever.
        for feed in feeds.values():
            feed.abort()
        if isinstance(error, Exception):
            for feed in feeds.values():
                feed.join()
        raise

    committed = {name: feed.join() for name, feed in feeds.items() if feed.error is None}
    failed: dict[str, Exception] = {}
    for name, feed in feeds.items():
        if isinstance(feed.error, Exception):
            failed[name] = feed.error
        else:
            feed.check()
    if failed:
        raise_first(failed, committed)
    return sum(committed.values())


def _feed(cluster: Cluster, router: Router, publications: Iterator[Publication], feeds: dict[str, _Feed]) -> None:
    """Give all events to the feeds of their shards, and let the shards commit. `feeds` gets each feed that is begun."""
    deadline = time.monotonic() + cluster.timeout
    while chunk := list(islice(publications, _FEED_EVENTS)):
        for name, group in router.groups(chunk).items():
            if name not in feeds:
                shard = cluster.named(name, deadline)
                cluster.health.reach(shard, deadline)
                feeds[name] = _Feed(cluster, shard, router.shards)
            feeds[name].check()
            for publication in group:
                feeds[name].put(publication)
    for feed in feeds.values():
        feed.check()
    # Commit only after all events were read.
    for feed in feeds.values():
        feed.end()
    for feed in feeds.values():
        feed.join()


def raise_first(failed: Mapping[str, Exception], committed: Mapping[str, int]) -> NoReturn:
    """Raise an error of the shards that failed; `PartlyPublishedError` if others have committed."""
    first = first_error(failed)
    if committed:
        raise PartlyPublishedError(committed, failed) from first
    raise first
