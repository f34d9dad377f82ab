"""Doing something on all shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eventsql_orchestration.errors import EventSQLError, ShardError
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members

Given = TypeVar("Given")


def everywhere(members: Members, action: Callable[[Member], Given]) -> dict[str, Given]:
    """Do something on all shards, those that were there first before the others; gives what each came to.

    Where a shard joined meanwhile, on that one too. Raises what the first raises; `ShardUnavailableError` where one is
    down, before anything is done; `ShardError` where one did it and the next did not.
    """
    done: dict[str, Given] = {}
    while True:
        members.refresh()
        left = [member for member in members.all() if member.name not in done]
        if not left:
            return done
        for member in left:
            members.reach(member)
        for member in left:
            try:
                with members.using(member):
                    done[member.name] = action(member)
            except EventSQLError as error:
                if not done:
                    raise
                raise ShardError(
                    f"shard {member.name!r} did not follow: {error}; it is done on {', '.join(done)}: do it again"
                ) from error
