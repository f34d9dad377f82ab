"""Asking several shards at once, and none for longer than so long: one that does not answer keeps no other waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

from psycopg.conninfo import timeout_from_conninfo

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseUnavailableError
from eventsql_orchestration.log.shard_store import ShardState
from eventsql_orchestration.sharded.member import Member

ANSWER_SECONDS: Final = 15.0
"""How long all shards together may take to answer: longer than one connection may take to be made by default, 10 s.
One whose URL names several hosts may take as long as connections to all but one of them may, in addition."""


def ask(members: Iterable[Member]) -> dict[Member, ShardState | DatabaseUnavailableError]:
    """What each of the shards says of itself, or why it cannot be reached. Raises what else is wrong with one.

    That is a `DatabaseBusyError` where it was not asked, because this process has no connection left for that.
    """
    begun = time.monotonic()
    answers = {member: _ask(member) for member in members}
    found: dict[Member, ShardState | DatabaseUnavailableError] = {}
    for member, answer in answers.items():
        database = member.platform.database
        seconds = _bound(database)
        try:
            found[member] = answer.result(max(0.0, begun + seconds - time.monotonic()))
        except TimeoutError:
            if database.exhausted:
                raise DatabaseBusyError(
                    f"{database} was not asked for {seconds:.0f} seconds, because every connection of this process is "
                    "taken: use fewer threads at once"
                ) from None
            found[member] = DatabaseUnavailableError(f"{database} has not answered for {seconds:.0f} seconds")
        except DatabaseUnavailableError as error:
            found[member] = error
    return found


def _bound(database: Database) -> float:
    """How long a database may take to answer: its hosts are tried in turn, and the last of them is to be heard, too."""
    _, options = database.engine.dialect.create_connect_args(database.url)
    further = str(options.get("host", "")).count(",")
    if not further:
        return ANSWER_SECONDS
    return ANSWER_SECONDS + further * timeout_from_conninfo({"connect_timeout": options.get("connect_timeout", 10)})


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
