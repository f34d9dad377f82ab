"""The databases of a platform, one by one, and how commands and people name what lies on one of several."""

from __future__ import annotations

import shlex

from eventsql_orchestration import NOT_PARTITIONED, EventSQL


def shards_of(platform: EventSQL) -> tuple[EventSQL, ...]:
    """The platform on each database by itself, those that are down too; of several, each with its name as `shard`.

    The name of one that is down is known where it is the only one. Of several, raises `ShardSetError` where they are
    not the shards of one set, and `DatabaseUnavailableError` where none can be reached.
    """
    # One database is connected to when it is used.
    return platform.shards if len(platform.shards) == 1 else platform.open().shards


def place(shard: str | None, partition: int) -> str:
    """A partition among all of a consumer's, as a key: `3`, or `shard-2/3` where there are several shards."""
    return str(partition) if shard is None else f"{shard}/{partition}"


def where(shard: str | None, partition: int) -> str:
    """The same for people, who need not be told of what there is one of: empty, `3`, `shard-2` or `shard-2/3`."""
    parts = [*([] if shard is None else [shard]), *([] if partition == NOT_PARTITIONED else [str(partition)])]
    return "/".join(parts)


def command(shard: str | None, arguments: str) -> str:
    """A command of `eventsql`, on the shard where there are several."""
    return f"eventsql {'' if shard is None else f'--shard {shlex.quote(shard)} '}{arguments}"
