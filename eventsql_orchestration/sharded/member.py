"""One shard of a platform."""

from __future__ import annotations

import time

from eventsql_orchestration.errors import EventSQLError, ShardUnavailableError
from eventsql_orchestration.log.shard_store import ShardStore
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.sharding import pending


class Member:
    """One shard: the platform on its database alone, and whether that can be reached."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform = platform
        self.store = ShardStore(platform.database)
        self.active = False
        """Whether it takes events, as far as is known."""
        self.down: EventSQLError | None = None
        self.down_since = 0.0

    @property
    def name(self) -> str:
        """Its name, once it is known."""
        return self.platform.shard or str(self.platform.database)

    def unavailable(self) -> ShardUnavailableError:
        return ShardUnavailableError(f"shard {self.name!r} is down: {self.down}", shard=self.name)

    @property
    def seconds_down(self) -> float:
        """How long it has been down, where it is."""
        return time.monotonic() - self.down_since

    def check_active(self) -> None:
        """Raise `ShardPendingError` while it takes no events, as far as is known."""
        if not self.active:
            raise pending(self.name)
