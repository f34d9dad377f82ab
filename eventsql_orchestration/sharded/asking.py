"""Asking several shards at once, and none for longer than so long: one that does not answer keeps no other waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.log.shard_store import ShardState
from eventsql_orchestration.sharded.member import Member

ANSWER_SECONDS: Final = 15.0
"""How long all shards together may take to answer: longer than one connection may take to be made by default, 10 s."""


def ask(members: Iterable[Member]) -> dict[Member, ShardState | DatabaseUnavailableError]:
    """What each of the shards says of itself, or why it cannot be reached. Raises what else is wrong with one."""
    deadline = time.monotonic() + ANSWER_SECONDS
    answers = {member: _ask(member) for member in members}
    found: dict[Member, ShardState | DatabaseUnavailableError] = {}
    for member, answer in answers.items():
        try:
            found[member] = answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            found[member] = DatabaseUnavailableError(
                f"{member.platform.database} has not answered for {ANSWER_SECONDS:.0f} seconds"
            )
        except DatabaseUnavailableError as error:
            found[member] = error
    return found


def _ask(member: Member) -> Future[ShardState]:
    """Ask in a thread that nobody waits for at the end of the process, as the threads of an executor are."""
    answer: Future[ShardState] = Future()

    def run() -> None:
        try:
            answer.set_result(member.store.state())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name=f"eventsql-ask-{member.name}", daemon=True).start()
    return answer
