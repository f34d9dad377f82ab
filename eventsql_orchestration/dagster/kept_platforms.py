"""The platforms of ticks, which the process keeps for the next ticks.

With a platform of its own, a tick that found nothing took this process and PostgreSQL 51 ms of processor time on a busy
machine; 32 ms of them went into the platform and its connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy

from eventsql_orchestration import EventSQL
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.threads import start_thread

logger = logging.getLogger(__name__)

KEPT_SECONDS: Final = 60.0
"""How long ticks use a platform. The next platform finds out anew about the schema, the role, the password, the
servers and the shards. If no tick comes, no connection stays open for longer."""


class _Kept:
    """A platform, for one tick at a time."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform = platform
        self.over = threading.Event()
        """Set if no further tick may use it."""
        for shard in platform.shards:
            # If a connection was lost, another server may have taken over, or somebody made the database anew.
            sqlalchemy.event.listen(shard.database.engine, "invalidate", lambda *_: self.over.set())

    def close(self) -> None:
        try:
            self.platform.close()
        except Exception:
            # The tick has its result.
            logger.exception("%s cannot be closed", self.platform)


class KeptPlatforms:
    """Platforms of ticks. The next tick with the same configuration uses a platform again, for up to `seconds`.

    Ticks at once have a platform each: there are never more connections than for platforms that are not kept. A
    platform whose tick failed, or that lost a connection, gets no further tick.
    """

    def __init__(self, seconds: float = KEPT_SECONDS) -> None:
        self._seconds = seconds
        self._begin_anew()
        after_fork(self, KeptPlatforms._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Hashable, list[_Kept]] = {}

    @contextmanager
    def use(self, configuration: Hashable, make: Callable[[], EventSQL]) -> Iterator[EventSQL]:
        """A platform with a configuration for the block. `make` makes it, if no kept platform is idle."""
        kept = self._take(configuration)
        if kept is None:
            kept = _Kept(make())
            start_thread("kept-platform", self._expire, configuration, kept)
        try:
            yield kept.platform
        except BaseException:
            kept.over.set()
            raise
        finally:
            self._give_back(configuration, kept)

    def _take(self, configuration: Hashable) -> _Kept | None:
        with self._lock:
            idle = self._idle.get(configuration)
            # The last one: the others are not needed now, and expire.
            return idle.pop() if idle else None

    def _give_back(self, configuration: Hashable, kept: _Kept) -> None:
        with self._lock:
            over = kept.over.is_set()
            if not over:
                self._idle.setdefault(configuration, []).append(kept)
        if over:
            kept.close()

    def _expire(self, configuration: Hashable, kept: _Kept) -> None:
        kept.over.wait(self._seconds)
        kept.over.set()
        with self._lock:
            idle = self._idle.get(configuration, [])
            unused = kept in idle
            if unused:
                idle.remove(kept)
        # The end of its tick closes a platform that is in use.
        if unused:
            kept.close()

    def close(self) -> None:
        """Close the platforms that no tick uses."""
        with self._lock:
            for idle in self._idle.values():
                for kept in idle:
                    kept.over.set()


KEPT: Final = KeptPlatforms()
