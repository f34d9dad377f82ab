"""The databases of a platform, one by one, and the names of partitions and commands on one of several shards."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, Shard
from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.rows import query_all
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError

T_co = TypeVar("T_co", covariant=True)


def shards_of(platform: EventSQL) -> tuple[Shard, ...]:
    """Each database by itself, including those that are down. If there are several, each has its `name`.

    The name of a shard that is down is known if no other shard is down. If there are several databases, raises
    `ShardSetError` if they are not the shards of one set, and `DatabaseUnavailableError` if none can be reached.
    """
    # The first use of an only database connects to it.
    return platform.shards if len(platform.shards) == 1 else platform.open().shards


@dataclass(frozen=True, slots=True)
class OnShards(Generic[T_co]):
    """The result on each shard, and the reason for each shard that is left out."""

    of: Mapping[str | None, T_co]
    left_out: Mapping[str, EventSQLError]

    def require_all(self, log: logging.Logger) -> None:
        """Raises `ShardsLeftOutError` if a shard is left out. The work on the other shards stays done."""
        for shard, error in self.left_out.items():
            log.error("shard %s is left out: %s", shard, error)
        if self.left_out:
            raise ShardsLeftOutError(self.left_out)


class ShardsLeftOutError(dg.Failure):
    """The work is done on some shards, and other shards are left out."""

    def __init__(self, errors: Mapping[str, EventSQLError]) -> None:
        down = [shard for shard, error in errors.items() if isinstance(error, DatabaseUnavailableError)]
        other = [f"{shard} ({error})" for shard, error in errors.items() if shard not in down]
        super().__init__(
            "; ".join(
                [
                    *([f"{', '.join(down)} cannot be reached: start the server, or correct its URL"] if down else []),
                    *([f"it failed on {', '.join(other)}"] if other else []),
                    "every other shard is done, and the next run does what is left",
                ]
            ),
            metadata={shard: str(error) for shard, error in errors.items()},
            allow_retries=False,
        )


def on_each(shards: Sequence[Shard], do: Callable[[Shard], T_co]) -> OnShards[T_co]:
    """Call a function on one shard after the other. A failure on one shard does not stop the others.

    On an only database, the function's error is raised.
    """
    if len(shards) == 1:
        return OnShards({shards[0].name: do(shards[0])}, {})
    done: dict[str | None, T_co] = {}
    left_out: dict[str, EventSQLError] = {}
    for shard in shards:
        try:
            done[shard.name] = do(shard)
        except EventSQLError as error:
            left_out[shard.name or str(shard.database)] = error
    return OnShards(done, left_out)


def rows_of(shard: Shard, file: str, name: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
    """The rows of a named statement of a file in `database/sql/`, executed on one shard."""
    return query_all(shard.database, Queries(file, shard.database.schema)(name), values, prepare=False)


def place(shard: str | None, partition: int) -> str:
    """The key of a consumer's partition: `3`, or `shard-2/3` if there are several shards."""
    return str(partition) if shard is None else f"{shard}/{partition}"


def where(shard: str | None, partition: int) -> str:
    """The same for people, without an only shard or an only partition: empty, `3`, `shard-2` or `shard-2/3`."""
    parts = [*([] if shard is None else [shard]), *([] if partition == NOT_PARTITIONED else [str(partition)])]
    return "/".join(parts)


def command(shard: str | None, arguments: str) -> str:
    """A command of `eventsql`, with the shard's name if there are several."""
    return f"eventsql {'' if shard is None else f'--shard {shlex.quote(shard)} '}{arguments}"
