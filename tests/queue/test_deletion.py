"""Deleting a queue: what prevents it, what it deletes too, and processes that use the queue meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import DatabaseBusyError, QueueInUseError, QueueNotFoundError
from eventsql_orchestration.queue import NewMessage, Queue, list_queues, upkeep
from tests.fixtures import Sessions, Until, UntilBlocked


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database, "commands", max_receives=1, retention=3_600)


def names(database: Database) -> list[str]:
    return [each.name for each in list_queues(database)]


def rows(database: Database) -> int:
    """The rows that queues have left in any of their tables."""
    tables = ("queue_message", "queue_archive", "queue_deduplication")
    with database.connection() as connection:
        counted = [connection.execute(f"SELECT FROM eventsql.{table}".encode()).rowcount for table in tables]
    return sum(counted)


def send(queue: Queue) -> None:
    queue.send(b"x")


def hold(queue: Queue) -> None:
    queue.send(b"x")
    queue.receive()


def archive(queue: Queue) -> None:
    queue.send(b"x")
    queue.acknowledge_all(queue.receive())


def bury(queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    queue.release(message)
    assert queue.receive() == []


def test_an_empty_queue_is_deleted_and_its_name_is_free_for_one_of_another_kind(database: Database) -> None:
    queue = Queue(database, "commands")
    queue.send(b"x", deduplication_id="once")
    queue.acknowledge_all(queue.receive())
    queue.delete()
    assert (names(database), rows(database)) == ([], 0)
    anew = Queue(database, "commands", ordered=True)
    anew.send(b"y", key="a", deduplication_id="once")
    assert [message.body for message in anew.receive()] == [b"y"]


def test_a_queue_that_is_not_there_is_not_made_to_be_deleted(database: Database, queue: Queue) -> None:
    with pytest.raises(QueueNotFoundError):
        queue.delete(force=True)
    assert names(database) == []


@pytest.mark.parametrize("filled", [send, hold, archive, bury])
def test_a_queue_with_messages_is_deleted_only_by_force(
    database: Database, queue: Queue, filled: Callable[[Queue], None]
) -> None:
    filled(queue)
    before = rows(database)
    with pytest.raises(QueueInUseError):
        queue.delete()
    assert (names(database), rows(database)) == (["commands", "commands_dead"], before)
    queue.delete(force=True)
    assert names(database) == ["commands_dead"]
    # A dead letter is a message of its own queue.
    assert rows(database) == (1 if filled is bury else 0)


def test_a_queue_that_takes_dead_letters_is_kept_as_long_as_their_queue(database: Database, queue: Queue) -> None:
    bury(queue)
    dead = Queue(database, "commands_dead")
    with pytest.raises(QueueInUseError):
        dead.delete(force=True)
    (letter,) = dead.peek()
    assert letter.origin == "commands"
    queue.delete(force=True)
    assert queue.redrive() == 0
    (letter,) = dead.peek()
    assert (letter.body, letter.origin) == (b"x", None)
    dead.delete(force=True)
    assert (names(database), rows(database)) == ([], 0)


def test_the_options_of_a_queue_object_make_no_queue_of_dead_letters_before_the_deletion(database: Database) -> None:
    Queue(database, "commands").send(b"x")
    Queue(database, "commands", max_receives=5).delete(force=True)
    assert names(database) == []


def test_other_queues_keep_their_messages(database: Database, queue: Queue) -> None:
    other = Queue(database, "other", retention=60)
    other.send_all([NewMessage(b"1", deduplication_id="a"), NewMessage(b"2")])
    other.acknowledge_all(other.receive())
    send(queue)
    queue.delete(force=True)
    assert (other.depth().visible, len(other.archived()), rows(database)) == (1, 1, 3)


def test_a_message_of_an_open_transaction_keeps_the_queue_when_it_is_committed(
    database: Database, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    queue, session = Queue(database, "commands"), sessions()
    queue.send(b"x", connection=session)
    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(queue.delete)
        until_blocked()
        session.commit()
        with pytest.raises(QueueInUseError):
            deleted.result(60)
    assert queue.depth().visible == 1


@pytest.mark.parametrize("message", [NewMessage(b"x"), NewMessage(b"x", deduplication_id="b")], ids=["plain", "once"])
def test_a_message_that_is_sent_during_the_deletion_is_refused(
    database: Database, session: Connection, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch,
    message: NewMessage,
) -> None:  # fmt: skip
    queue = Queue(database, "commands")
    queue.send(b"x", deduplication_id="a")
    queue.acknowledge_all(queue.receive())
    monkeypatch.setattr(upkeep, "WAIT_SECONDS", 600)
    with ThreadPoolExecutor(2) as pool:
        # The deletion waits for this row when it has made all others wait.
        with session.transaction():
            session.execute("SELECT FROM eventsql.queue_deduplication FOR UPDATE")
            deleted = pool.submit(queue.delete)
            until_blocked()
            sent = pool.submit(queue.send_all, [message])
            until_blocked(2)
        deleted.result(60)
        with pytest.raises(QueueNotFoundError):
            sent.result(60)
    assert rows(database) == 0


def test_the_deletion_gives_way_to_a_transaction_that_does_not_end(
    database: Database, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, session = Queue(database, "commands"), sessions()
    queue.send(b"x", connection=session)
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0)
    with pytest.raises(DatabaseBusyError, match="'commands' is kept"):
        queue.delete()
    session.rollback()
    queue.send(b"y")
    assert queue.depth().visible == 1


def test_a_forced_deletion_has_emptied_the_queue_before_it_gives_way(
    database: Database, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, session = Queue(database, "commands"), sessions()
    queue.send(b"x")
    queue.send(b"y", connection=session)
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0)
    with pytest.raises(DatabaseBusyError, match="'commands' is emptied, but kept"):
        queue.delete(force=True)
    session.rollback()
    assert (names(database), rows(database)) == (["commands"], 0)


def test_a_queue_with_an_archive_is_deleted_although_a_publication_has_all_tables(
    database: Database, queue: Queue, session: Connection
) -> None:
    session.execute("CREATE PUBLICATION every_table FOR ALL TABLES")
    archive(queue)
    queue.delete(force=True)
    assert names(database) == ["commands_dead"]


def test_the_rows_that_have_expired_are_deleted_before_other_queues_wait(
    database: Database, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, session = Queue(database, "commands", retention=3_600), sessions()
    queue.send(b"x", deduplication_id="once")
    queue.acknowledge_all(queue.receive())
    # The archive has a part for each day.
    session.execute("SELECT eventsql.make_queue_archive(now() - interval '1 s')")
    for table in ("queue_archive", "queue_deduplication"):
        session.execute(f"UPDATE eventsql.{table} SET eql_expires_at = now() - interval '1 s'".encode())
    session.commit()
    queue.send(b"y", connection=session)
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0)
    with pytest.raises(DatabaseBusyError):
        queue.delete()
    assert rows(database) == 0


def test_receivers_and_workers_of_a_deleted_queue_end_instead_of_waiting_for_ever(
    platform: EventSQL, until: Until
) -> None:
    queue, other = Queue(platform, "commands"), Queue(platform, "commands")
    with queue.work(lambda *_: None, workers=2) as workers:
        other.delete()
        until(lambda: not workers.running)
    assert queue.statistics().depth == 0
    with pytest.raises(QueueNotFoundError):
        queue.receive(wait=600)
    with pytest.raises(QueueNotFoundError):
        queue.send(b"x")
    assert names(platform.database) == []
