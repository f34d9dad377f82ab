"""Senders and workers are killed under load: no message is lost, handled twice, or out of its key's order."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import psycopg
import pytest

from eventsql_orchestration.database import Database
from eventsql_orchestration.queue import Queue
from tests.fixtures import Until

SENDERS = ("a", "b")

Start = Callable[[], "subprocess.Popen[bytes]"]


def _start(stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.queue.dying_worker", *arguments], stdin=subprocess.PIPE
    )  # fmt: skip

    def end() -> None:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()

    stack.callback(end)
    return process


def _run(database: Database, until: Until, *, ordered: bool, messages: int, kills: int) -> None:
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
            row = connection.execute("SELECT count(*) FROM public.done").fetchone()
            return 0 if row is None else int(row[0])

        wanted = messages * len(SENDERS)
        with ExitStack() as stack:
            roles = [*(("send", dsn, sender, str(messages)) for sender in SENDERS), ("work", dsn), ("work", dsn)]
            running = {(*role, str(number)) if role[0] == "work" else role: role for number, role in enumerate(roles)}
            processes = {name: _start(stack, *role) for name, role in running.items()}
            for kill in range(kills):
                goal = wanted * (kill + 1) // (kills + 2)
                until(lambda goal=goal: done() >= goal)  # type: ignore[misc]
                name = chance.choice(list(processes))
                processes[name].send_signal(signal.SIGKILL)
                processes[name].wait()
                processes[name] = _start(stack, *running[name])
            until(lambda: done() >= wanted and queue.statistics().depth == 0)

        rows = connection.execute("SELECT key, body FROM public.done ORDER BY place").fetchall()
    bodies = [body for _, body in rows]
    assert sorted(bodies) == sorted(f"{sender}:{number}" for sender in SENDERS for number in range(1, messages + 1))
    if ordered:
        with_keys: dict[str, list[int]] = {}
        for key, body in rows:
            with_keys.setdefault(key, []).append(int(body.partition(":")[2]))
        # A transaction sends the odd places of its five numbers before the even ones.
        for numbers in with_keys.values():
            assert numbers == sorted(numbers, key=_sent)


def _sent(number: int) -> tuple[int, int, int]:
    batch, place = divmod(number - 1, 5)
    return batch, place % 2, place


@pytest.mark.parametrize("ordered", [False, True])
def test_killed_senders_and_workers_lose_and_double_nothing(database: Database, until: Until, *, ordered: bool) -> None:
    _run(database, until, ordered=ordered, messages=60, kills=3)


@pytest.mark.nightly
@pytest.mark.parametrize("ordered", [False, True])
def test_many_killed_senders_and_workers_lose_and_double_nothing(
    database: Database, until: Until, *, ordered: bool
) -> None:
    _run(database, until, ordered=ordered, messages=1_500, kills=25)
