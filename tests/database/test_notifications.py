"""Notifications reach all listeners; listeners and notifiers outlive their connections and the server."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import wait
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url
from sqlalchemy.pool import QueuePool

from eventsql_orchestration.database import Connection, Database, Queries, notifications
from eventsql_orchestration.database import notifier as notifier_module
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.notifications import BUFFER, LOG, STORE, Listener, channel_of
from eventsql_orchestration.database.notifier import Notifier
from eventsql_orchestration.threads import start_thread
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import Until


class Heard:
    """Counts the calls of its callbacks."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def by(self, name: str) -> Callable[[], None]:
        def hear() -> None:
            with self._lock:
                self.counts[name] += 1

        return hear


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listener(database: Database) -> Iterator[Listener]:
    with closing(Listener(database)) as opened:
        yield opened


@pytest.fixture
def notifier(database: Database) -> Iterator[Notifier]:
    with closing(Notifier(database)) as opened:
        yield opened


def listeners(database: Database) -> list[int]:
    """The server's processes that listen."""
    with database.connection() as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
        )
        return [pid for (pid,) in rows]


def listens_already(listener: Listener, until: Until) -> None:
    """Wait until it listens, and calls no later subscriber because of that."""
    begun = threading.Event()
    listener.subscribe(STORE, "others", begun.set)
    until(begun.is_set)


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_notification_reaches_who_listens_for_its_kind_and_topic(
    listener: Listener, notifier: Notifier, heard: Heard, until: Until
) -> None:
    listens_already(listener, until)
    listener.subscribe(LOG, "orders", heard.by("orders"))
    listener.subscribe(LOG, "payments", heard.by("payments"))
    listener.subscribe(LOG, None, heard.by("any log"))
    listener.subscribe(BUFFER, "orders", heard.by("buffer of orders"))
    notifier.notify(LOG, "orders")
    until(lambda: heard.counts == {"orders": 1, "any log": 1})
    notifier.notify(LOG, "payments")
    until(lambda: heard.counts == {"orders": 1, "payments": 1, "any log": 2})
    notifier.notify(BUFFER, "orders")
    until(lambda: heard.counts["buffer of orders"])
    assert heard.counts == {"orders": 1, "payments": 1, "any log": 2, "buffer of orders": 1}


def test_a_notification_of_no_topic_reaches_those_who_listen_to_all(
    listener: Listener, notifier: Notifier, heard: Heard, until: Until
) -> None:
    listener.subscribe(BUFFER, None, heard.by("any"))
    until(lambda: heard.counts["any"] == 1)
    notifier.notify(BUFFER, None)
    until(lambda: heard.counts["any"] == 2)


def test_a_new_subscriber_is_called_once_because_it_may_have_missed_events(
    listener: Listener, heard: Heard, until: Until
) -> None:
    assert not listener.listening
    listener.subscribe(LOG, "orders", heard.by("orders"))
    until(lambda: heard.counts["orders"] == 1)
    assert listener.listening


def test_a_listener_whose_machine_stood_still_during_its_test_still_listens(
    listener: Listener, heard: Heard, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for the test is over, and its notification is here."""

    def late(objects: list[Any], timeout: float | None = None) -> list[Any]:
        return wait(objects, 30.0 if timeout == 0.0 and len(objects) > 1 else timeout)

    monkeypatch.setattr(notifications, "TEST_SECONDS", 0.0)
    monkeypatch.setattr(notifications, "wait", late)
    listener.subscribe(LOG, "orders", heard.by("orders"))
    until(lambda: heard.counts["orders"] == 1)
    assert listener.listening


def test_a_former_subscriber_is_not_called(listener: Listener, notifier: Notifier, heard: Heard, until: Until) -> None:
    listens_already(listener, until)
    unsubscribe = listener.subscribe(LOG, "orders", heard.by("first"))
    listener.subscribe(LOG, "orders", heard.by("second"))
    notifier.notify(LOG, "orders")
    until(lambda: heard.counts == {"first": 1, "second": 1})
    unsubscribe()
    unsubscribe()
    notifier.notify(LOG, "orders")
    until(lambda: heard.counts["second"] == 2)
    assert heard.counts["first"] == 1


def test_a_callback_that_raises_keeps_nobody_else_from_hearing(
    listener: Listener, notifier: Notifier, heard: Heard, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    listener.subscribe(LOG, "orders", broken)
    # It is called when listening begins, and the next subscriber is not.
    until(lambda: "RuntimeError: broken" in caplog.text)
    listener.subscribe(LOG, "orders", heard.by("orders"))
    notifier.notify(LOG, "orders")
    until(lambda: heard.counts["orders"] == 1)
    assert caplog.text.count("RuntimeError: broken") == 2


def test_a_listener_that_loses_its_connection_says_so_in_a_line_and_listens_again(
    database: Database, listener: Listener, notifier: Notifier, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    states: list[bool] = []
    listener.subscribe(LOG, "orders", lambda: states.append(listener.listening))
    until(lambda: states == [True])
    with database.connection() as connection:
        for pid in listeners(database):
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    until(lambda: states == [True, False, True])
    notifier.notify(LOG, "orders")
    until(lambda: len(states) == 4)
    assert "no notifications from" in caplog.text
    assert not any("\n" in each.getMessage() for each in caplog.records)
    # Commands show it, as they have shown the warning.
    assert [each.getMessage() for each in caplog.records if hasattr(each, "recovery")] == [
        f"notifications arrive from {database} again"
    ]


def test_the_session_of_a_listener_may_be_idle(
    dsn: str, heard: Heard, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, dedicated = list[Connection](), Database.dedicated

    def note(database: Database) -> Connection:
        sessions.append(dedicated(database))
        return sessions[-1]

    monkeypatch.setattr(Database, "dedicated", note)
    limited = make_url(dsn).update_query_dict({"options": "-c idle_session_timeout=1min"})
    url = limited.render_as_string(hide_password=False)
    with Database(url) as database, closing(Listener(database)) as listener:
        listener.subscribe(LOG, "orders", heard.by("orders"))
        until(lambda: listener.listening)
        (session,) = sessions
        assert session.execute("SHOW idle_session_timeout").fetchone() == ("0",)


def test_a_listener_for_which_the_process_has_no_file_left_listens_later(
    listener: Listener, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, refusals = Listener._shared, [OSError(errno.EMFILE, "Too many open files")]

    def shared_unless_full(listener: Listener, connection: Connection) -> bool:
        if refusals:
            raise refusals.pop()
        return shared(listener, connection)

    monkeypatch.setattr(Listener, "_shared", shared_unless_full)
    listener.subscribe(LOG, "orders", lambda: None)
    until(lambda: listener.listening)
    assert not refusals


def test_listener_and_notifier_survive_a_restart_of_the_server(
    server: EmbeddedPostgres, listener: Listener, notifier: Notifier, heard: Heard, until: Until
) -> None:
    listener.subscribe(LOG, "orders", heard.by("orders"))
    until(lambda: heard.counts["orders"] == 1)
    notifier.notify(LOG, "orders")
    until(lambda: heard.counts["orders"] == 2)
    server.stop(mode="immediate")
    try:
        until(lambda: not listener.listening)
        # Kept until the server is there.
        notifier.notify(LOG, "orders")
    finally:
        server.start()
    until(lambda: listener.listening)
    before = heard.counts["orders"]
    until(lambda: not notifier._pending)
    notifier.notify(LOG, "orders")
    until(lambda: heard.counts["orders"] > before)


def test_a_listener_behind_a_pooler_finds_out_that_it_hears_nothing(
    server: EmbeddedPostgres, dsn: str, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LISTEN succeeds, and nothing arrives, as on a connection to another database than the notifications'."""

    class Elsewhere(Database):
        def dedicated(self) -> Connection:
            return psycopg.connect(server.start().dsn, autocommit=True)

    monkeypatch.setattr(notifications, "TEST_SECONDS", 0.05)
    with Elsewhere(dsn) as database, closing(Listener(database)) as listener:
        with caplog.at_level(logging.WARNING):
            listener.subscribe(LOG, "orders", lambda: None)
            until(lambda: "no notification arrives from" in caplog.text)
        assert not listener.listening
        assert "s3cr3t" not in caplog.text
    until(lambda: threads("eventsql-listener") == [])


def test_closing_ends_the_thread_and_its_connection(
    database: Database, listener: Listener, heard: Heard, until: Until
) -> None:
    for count in (1, 3):
        unsubscribe = listener.subscribe(LOG, "orders", heard.by("orders"))
        until(lambda: listener.listening)
        until(lambda count=count: heard.counts["orders"] == count)  # type: ignore[misc]  # bound
        assert len(listeners(database)) == 1
        listener.close()
        assert not listener.listening
        until(lambda: threads("eventsql-listener") == [])
        until(lambda: not listeners(database))
        unsubscribe()


def test_a_subscription_that_nobody_has_any_more_leaves_nothing_behind(listener: Listener) -> None:
    ends = [listener.subscribe(LOG, topic, lambda: None) for topic in ("orders", "orders", "payments")]
    ends[0]()
    assert len(listener._callbacks) == 2
    for end in ends:
        end()
    assert listener._callbacks == {}


def test_a_thread_that_outlives_its_closing_does_not_speak_for_its_successor(
    listener: Listener, heard: Heard, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "CLOSE_SECONDS", 0.01)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        if not held.is_set():
            held.set()
            go_on.wait(60)

    end = listener.subscribe(LOG, "orders", hold)
    assert held.wait(60)
    (old,) = threads("eventsql-listener")
    listener.close()
    assert not listener.listening
    end()
    listener.subscribe(LOG, "orders", heard.by("orders"))
    until(lambda: heard.counts["orders"] == 1)
    go_on.set()
    old.join(60)
    assert (old.is_alive(), listener.listening) == (False, True)
    assert heard.counts["orders"] == 1


@pytest.mark.parametrize("what", ["dedicated", "connection"])
def test_a_thread_that_outlives_its_closing_opens_no_pool_anew(
    database: Database, listener: Listener, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(notifications, "CLOSE_SECONDS", 0.01)
    connecting, go_on = threading.Event(), threading.Event()
    database.ensure_schema()
    connect = getattr(database, what)

    def slow() -> Any:
        connecting.set()
        assert go_on.wait(60)
        return connect()

    monkeypatch.setattr(database, what, slow)
    listener.subscribe(LOG, "orders", lambda: None)
    assert connecting.wait(60)
    (old,) = threads("eventsql-listener")
    listener.close()
    database.close()
    go_on.set()
    old.join(60)
    pool = database.engine.pool
    assert isinstance(pool, QueuePool)
    assert (old.is_alive(), pool.checkedin(), pool.checkedout()) == (False, 0, 0)


# Notifiers


@pytest.fixture
def received(dsn: str, until: Until) -> Iterator[Callable[[], list[str]]]:
    """The payloads that have arrived at a session of the test's own."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        channel = channel_of("eventsql")
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        connection.execute(Queries("notifications", "eventsql")("announce"), {"channel": channel})
        payloads: list[str] = []

        def receive() -> list[str]:
            payloads.extend(notification.payload for notification in connection.notifies(timeout=0))
            return payloads

        yield receive


def test_a_notification_within_the_interval_is_sent_at_its_end(
    notifier: Notifier, received: Callable[[], list[str]], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "NOTIFY_INTERVAL", 0.1)
    for count in (1, 2):
        notifier.notify(LOG, "orders")
        until(lambda count=count: len(received()) == count)  # type: ignore[misc]  # bound


def test_a_notifier_remembers_no_topic_whose_interval_is_over(
    notifier: Notifier, received: Callable[[], list[str]], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "NOTIFY_INTERVAL", 0.0)
    received()
    for number in range(20):
        notifier.notify(LOG, f"orders_{number}")
        until(lambda number=number: f"{LOG}:orders_{number}" in notifier._next_at)  # type: ignore[misc]  # bound
        assert len(notifier._next_at) == 1
    until(lambda: len(received()) == 20)


def test_a_notification_that_nobody_listens_to_is_not_sent(database: Database, notifier: Notifier, dsn: str) -> None:
    channel = channel_of(database.schema)
    with psycopg.connect(dsn, autocommit=True) as listening:
        # As another program would, without telling that it listens.
        listening.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        notifier.notify(LOG, "orders")
        notifier.close()
        listening.execute("SELECT 1")
        assert not list(listening.notifies(timeout=0))

        listening.execute(Queries("notifications", database.schema)("announce"), {"channel": channel})
        notifier.notify(LOG, "payments")
        assert [each.payload for each in listening.notifies(stop_after=1, timeout=60)] == ["log:payments"]


def test_a_caller_that_looks_needs_no_thread_while_nobody_listens(notifier: Notifier) -> None:
    notifier.notify(LOG, "orders", look=True)
    assert not notifier._pending
    assert threads("eventsql-notifier") == []


@pytest.mark.parametrize("closed", [False, True])
def test_no_call_of_a_caller_that_looks_opens_a_connection_while_nobody_listens(
    notifier: Notifier, until: Until, monkeypatch: pytest.MonkeyPatch, *, closed: bool
) -> None:
    opened: list[None] = []
    dedicated = Database.dedicated

    def counted(database: Database) -> Connection:
        opened.append(None)
        return dedicated(database)

    monkeypatch.setattr(Database, "dedicated", counted)
    monkeypatch.setattr(notifier_module, "QUIET_INTERVAL", 0.2)
    for topic in ("orders", "payments"):
        notifier.notify(LOG, topic, look=True)
    if closed:
        notifier.close()
    until(lambda: not notifier._pending)
    notifier.close()
    until(lambda: threads("eventsql-notifier") == [])
    assert opened == []


def test_a_listener_hears_a_caller_that_looks(
    listener: Listener, notifier: Notifier, heard: Heard, until: Until
) -> None:
    listener.subscribe(LOG, "orders", heard.by("orders"))
    until(lambda: listener.listening)
    looked = heard.counts["orders"]
    notifier.notify(LOG, "orders", look=True)
    until(lambda: heard.counts["orders"] > looked)


@pytest.mark.parametrize("look", [False, True])
def test_a_listener_hears_what_is_told_shortly_after_nobody_listened(
    database: Database, notifier: Notifier, until: Until, monkeypatch: pytest.MonkeyPatch, *, look: bool
) -> None:
    monkeypatch.setattr(notifier_module, "QUIET_INTERVAL", 0.2)
    notifier.notify(LOG, "orders", look=look)
    until(lambda: not notifier._pending)
    heard: list[None] = []
    with closing(Listener(database)) as listener:
        listener.subscribe(LOG, "orders", lambda: heard.append(None))
        until(lambda: listener.listening)
        looked = len(heard)
        notifier.notify(LOG, "orders", look=look)
        until(lambda: len(heard) > looked)


def test_a_listener_says_that_it_cannot_announce_itself_and_does_so_later(
    database: Database, dsn: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(dsn, autocommit=True) as other, closing(Listener(database)) as listener:
        key = {"channel": channel_of(database.schema)}
        other.execute("SELECT pg_advisory_lock(hashtextextended(%(channel)s, 6074605))", key)
        listener.subscribe(LOG, "orders", lambda: None)
        until(lambda: "no notifications from" in caplog.text)
        assert not listener.listening
        other.execute("SELECT pg_advisory_unlock_all()")
        until(lambda: listener.listening)


def test_nothing_connects_before_there_is_something_to_tell() -> None:
    with (
        Database("postgresql://someone:s3cr3t@127.0.0.1:1/nowhere") as database,
        closing(Notifier(database)),
        closing(Listener(database)),
    ):
        assert threads("eventsql-notifier") == threads("eventsql-listener") == []


@pytest.mark.parametrize("look", [False, True])
def test_notifying_waits_for_no_database_and_complains_once(
    caplog: pytest.LogCaptureFixture, until: Until, *, look: bool
) -> None:
    with Database("postgresql://someone:s3cr3t@127.0.0.1:1/nowhere") as database:
        notifier = Notifier(database)
        for _ in range(3):
            notifier.notify(LOG, "orders", look=look)
            until(lambda: "no notification can be sent" in caplog.text)
        notifier.close()
    until(lambda: threads("eventsql-notifier") == [])
    assert caplog.text.count("no notification can be sent") == 1
    assert "s3cr3t" not in caplog.text


def test_closing_sends_what_is_left_of_the_interval_together_and_another_notification_starts_it_anew(
    notifier: Notifier, received: Callable[[], list[str]], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "NOTIFY_INTERVAL", 3600.0)
    for turn in (1, 2):
        notifier.notify(LOG, "orders")
        until(lambda turn=turn: received().count("log:orders") == 2 * turn - 1)  # type: ignore[misc]  # bound
        # Both at once: the thread sends that of the payments, and keeps that of the orders until their interval ends.
        notifier._pending.update({"log:orders": None, "log:payments": None})
        notifier._wake.set()
        until(lambda turn=turn: received().count("log:payments") == turn)  # type: ignore[misc]  # bound
        assert received().count("log:orders") == 2 * turn - 1
        for _ in range(1_000):
            notifier.notify(LOG, "orders")
        notifier.close()
        until(lambda: threads("eventsql-notifier") == [])
        until(lambda turn=turn: len(received()) >= 3 * turn)  # type: ignore[misc]  # bound
        assert sorted(received()) == ["log:orders"] * 2 * turn + ["log:payments"] * turn


def test_a_thread_that_outlives_its_closing_sends_beside_its_successor(
    notifier: Notifier, received: Callable[[], list[str]], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier_module, "CLOSE_SECONDS", 0.01)

    class Contended(dict[str, None]):
        """Another thread takes out what this one has just found due."""

        def __iter__(self) -> Iterator[str]:
            found = list(super().keys())
            self.clear()
            return iter(found)

    notifier._pending = Contended()
    notifier.notify(LOG, "orders")
    until(lambda: received() == ["log:orders"])
    assert len(threads("eventsql-notifier")) == 1


def test_a_notifier_goes_on_when_its_connection_was_closed_while_it_was_idle(
    database: Database, notifier: Notifier, received: Callable[[], list[str]], until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    notifier.notify(LOG, "orders")
    until(lambda: len(received()) == 1)
    with database.connection() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE '%pg_notify%' AND pid <> pg_backend_pid()"
        )
    notifier.notify(LOG, "orders")
    until(lambda: len(received()) == 2)
    assert "not notified" not in caplog.text


@pytest.mark.parametrize("schema", ["eventsql", "e" * 54, "e" * 55, "e" * 63])
def test_the_channel_of_a_schema_has_a_name_that_postgresql_takes(dsn: str, schema: str) -> None:
    channel = channel_of(schema)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        connection.execute("SELECT pg_notify(%s, 'x')", (channel,))
        assert [notification.payload for notification in connection.notifies(timeout=0)] == ["x"]
    assert channel_of(schema) != channel_of(schema[:-1])


@pytest.mark.parametrize("module", [notifications, notifier_module])
def test_a_start_that_ctrl_c_interrupts_leaves_no_thread(
    listener: Listener, notifier: Notifier, until: Until, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    started: list[threading.Thread] = []
    failed: list[object] = []

    def start(*arguments: Any) -> None:
        started.append(start_thread(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "excepthook", failed.append)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "start_thread", start)
        if module is notifications:
            listener.subscribe(LOG, "orders", lambda: None)
        else:
            notifier.notify(LOG, "orders")
    until(lambda: not started[0].is_alive())
    assert failed == []
    # The next call starts another thread.
    heard = threading.Event()
    listener.subscribe(LOG, "orders", heard.set)
    notifier.notify(LOG, "orders")
    assert heard.wait(PATIENCE)
