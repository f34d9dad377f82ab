"""The databases of a platform, one by one, and the names of partitions and commands on one of several shards."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, Shard
from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.rows import query_all
from eventsql_orchestration.errors import ShardSetError, ShardUnavailableError


def shards_of(platform: EventSQL) -> tuple[Shard, ...]:
    """Each database by itself, including those that are down. If there are several, each has its `name`.

    The name of a shard that is down is known if no other shard is down. If there are several databases, raises
    `ShardSetError` if they are not the shards of one set, `DatabaseUnavailableError` if none can be reached, and
    `ClosedError` for a platform that was closed.
    """
    # A single database is opened at its first use.
    return platform.shards if len(platform.shards) == 1 else platform.opened()


def shard_named(shards: Sequence[Shard], name: str | None) -> Shard:
    """One of all shards by its name. A single database has no name: pass None.

    Raises `ShardSetError` if no shard has the name, and for None if there are several shards. Raises
    `ShardUnavailableError` if the shard cannot be found because shards are down.
    """
    if len(shards) == 1 and name is None:
        return shards[0]
    for each in shards:
        if name is not None and each.name == name:
            return each
    known = ", ".join(each.name for each in shards if each.name is not None)
    if name is None:
        raise ShardSetError(f"there are several shards ({known}): name the one to use")
    if len(shards) == 1:
        raise ShardSetError(f"there is no shard {name!r}: the URL names one database, {shards[0].database}")
    if down := ", ".join(str(each.database) for each in shards if each.name is None):
        raise ShardUnavailableError(f"shard {name!r} is none of {known}, and {down} cannot be reached", shard=name)
    raise ShardSetError(f"there is no shard {name!r}: the shards are {known}")


def rows_of(shard: Shard, file: str, name: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
    """The rows of a named statement of a file in `database/sql/`, executed on one shard."""
    return query_all(shard.database, Queries(file, shard.database.schema)(name), values, prepare=False)


def place(shard: str | None, partition: int) -> str:
    """The key of a consumer's partition: `3`, or `shard-2/3` if there are several shards."""
    return str(partition) if shard is None else f"{shard}/{partition}"


def where(shard: str | None, partition: int) -> str:
    """`place` for people. Leaves out the shard or the partition if there is only one: ``, `3`, `shard-2/3`."""
    parts = [*([] if shard is None else [shard]), *([] if partition == NOT_PARTITIONED else [str(partition)])]
    return "/".join(parts)


def partition_label(topic: str, partition: int) -> str:
    """A topic or one of its partitions, for people: `orders`, `orders[3]`."""
    return topic if partition == NOT_PARTITIONED else f"{topic}[{partition}]"


def command(shard: str | None, arguments: str) -> str:
    """A command of `eventsql`, with the shard's name if there are several."""
    return f"eventsql {'' if shard is None else f'--shard {shlex.quote(shard)} '}{arguments}"
