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
"""How long ticks use one platform. The next platform finds out anew about the schema, the role, the password, the
servers and the shards. If no tick comes, no connection stays open for longer."""


class _Kept:
    """A platform, and the number of ticks that use it now."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform = platform
        self.users = 0
        self.over = threading.Event()
        """Set if later ticks need another platform."""
        for shard in platform.shards:
            # If a connection was lost, another server may have taken over, or somebody made the database anew.
            sqlalchemy.event.listen(shard.database.engine, "invalidate", lambda *_: self.over.set())


class KeptPlatforms:
    """Platforms by their configuration. The ticks of all threads share each for `seconds`; then it is closed.

    A platform whose tick failed, or that lost a connection, gets no further ticks.
    """

    def __init__(self, seconds: float = KEPT_SECONDS) -> None:
        self._seconds = seconds
        self._begin_anew()
        after_fork(self, KeptPlatforms._begin_anew)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[Hashable, _Kept] = {}

    @contextmanager
    def use(self, configuration: Hashable, make: Callable[[], EventSQL]) -> Iterator[EventSQL]:
        """The platform with a configuration. `make` makes it, if none is kept."""
        kept = self._take(configuration, make)
        try:
            yield kept.platform
        except BaseException:
            kept.over.set()
            raise
        finally:
            with self._changed:
                kept.users -= 1
                self._changed.notify_all()

    def _take(self, configuration: Hashable, make: Callable[[], EventSQL]) -> _Kept:
        with self._changed:
            kept = self._kept.get(configuration)
            if kept is None or kept.over.is_set():
                kept = _Kept(make())
                start_thread("kept-platform", self._close_later, configuration, kept)
                self._kept[configuration] = kept
            kept.users += 1
            return kept

    def _close_later(self, configuration: Hashable, kept: _Kept) -> None:
        kept.over.wait(self._seconds)
        with self._changed:
            if self._kept.get(configuration) is kept:
                del self._kept[configuration]
            self._changed.wait_for(lambda: not kept.users)
        try:
            kept.platform.close()
        except Exception:
            logger.exception("%s cannot be closed", kept.platform)

    def close(self) -> None:
        """Close each platform as soon as no tick uses it."""
        with self._changed:
            for kept in self._kept.values():
                kept.over.set()


KEPT: Final = KeptPlatforms()
