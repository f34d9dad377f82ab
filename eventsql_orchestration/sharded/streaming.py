"""Publishing a batch that is longer than memory over shards: read as it is written, on all of them side by side."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Final

from eventsql_orchestration.errors import PartlyPublishedError
from eventsql_orchestration.model import Publication
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members
from eventsql_orchestration.sharded.placing import Placing
from eventsql_orchestration.sharded.registry import ShardedRegistry
from eventsql_orchestration.sharding import ShardSet

_FEED_EVENTS: Final = 500
_FEED_CHUNKS: Final = 8
"""Chunks of so many events that wait for a shard's connection at most."""


class _AbortedError(Exception):
    """Internal: another shard's part of the batch failed, or the caller's iterator did."""


class _Feed:
    """What goes to one shard of a batch that is longer than memory: its thread reads what the caller's writes."""

    def __init__(self, members: Members, member: Member, shards: ShardSet) -> None:
        self.name = member.name
        self.error: BaseException | None = None
        self.published = 0
        self._chunks: queue.Queue[list[Publication] | None] = queue.Queue(_FEED_CHUNKS)
        self._pending: list[Publication] = []
        self._aborted = False
        self._thread = threading.Thread(
            target=self._run, args=(members, member, shards), name="eventsql-publish", daemon=True
        )
        self._thread.start()

    def _run(self, members: Members, member: Member, shards: ShardSet) -> None:
        try:
            with members.using(member):
                self.published = member.platform.publisher.publish_all(self._read(), placed=shards)
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
        """Everything was given: commit."""
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
    """One call of `publish_all` that is longer than memory: read as it is written, on all shards side by side."""

    def __init__(self, members: Members, registry: ShardedRegistry) -> None:
        self._members = members
        self._placing = Placing(members, registry)
        self._feeds: dict[str, _Feed] = {}

    def publish(self, publications: Iterator[Publication]) -> int:
        try:
            while chunk := list(islice(publications, _FEED_EVENTS)):
                for name, group in self._placing.groups(chunk).items():
                    feed = self._feed(name)
                    for publication in group:
                        feed.put(publication)
        except BaseException:
            self._abort()
            raise
        # Nothing is committed before everything was read.
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
            member = self._members.named(name)
            self._members.reach(member)
            self._feeds[name] = _Feed(self._members, member, self._placing.shards)
        return self._feeds[name]

    def _abort(self) -> None:
        for feed in self._feeds.values():
            feed.abort()
        for feed in self._feeds.values():
            feed.join()
