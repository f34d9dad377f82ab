"""How far the history of a repository is published, by the log itself.

A run that is killed has published all of its events or none, and may not have reported them.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from assets.churn.effects import FILE_CHANGES
from assets.churn.git_history import LAST_COMMIT, name_of
from eventsql_orchestration import EventSQL, Shard
from eventsql_orchestration.errors import DatabaseBusyError

_WINDOW: Final = 10_000
"""Offsets that are read at once, from the end of the log backwards."""


_TRANSFER_SECONDS: Final = 60.0
"""Seconds to wait for another transfer of the topic."""


def last_commit(platform: EventSQL, repository: Path) -> str | None:
    """The commit up to which a repository's history is published. Its newest event has it in its metadata.

    Raises `DatabaseBusyError` if events of the history stay in the buffer.
    """
    name = name_of(repository)
    newest = [found for shard in platform.shards if (found := _newest(shard, name)) is not None]
    return max(newest)[1] if newest else None


def _newest(shard: Shard, repository: str) -> tuple[datetime, str] | None:
    topic, deadline = FILE_CHANGES.name, time.monotonic() + _TRANSFER_SECONDS
    while topic in shard.buffered():
        if not shard.transfer.run_once([topic]):
            if time.monotonic() >= deadline:
                raise DatabaseBusyError(
                    f"events of topic {topic} still wait in the buffer, because another transaction has held the topic "
                    f"for {_TRANSFER_SECONDS:g} s: find it in pg_stat_activity, end it, and run this again"
                )
            time.sleep(0.1)
    upto, first = shard.reader.end(topic), shard.reader.floor(topic)
    while upto > 0 and upto >= first:
        after = max(0, upto - _WINDOW)
        for event in reversed(shard.reader.read(topic, after=after, upto=upto)):
            commit = event.metadata.get(LAST_COMMIT)
            if commit is not None and json.loads(event.value).get("repo") == repository:
                return event.buffered_at, commit
        upto = after
    return None
