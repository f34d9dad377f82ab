"""An operator's process that adds a shard, and is killed at some point."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from eventsql_orchestration import Shard
from eventsql_orchestration.shards.add_shard import ShardAddition

KEYS = [f"key {number}" for number in range(24)]


def start(role: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process that plays a role, forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.shards.adding"])
    process = context.Process(target=role, args=arguments, daemon=True)
    process.start()
    return process


def add_shard(old: list[str], new: str, dies_after: str | None = None) -> None:
    """Add a shard; die for good, by SIGKILL, right after a step of which `dies_after` is a part."""

    def on_step(step: str) -> None:
        if dies_after is not None and dies_after in step:
            os.kill(os.getpid(), signal.SIGKILL)

    shards = [Shard(dsn, transfer=False) for dsn in (*old, new)]
    ShardAddition(shards[:-1], shards[-1], on_step=on_step).execute()
    for shard in shards:
        shard.close()
