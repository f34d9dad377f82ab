"""Senders, workers and servers are killed under load: no message is lost, handled twice, or out of its key's order."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest

from eventsql_orchestration.database import Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.queue import Queue
from tests.conftest import own_server
from tests.log.servers import WAYS
from tests.waiting import wait_until

SENDERS = ("a", "b")


def _start(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.queue.dying_worker", *arguments], stdin=subprocess.PIPE
    )  # fmt: skip

    def end() -> None:
        process.kill()
        process.wait(60)
        assert process.stdin is not None
        process.stdin.close()

    stack.callback(end)
    return process


def _run(
    database: Database,
    files: Path,
    *,
    ordered: bool,
    messages: int,
    breaks: int,
    server: EmbeddedPostgres | None = None,
) -> None:  # fmt: skip
    """Break a process, or the server if there is one of the test's own, again and again; then count."""
    queue = Queue(database, "faults", ordered=ordered)
    queue.definition()
    dsn, chance = database.dsn, random.Random(7)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE public.sent (sender text, last integer);"
            "CREATE TABLE public.done (place bigserial, key text, body text)"
        )
        connection.execute("INSERT INTO public.sent VALUES ('a', 0), ('b', 0)")

    def done() -> int:
        with suppress(psycopg.OperationalError), psycopg.connect(dsn) as connection:
            row = connection.execute("SELECT count(*) FROM public.done").fetchone()
            return 0 if row is None else int(row[0])
        return 0

    def empty() -> bool:
        with suppress(DatabaseError):
            return queue.statistics().depth == 0
        return False

    wanted = messages * len(SENDERS)
    receipts = [files / f"receipts-{number}" for number in range(2)]
    for file in receipts:
        # One worker may handle all messages before the other begins.
        file.touch()
    with ExitStack() as stack:
        roles = [
            *(("send", dsn, sender, str(messages)) for sender in SENDERS),
            *(("work", dsn, str(file)) for file in receipts),
        ]
        processes = {role: _start(stack, *role) for role in roles}
        for number in range(breaks):
            goal = wanted * (number + 1) // (breaks + 2)
            wait_until(lambda goal=goal: done() >= goal)  # type: ignore[misc]
            if server is None:
                role = chance.choice(roles)
                processes[role].send_signal(signal.SIGKILL)
                processes[role].wait(60)
                processes[role] = _start(stack, *role)
            else:
                WAYS[number % len(WAYS)](server, chance)
        wait_until(lambda: done() >= wanted and empty())

    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT key, body FROM public.done ORDER BY place").fetchall()
    bodies = [body for _, body in rows]
    assert sorted(bodies) == sorted(f"{sender}:{number}" for sender in SENDERS for number in range(1, messages + 1))
    # A receive has one receipt: two handlers with the same one would have had the message at once.
    handled = [line for file in receipts for line in file.read_text().splitlines()]
    assert len(handled) == len(set(handled)) >= wanted
    if ordered:
        with_keys: dict[str, list[int]] = {}
        for key, body in rows:
            with_keys.setdefault(key, []).append(int(body.partition(":")[2]))
        # A sender sends the odd places of five numbers before the even ones.
        for numbers in with_keys.values():
            assert numbers == sorted(numbers, key=_sent)


def _sent(number: int) -> tuple[int, int, int]:
    batch, place = divmod(number - 1, 5)
    return batch, place % 2, place


def test_killed_senders_and_workers_lose_and_double_nothing(database: Database, tmp_path: Path) -> None:
    """A sample, in order: processes that start and die take seconds each on a busy machine."""
    _run(database, tmp_path, ordered=True, messages=30, breaks=2)


@pytest.mark.nightly
@pytest.mark.parametrize("ordered", [False, True])
def test_many_killed_senders_and_workers_lose_and_double_nothing(
    database: Database, tmp_path: Path, *, ordered: bool
) -> None:
    _run(database, tmp_path, ordered=ordered, messages=1_500, breaks=25)


@pytest.mark.nightly
@pytest.mark.parametrize("ordered", [False, True])
def test_a_server_that_is_killed_under_senders_and_workers_loses_and_doubles_nothing(
    tmp_path: Path, *, ordered: bool
) -> None:
    with own_server() as server, Database(server.start().dsn) as database:
        _run(database, tmp_path, ordered=ordered, messages=400, breaks=2 * len(WAYS), server=server)
