"""A process that is forked has connections, threads and locks of its own, and leaves those of the other alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.forks import ProcessSet
from tests.fixtures import Until
from tests.publishing.forking import MANY
from tests.shards.conftest import Databases, databases
from tests.waiting import PATIENCE

__all__ = ["databases"]

ROOT = Path(__file__).parents[2]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders"))
    for consumer in ("sums", "others"):
        platform.registry.register_consumer(Consumer("orders", consumer))
    with platform.shards[0].database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (value text)")


pytestmark = pytest.mark.prepared.with_args(prepare)


def command(program: str, *dsns: str) -> list[str]:
    """Runs a function of `forking`."""
    return [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.publishing.forking", program, *dsns]


def run(program: str, *dsns: str) -> None:
    subprocess.run(command(program, *dsns), check=True, timeout=PATIENCE, cwd=ROOT)


def published(platform: EventSQL) -> dict[str, list[str]]:
    """The events in the order of the log, by the process and the time that published them."""
    platform.transfer.run_once()
    found: dict[str, list[str]] = {}
    for event in platform.reader.read("orders"):
        name, number = event.value.decode().rsplit(" ", 1)
        found.setdefault(name, []).append(number)
    return found


def test_a_service_that_forks_after_it_published_goes_on_in_every_process(dsn: str, platform: EventSQL) -> None:
    run("service", dsn)
    thirty = [str(number) for number in range(30)]
    assert published(platform) == dict.fromkeys(("before", "child 0", "child 1", "parent", "after"), thirty)
    with platform.database.connection() as connection:
        assert connection.execute("SELECT value FROM public.effect ORDER BY 1").fetchall() == [
            ("open",), ("still open",)
        ]  # fmt: skip


def test_the_sessions_of_writers_are_of_one_process_each(dsn: str, platform: EventSQL) -> None:
    run("connections", dsn)
    counts = {name: len(numbers) for name, numbers in published(platform).items()}
    assert counts == dict.fromkeys(("before", "child", "after"), MANY + 1)


def test_a_killed_process_leaves_no_transaction_behind_while_a_process_that_it_forked_goes_on(
    dsn: str, platform: EventSQL, until: Until
) -> None:
    handled: list[object] = []
    with subprocess.Popen(command("killed", dsn), stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
        until(lambda: platform.consumers.consume_once("orders", "sums", lambda events, _: handled.extend(events)))
    assert len(handled) == 1


def test_a_lock_that_a_thread_held_at_the_fork_stops_nothing(dsn: str, platform: EventSQL) -> None:
    run("locks", dsn)
    counts = {name: len(numbers) for name, numbers in published(platform).items()}
    assert counts == {"before": MANY + 1, "child": MANY + 2}


def test_events_that_wait_in_a_buffered_publisher_are_published_by_one_process(dsn: str, platform: EventSQL) -> None:
    run("waiting_events", dsn)
    assert published(platform) == {"before": ["0"], "child": ["0"], "parent": ["0"]}


def test_tasks_that_wait_in_an_asyncio_publisher_are_of_one_process(dsn: str, platform: EventSQL) -> None:
    run("waiting_tasks", dsn)
    assert published(platform) == {"before": ["0"], "child": ["0"], "parent": ["0", "1", "2"]}


def test_a_child_that_closes_its_platform_leaves_consumers_of_its_parent_alone(dsn: str, platform: EventSQL) -> None:
    run("consumers", dsn)
    assert published(platform) == {"before": ["0"], "after": ["0"]}


def test_an_object_that_does_not_begin_anew_keeps_no_other_from_it() -> None:
    run("object_that_fails")


def test_a_child_reads_metrics_that_a_thread_of_its_parent_was_reading() -> None:
    run("reading")


def test_a_child_finds_out_by_itself_whether_a_shard_is_down(databases: Databases) -> None:
    dsns = databases(2)
    with EventSQL(*dsns, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders"))
        run("shard_that_was_down", *dsns)
        platform.transfer.run_once()
        counts = Counter(
            {str(shard.name): len(shard.reader.read("orders")) for shard in platform.shards},
        )
    assert counts.total() == 20
    assert min(counts.values()) > 0


class Kept:
    """An object that a process keeps a list of."""


def test_an_object_that_nothing_else_keeps_is_not_kept_for_the_processes_that_may_be_forked() -> None:
    objects = ProcessSet[Kept]()
    objects.add(Kept())
    assert objects.all() == []
    found = weakref.ref(objects)
    del objects
    assert found() is None


def test_the_objects_of_a_process_are_read_while_a_thread_adds_others() -> None:
    objects, alive, over = ProcessSet[Kept](), deque[Kept](maxlen=1_000), threading.Event()
    interval = sys.getswitchinterval()

    def add() -> None:
        while not over.is_set():
            alive.append(Kept())
            objects.add(alive[-1])

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor() as threads:
            adding = threads.submit(add)
            try:
                for _ in range(3_000):
                    objects.all()
            finally:
                over.set()
            adding.result(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    assert set(objects.all()) == set(alive)
