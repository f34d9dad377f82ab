"""Work on each shard of a platform: a failure on one shard does not stop the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import dagster as dg

from eventsql_orchestration import Shard
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class OnShards(Generic[T_co]):
    """The result of each shard whose work is done (`of`), and the error of each other shard (`left_out`)."""

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
                    "every other shard is done, and the next run does the rest",
                ]
            ),
            metadata={shard: str(error) for shard, error in errors.items()},
            allow_retries=False,
        )


def on_each(shards: Sequence[Shard], do: Callable[[Shard], T_co]) -> OnShards[T_co]:
    """Call a function on one shard after the other. A failure on one shard does not stop the others.

    If there is only one database, the function's error is raised.
    """
    if len(shards) == 1:
        return OnShards({shards[0].name: do(shards[0])}, {})
    done: dict[str | None, T_co] = {}
    left_out: dict[str, EventSQLError] = {}
    for shard in shards:
        try:
            done[shard.name] = do(shard)
        except EventSQLError as error:
            left_out[shard.label] = error
    return OnShards(done, left_out)
