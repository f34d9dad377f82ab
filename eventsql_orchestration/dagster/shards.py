"""The databases of a platform, one by one, and how commands and people name what lies on one of several."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, EventSQL
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError

T_co = TypeVar("T_co", covariant=True)


def shards_of(platform: EventSQL) -> tuple[EventSQL, ...]:
    """The platform on each database by itself, those that are down too; of several, each with its name as `shard`.

    The name of one that is down is known where it is the only one. Of several, raises `ShardSetError` where they are
    not the shards of one set, and `DatabaseUnavailableError` where none can be reached.
    """
    # One database is connected to when it is used.
    return platform.shards if len(platform.shards) == 1 else platform.open().shards


@dataclass(frozen=True, slots=True)
class OnShards(Generic[T_co]):
    """What something came to on each shard, and why it came to nothing on those that are left out."""

    of: Mapping[str | None, T_co]
    left_out: Mapping[str, EventSQLError]

    def require_all(self, log: logging.Logger) -> None:
        """Raises `ShardsLeftOutError` where a shard is left out; what is done elsewhere stays done."""
        for shard, error in self.left_out.items():
            log.error("shard %s is left out: %s", shard, error)
        if self.left_out:
            raise ShardsLeftOutError(self.left_out)


class ShardsLeftOutError(dg.Failure):
    """What is done on each shard is done on those that it can be done on, and others are left out."""

    def __init__(self, errors: Mapping[str, EventSQLError]) -> None:
        down = [shard for shard, error in errors.items() if isinstance(error, DatabaseUnavailableError)]
        other = [f"{shard} ({error})" for shard, error in errors.items() if shard not in down]
        super().__init__(
            "; ".join(
                [
                    *([f"{', '.join(down)} cannot be reached: start that server, or mend its URL"] if down else []),
                    *([f"it failed on {', '.join(other)}"] if other else []),
                    "every other shard is done, and the next run does what is left",
                ]
            ),
            metadata={shard: str(error) for shard, error in errors.items()},
            allow_retries=False,
        )


def on_each(shards: Sequence[EventSQL], do: Callable[[EventSQL], T_co]) -> OnShards[T_co]:
    """Do something on one shard after the other; one that it fails on keeps no other from its turn.

    On the only database, what it raises is raised.
    """
    if len(shards) == 1:
        return OnShards({shards[0].shard: do(shards[0])}, {})
    done: dict[str | None, T_co] = {}
    left_out: dict[str, EventSQLError] = {}
    for shard in shards:
        try:
            done[shard.shard] = do(shard)
        except EventSQLError as error:
            left_out[shard.shard or str(shard.database)] = error
    return OnShards(done, left_out)


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
