"""Programs that fork, in processes of their own: the process of the tests has threads that a fork would lose."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.metrics.figures import Figures
from eventsql_orchestration.metrics.readings import Readings
from eventsql_orchestration.publishing.buffered import _watching
from tests.waiting import PATIENCE, wait_until

MANY: Final = 200
"""Enough for a batch that goes straight to the log."""

LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))


def publish(platform: EventSQL, name: str, count: int = 30) -> None:
    for number in range(count):
        platform.publisher.publish(Publication("orders", f"{name} {number}".encode()))
        platform.shards[0].reader.end("orders")


def publish_batch(platform: EventSQL, name: str) -> None:
    platform.publisher.publish_all(Publication("orders", f"{name} {number}".encode()) for number in range(MANY))


def child(work: Callable[[], object]) -> int:
    """Fork a process that does the work and ends; gives its id. It is killed if the work takes too long."""
    if (pid := os.fork()) != 0:
        return pid
    signal.alarm(int(PATIENCE))
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def await_success(*pids: int) -> None:
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def service(dsn: str) -> None:
    """Publishes before it forks, in two children, at the same time in the parent, and afterwards."""
    platform = EventSQL(dsn)

    def work(name: str) -> None:
        publish(platform, name)
        platform.close()

    publish(platform, "before")
    # Open in this thread when the other process begins.
    with platform.database.transaction() as connection:
        connection.execute("INSERT INTO public.effect VALUES ('open')")
        children = [child(lambda: work("child 0")), child(lambda: work("child 1")), child(lambda: end(connection))]
        publish(platform, "parent")
        connection.execute("INSERT INTO public.effect VALUES ('still open')")
    await_success(*children)
    publish(platform, "after")
    platform.close()


def end(connection: Connection) -> None:
    """A child cannot end the transaction that it was forked in."""
    with suppress(psycopg.OperationalError):
        connection.execute("ROLLBACK")
    assert connection.closed


def killed(dsn: str) -> None:
    """Is killed while it handles an event. A process that it has forked for that goes on until standard input ends."""
    platform = EventSQL(dsn)

    def handle(_event: object, _connection: object) -> None:
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    publish(platform, "before", count=1)
    platform.consumers.start("orders", "sums", handle)
    signal.alarm(int(PATIENCE))
    signal.pause()


def connections(dsn: str) -> None:
    """The sessions that move and append events are of one process each, and outlive what a child does."""
    platform = EventSQL(dsn, transfer=False)

    def sessions(name: str) -> set[int]:
        publish(platform, name, count=1)
        platform.transfer.run_once()
        publish_batch(platform, name)
        writers: list[Any] = [platform.shards[0].transfer._writer, platform.shards[0].publisher._writer]
        return {writer._connection.info.backend_pid for writer in writers}

    own = sessions("before")
    assert len(own) == 2

    def work() -> None:
        assert sessions("child").isdisjoint(own)
        platform.close()

    await_success(child(work))
    assert sessions("after") == own
    platform.close()


def locks(dsn: str) -> None:
    """Threads of the parent hold every lock at the moment of the fork."""
    platform = EventSQL(dsn)
    buffered = platform.buffered_publisher()
    buffered.publish(Publication("orders", b"before 0")).result(PATIENCE)
    platform.consumers.start("orders", "sums", lambda event, connection: None)
    publish_batch(platform, "before")

    def work() -> None:
        done = threading.Event()
        assert all(map(is_free, locks_of(platform, buffered, _watching)))
        publish(platform, "child", count=1)
        publish_batch(platform, "child")
        buffered.publish(Publication("orders", b"child 0")).result(PATIENCE)
        platform.store.subscriptions()
        platform.consumers.start("orders", "others", lambda event, connection: done.set())
        assert done.wait(PATIENCE)
        assert platform.close()

    def keeps_spare() -> bool:
        platform.shards[0].reader.end("orders")
        return bool(platform.database._pool._spares)

    wait_until(keeps_spare, "the pool keeps a spare connection")
    pool: Any = platform.database.engine.pool
    with held([*locks_of(platform, buffered, _watching), pool._pool.mutex]):
        pid = child(work)
    await_success(pid)
    platform.close()


def locks_of(*objects: object) -> list[Any]:
    """The locks of objects of the package, and of objects that these hold."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    left: list[Any] = list(objects)
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, LOCKS):
            found[id(each)] = each
        elif isinstance(each, threading.Condition | threading.Event):
            left += vars(each).values()
        elif isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set):
            left += each
        elif type(each).__module__.startswith("eventsql_orchestration"):
            left += vars(each).values() if hasattr(each, "__dict__") else ()
    return list(found.values())


def is_free(lock: Any) -> bool:
    """Whether this process can take a lock. Gives it back."""
    free: bool = lock.acquire(blocking=False)
    if free:
        lock.release()
    return free


@contextmanager
def held(found: list[Any]) -> Iterator[None]:
    """Another thread holds locks during the block."""
    assert len(found) > 10
    ready, end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in found:
            assert lock.acquire(timeout=PATIENCE)
        ready.set()
        end.wait()
        for lock in found:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(PATIENCE)
    yield
    end.set()
    thread.join()


def waiting_events(dsn: str) -> None:
    """Events wait in a buffered publisher when the process forks."""
    platform = EventSQL(dsn, transfer=False)
    publisher = platform.buffered_publisher(max_age=3_600.0)

    def work() -> None:
        for wait in (acknowledged.result, acknowledged.exception, lambda: acknowledged.add_done_callback(print)):
            with pytest.raises(EventSQLError):
                wait()
        own = publisher.publish(Publication("orders", b"child 0"))
        publisher.flush(timeout=PATIENCE)
        own.result(PATIENCE)
        called: list[object] = []
        before.add_done_callback(called.append)
        assert (before.result(), called) == (placement, [before])
        platform.close()

    before = publisher.publish(Publication("orders", b"before 0"))
    publisher.flush(timeout=PATIENCE)
    placement = before.result()
    acknowledged = publisher.publish(Publication("orders", b"parent 0"))
    await_success(child(work))
    assert not acknowledged.done()
    publisher.flush(timeout=PATIENCE)
    acknowledged.result(PATIENCE)
    platform.close()


def waiting_tasks(dsn: str) -> None:
    """Tasks wait to give their events to an asyncio publisher when the process forks."""
    platform = EventSQL(dsn, transfer=False)
    publisher = platform.async_publisher(max_pending_events=1)

    def work() -> None:
        asyncio.run(publish_one("child 0"))
        platform.close()

    async def publish_one(value: str) -> None:
        await publisher.publish(Publication("orders", value.encode()))

    async def main() -> None:
        await publish_one("before 0")
        tasks = [asyncio.create_task(publish_one(f"parent {number}")) for number in range(3)]
        # Each task comes to its first wait.
        await asyncio.sleep(0)
        await_success(child(work))
        await asyncio.gather(*tasks)

    asyncio.run(main())
    platform.close()


def consumers(dsn: str) -> None:
    """A consumer is handling an event when the process forks."""
    platform = EventSQL(dsn)
    begun, go_on, handled = threading.Event(), threading.Event(), []

    def handle(event: object, connection: object) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        handled.append(event)

    platform.consumers.start("orders", "sums", handle)
    publish(platform, "before", count=1)
    assert begun.wait(PATIENCE)

    def work() -> None:
        assert platform.close()

    await_success(child(work))
    go_on.set()
    wait_until(lambda: len(handled) == 1, "the event is handled")
    publish(platform, "after", count=1)
    wait_until(lambda: len(handled) == 2, "the next event is handled")
    platform.close()


def shard_that_was_down(*dsns: str) -> None:
    """A shard is back when the process has forked: the thread that would find out is the parent's."""
    platform = EventSQL(*dsns).open()
    for shard in platform.shards:
        shard.down, shard.down_since = DatabaseUnavailableError("it does not answer"), time.monotonic()

    def work() -> None:
        for number in range(20):
            platform.publisher.publish(Publication("orders", b"child", key=str(number)))
        platform.close()

    await_success(child(work))
    platform.close()


def reading() -> None:
    """A thread of the parent reads the metrics of a database when the process forks."""
    begun, go_on, waits = threading.Event(), threading.Event(), [True]

    def read() -> Figures:
        if waits:
            begun.set()
            go_on.wait()
        return Figures((), (), (), (), ())

    readings = Readings("a database", read, interval=1.0)
    readings.begin()
    assert begun.wait(PATIENCE)

    def work() -> None:
        waits.clear()
        readings.begin()
        assert readings.latest(PATIENCE) is not None

    await_success(child(work))
    go_on.set()
    assert readings.latest(PATIENCE) is not None


class Owner:
    """An object that begins anew in a forked process."""


def object_that_fails() -> None:
    """An object fails to begin anew in the child, and the objects after it still begin anew."""
    begun: list[Owner] = []

    def fail(_owner: Owner) -> None:
        raise RuntimeError("it does not begin anew")

    owners = [Owner() for _ in range(3)]
    for owner, begin_anew in zip(owners, (begun.append, fail, begun.append), strict=True):
        after_fork(owner, begin_anew)

    def work() -> None:
        assert begun == [owners[0], owners[2]]

    await_success(child(work))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
