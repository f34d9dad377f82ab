"""The database hands out connections, raises errors of the package, and never shows a password."""

from __future__ import annotations

import errno
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from decimal import Decimal
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import ANY
from urllib.parse import quote

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads
from psycopg.types.string import StrDumper

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import CallersConnection, Connection, Database, fair_pool, sessions, tables
from eventsql_orchestration.database.connections import driver_connection
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.rows import send_copy
from eventsql_orchestration.database.translation import IF_LOST
from eventsql_orchestration.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    InvalidNameError,
    SchemaOutdatedError,
    TopicNotFoundError,
)
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.threads import in_thread
from tests.effects import stand_still, take_too_long
from tests.fixtures import Terminate, Until
from tests.interrupting import interrupted
from tests.waiting import PATIENCE

SECRET = "s3cr3t w/ @:%+ ü"


def pid_of(database: Database) -> int:
    with database.connection() as connection:
        return connection.info.backend_pid


def registered(database: Database) -> int:
    with database.core() as connection:
        return int(connection.scalar(sqlalchemy.select(sqlalchemy.func.count()).select_from(tables.topic)) or 0)


def run(database: Database, statement: str) -> Callable[[], object]:
    def execute() -> object:
        with database.connection() as connection:
            return connection.execute(statement.encode())

    return execute


def everything_said(error: BaseException) -> str:
    """The error with all that it came from, as a log shows it."""
    return "".join(traceback.format_exception(error)) + repr(error)


# Connections


def test_nothing_connects_before_it_is_used() -> None:
    Database("postgresql://someone@127.0.0.1:1/nowhere").close()


def test_a_connection_commits_each_statement_by_itself(database: Database) -> None:
    with database.connection() as connection:
        connection.execute("CREATE TABLE written (id int)")
        connection.execute("INSERT INTO written VALUES (1)")
        with database.connection() as other:
            assert other.execute("SELECT id FROM written").fetchall() == [(1,)]


def test_a_transaction_commits_when_its_block_ends_well_and_not_otherwise(database: Database) -> None:
    with database.connection() as connection:
        connection.execute("CREATE TABLE written (id int)")
    with database.transaction() as connection:
        connection.execute("INSERT INTO written VALUES (1)")
    with pytest.raises(ZeroDivisionError), database.transaction() as connection:
        connection.execute("INSERT INTO written VALUES (2)")
        raise ZeroDivisionError
    with database.connection() as connection:
        assert connection.execute("SELECT id FROM written").fetchall() == [(1,)]


def test_a_statement_sees_what_was_committed_before_it_whatever_the_server_defaults_to(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_isolation TO serializable'.encode())
    with Database(dsn, pool_size=1) as database:
        # SQLAlchemy's own transactions set the connection up for themselves.
        for use in (database.ensure_schema, database.revision, lambda: registered(database)):
            use()
            with database.transaction() as connection:
                assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
        with database.dedicated() as own, own.transaction():
            assert own.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("row_factory", dict_row), ("cursor_factory", psycopg.ClientCursor), ("prepare_threshold", None),
        ("read_only", True), ("deferrable", True),
    ],
)  # fmt: skip
def test_what_a_handler_set_on_its_connection_does_not_outlive_it(database: Database, name: str, value: object) -> None:
    with database.connection() as connection:
        before = getattr(connection, name)
        setattr(connection, name, value)
    with database.connection() as connection:
        assert getattr(connection, name) == before != value
        assert connection.execute("SELECT 1", binary=True).fetchone() == (1,)
    assert registered(database) == 0


class DecimalAsText(StrDumper):
    def dump(self, obj: Any) -> Any:
        return super().dump(str(obj))


def json_as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def test_adapters_that_a_handler_registered_do_not_outlive_it(database: Database) -> None:
    for _ in range(2):
        with database.connection() as connection:
            read = connection.execute("SELECT '1'::json, %s", [Decimal(1)]).fetchone()
            assert read == (1, Decimal(1))
            set_json_loads(json_as_text, connection)
            connection.adapters.register_dumper(Decimal, DecimalAsText)
            assert connection.execute("SELECT '1'::json, %s", [Decimal(1)]).fetchone() == ("1", "1")
    assert registered(database) == 0


def test_adapters_of_all_connections_of_an_engine_stay(database: Database) -> None:
    @sqlalchemy.event.listens_for(database.engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        set_json_loads(json_as_text, connection)

    for _ in range(2):
        with database.connection() as connection:
            assert connection.execute("SELECT '1'::json").fetchone() == ("1",)


def test_a_transaction_that_a_caller_left_broken_does_not_reach_the_next_one(database: Database) -> None:
    with database.connection() as connection:
        connection.execute("BEGIN")
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
    with database.connection() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_connection_in_the_middle_of_a_statement_is_not_handed_out_again(database: Database) -> None:
    with database.connection() as connection:
        rows = connection.cursor().stream("SELECT FROM generate_series(1, 3)")
        next(rows)
    assert connection.closed
    with database.connection() as another:
        assert another.execute("SELECT 1").fetchone() == (1,)
    assert registered(database) == 0


def test_a_connection_that_the_caller_closed_is_not_handed_out_again(database: Database) -> None:
    with database.connection() as connection:
        closed = connection.info.backend_pid
        connection.close()
    assert pid_of(database) != closed


def test_an_interrupt_at_any_moment_of_the_begin_or_the_end_of_a_transaction_fails_no_later_one(
    database: Database,
) -> None:
    def transact() -> None:
        with database.transaction() as connection:
            connection.execute("SELECT")

    for after in count():
        goes_on = interrupted(after, transact, module="psycopg/transaction.py")
        transact()
        registered(database)
        if not goes_on:
            break
    assert after > 10


def test_a_thread_that_ctrl_c_interrupts_does_not_ask_for_a_connection_any_more(database: Database) -> None:
    def use() -> None:
        with database.connection(), database.core():
            pass

    for after in count():
        goes_on = interrupted(after, use, module="/database/pool.py")
        assert database._pool._asking == []
        if not goes_on:
            break
    assert after > 10


def test_ctrl_c_at_any_moment_of_a_copy_lets_its_transaction_end(dsn: str) -> None:
    def copy(connection: Connection) -> None:
        with connection.transaction():
            connection.execute("CREATE TEMPORARY TABLE number (value int) ON COMMIT DROP")
            send_copy(connection.cursor(), sql.SQL("COPY number FROM STDIN"), [b"1\n", b"2\n"])

    def moment(after: int) -> bool:
        with psycopg.connect(dsn) as connection:
            return interrupted(after, partial(copy, connection), module="contextlib.py")

    for after in count():
        # In a thread, in case that the transaction never ends.
        if not in_thread("copy", partial(moment, after)).result(PATIENCE):
            break
    assert after > 5


def test_ctrl_c_in_the_check_of_a_callers_connection_leaves_its_lock_free(dsn: str) -> None:
    with closing(psycopg.connect(dsn)) as connection:
        for after in count():
            goes_on = interrupted(after, partial(driver_connection, connection), module="database/connections.py")
            assert not connection.lock.locked()
            if not goes_on:
                break
    assert after > 5


def test_a_dedicated_connection_is_the_callers_own(database: Database) -> None:
    with database.dedicated() as own:
        assert own.autocommit
        assert own.info.backend_pid != pid_of(database)


def test_connections_are_used_again_until_the_database_is_closed(database: Database) -> None:
    before = pid_of(database)
    assert pid_of(database) == before
    database.close()
    with database:
        assert pid_of(database) != before


def checkouts(database: Database) -> list[object]:
    """Grows with each connection that is taken from SQLAlchemy's pool."""
    taken: list[object] = []
    sqlalchemy.event.listen(database.engine, "checkout", lambda *_: taken.append(1))
    return taken


def pids_at_once(database: Database, connections: int) -> list[int]:
    """The process ids of the server for connections that are open at the same time."""
    with ExitStack() as opened:
        taken = [opened.enter_context(database.connection()) for _ in range(connections)]
        return [connection.info.backend_pid for connection in taken]


def test_connections_that_are_given_back_are_kept_at_hand(database: Database) -> None:
    pids = set(pids_at_once(database, 3))
    taken = checkouts(database)
    assert {pid for _ in range(3) for pid in pids_at_once(database, 3)} == pids
    assert len(taken) == 0
    # An engine's own users find one in the pool.
    with database.core() as connection:
        assert connection.exec_driver_sql("SELECT pg_catalog.pg_backend_pid()").scalar() in pids
    assert not database.exhausted


def test_as_many_connections_as_the_size_of_the_pool_are_kept(dsn: str) -> None:
    with Database(dsn, pool_size=4, max_overflow=4) as database:
        with ExitStack() as opened:
            taken = [opened.enter_context(database.connection()) for _ in range(8)]
            assert database.exhausted
        assert [connection.closed for connection in taken].count(False) == 4
        assert len(database._pool._spares) == 2


def test_a_pool_of_a_fixed_size_keeps_all_of_its_connections(dsn: str) -> None:
    with Database(dsn, pool_size=10, max_overflow=0) as database:
        pids = set(pids_at_once(database, 10))
        registered(database)
        assert set(pids_at_once(database, 10)) == pids


def test_a_thread_that_waits_in_the_pool_gets_a_connection_that_could_be_kept_at_hand(dsn: str, until: Until) -> None:
    with Database(dsn, pool_size=4, max_overflow=4) as database:
        pid_of(database)
        pool: Any = database.engine.pool
        waiting = threading.Thread(target=pid_of, args=[database])
        with database.connection():
            # As if other threads were making connections, which then fail: this wakes nobody.
            overflow, pool._overflow = pool._overflow, pool._max_overflow
            waiting.start()
            until(lambda: bool(pool._pool.waiting))
            pool._overflow = overflow
        waiting.join(10)
        assert not waiting.is_alive()


@pytest.mark.parametrize("sqlalchemys", [False, True])
def test_a_thread_that_waits_for_a_connection_is_served_before_the_thread_that_gave_it_back(
    dsn: str, until: Until, *, sqlalchemys: bool
) -> None:
    served: list[str] = []

    def use(name: str) -> None:
        with database.core() if sqlalchemys else database.connection():
            served.append(name)

    with Database(dsn, pool_size=1, max_overflow=0) as database, ThreadPoolExecutor(3) as executor:
        pool: Any = database.engine.pool
        with database.connection():
            waiting = []
            for name in ["first", "second", "third"]:
                waiting.append(executor.submit(use, name))
                until(lambda: pool._pool.waiting == len(waiting))
        use("again")
        for each in waiting:
            each.result(PATIENCE)
    assert served == ["first", "second", "third", "again"]


def test_a_thread_whose_time_is_up_leaves_its_turn_to_the_next_one(dsn: str, until: Until) -> None:
    with Database(dsn, pool_size=1, max_overflow=0) as database, ThreadPoolExecutor(2) as executor:
        pool: Any = database.engine.pool
        with database.connection() as connection:
            timeout, pool._timeout = pool._timeout, 0.2
            impatient = executor.submit(pid_of, database)
            until(lambda: bool(pool._pool.waiting) or impatient.done())
            pool._timeout = timeout
            waiting = executor.submit(pid_of, database)
            assert isinstance(impatient.exception(PATIENCE), DatabaseBusyError)
            until(lambda: bool(pool._pool.waiting))
            pid = connection.info.backend_pid
        assert waiting.result(PATIENCE) == pid


def test_no_connection_is_closed_that_a_waiting_thread_will_take(dsn: str, until: Until) -> None:
    with Database(dsn, pool_size=1, max_overflow=1) as database, ThreadPoolExecutor(2) as executor:
        pool: Any = database.engine.pool
        with ExitStack() as taken:
            connections = [taken.enter_context(database.connection()) for _ in range(2)]
            waiting = [executor.submit(pid_of, database) for _ in range(2)]
            until(lambda: pool._pool.waiting == 2)
            # No waiting thread runs until both connections are given back.
            with pool._pool.mutex:
                taken.close()
                assert not any(connection.closed for connection in connections)
        for each in waiting:
            each.result(PATIENCE)


def test_each_waiting_thread_gets_one_of_the_connections_that_are_given_back_at_once(dsn: str, until: Until) -> None:
    together = threading.Barrier(3)

    def use() -> None:
        with database.connection():
            together.wait(PATIENCE)

    with Database(dsn, pool_size=4, max_overflow=4) as database, ThreadPoolExecutor(3) as executor, ExitStack() as held:
        pool: Any = database.engine.pool
        with ExitStack() as taken:
            for stack, connections in ((held, 5), (taken, 3)):
                for _ in range(connections):
                    stack.enter_context(database.connection())
            waiting = [executor.submit(use) for _ in range(3)]
            until(lambda: pool._pool.waiting == 3)
            # The pool keeps two connections, and one at hand.
            with pool._pool.mutex:
                taken.close()
        for each in waiting:
            each.result(PATIENCE)


def test_a_program_that_logs_at_info_sees_no_line_of_the_pool(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Database(dsn) as database:
        pid_of(database)
        with database.connection() as connection:
            connection.close()
    assert not [record for record in caplog.records if "Pool" in record.name]


def test_ctrl_c_at_any_moment_of_waiting_for_a_connection_leaves_nobody_waiting() -> None:
    for after in count():
        queue = fair_pool._FairQueue(1)
        queue.put(ANY)
        goes_on = interrupted(after, partial(queue.get, timeout=0), module="fair_pool.py")
        assert queue.waiting == 0
        if not goes_on:
            break
    assert after > 5


def test_a_thread_that_ctrl_c_interrupts_leaves_its_turn_to_the_next_one(until: Until) -> None:
    class Turns(deque[threading.Condition]):
        def remove(self, turn: threading.Condition) -> None:
            super().remove(turn)
            raise KeyboardInterrupt

    queue = fair_pool._FairQueue(1)
    with ThreadPoolExecutor(1) as executor:
        with queue.mutex:
            waiting = executor.submit(queue.get, timeout=PATIENCE)
        until(lambda: queue.waiting == 1)
        with queue.mutex:
            # As if a thread before it had been woken for this item.
            queue.queue.append(ANY)
            turns, queue._turns = queue._turns, Turns(queue._turns)
            with pytest.raises(KeyboardInterrupt):
                queue.get(timeout=0)
            queue._turns = turns
        assert waiting.result(PATIENCE / 2) is ANY


def test_no_connection_is_kept_at_hand_where_there_are_few_or_while_somebody_may_wait_for_one(dsn: str) -> None:
    with Database(dsn, pool_size=4, max_overflow=0) as narrow:
        pid_of(narrow)
        taken = checkouts(narrow)
        pid_of(narrow), pid_of(narrow)
        assert len(taken) == 2
    with Database(dsn, pool_size=4, max_overflow=4) as database, ExitStack() as opened:
        for _ in range(7):
            opened.enter_context(database.connection())
        taken = checkouts(database)
        pid_of(database), pid_of(database)
        assert len(taken) == 2


def test_a_connection_at_hand_that_was_unused_for_long_is_pinged(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(database)
    pinged: list[object] = []
    monkeypatch.setattr(database.engine.dialect, "do_ping", pinged.append)
    monkeypatch.setattr(sessions, "ASKED_AFTER", 0.0)
    assert pid_of(database) == pid
    assert len(pinged) == 1


@pytest.mark.parametrize("close", [Database.close, lambda database: database.engine.dispose()], ids=["all", "engine"])
def test_a_connection_at_hand_is_closed_with_the_database_or_when_a_program_disposes_of_the_engine(
    database: Database, close: Callable[[Database], None]
) -> None:
    with database.connection() as connection:
        pass
    close(database)
    assert connection.closed


def holds_in_a_fork(condition: Callable[[], bool]) -> bool:
    """Whether a condition holds in a forked process, and nothing fails there."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if condition() else 1)
        except BaseException:  # noqa: BLE001 - the status tells
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_process_leaves_the_connection_at_hand_to_its_parent(database: Database) -> None:
    pid = pid_of(database)
    assert holds_in_a_fork(lambda: pid_of(database) != pid)
    assert pid_of(database) == pid


def test_a_connection_that_is_taken_while_the_database_is_closed_is_not_kept(database: Database) -> None:
    pool = database._pool
    # The next connection is a new one.
    database.engine.dispose()
    sqlalchemy.event.listen(database.engine, "connect", lambda *_: pool.close(), once=True)
    loan = pool.take()
    pool.give_back(loan)
    assert loan.connection.closed


def test_a_forked_process_keeps_no_connection_of_its_parent_at_hand(database: Database) -> None:
    parents = database.connection()
    with parents as connection:
        pid = connection.info.backend_pid

        def has_its_own() -> bool:
            # The parent's connection is given back while the child has one of its own.
            with database.connection():
                parents.__exit__(None, None, None)
                with database.connection():
                    pass
            return pid_of(database) != pid

        assert holds_in_a_fork(has_its_own)
    assert pid_of(database) == pid


@pytest.mark.parametrize("sqlalchemys", [False, True])
def test_threads_that_wait_for_a_connection_while_the_database_is_closed_end(
    dsn: str, until: Until, *, sqlalchemys: bool
) -> None:
    with Database(dsn, pool_size=1, max_overflow=0) as database, ThreadPoolExecutor(3) as executor:
        database.ensure_schema()
        with database.core() if sqlalchemys else database.connection():
            waiting = [executor.submit(each, database) for each in (pid_of, registered, pid_of)]
            until(lambda: len(database._pool._asking) == 3)
            database.close()
        assert [type(each.exception(PATIENCE)) for each in waiting] == [ClosedError] * 3


def test_a_connection_that_is_in_use_while_the_database_is_closed_is_closed_after_its_use(database: Database) -> None:
    with database.connection() as connection:
        database.close()
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert connection.closed


@pytest.mark.parametrize("use", [Database.connection, Database.core], ids=["psycopg", "sqlalchemy"])
def test_a_connection_that_is_given_back_at_the_moment_of_a_close_is_closed(
    dsn: str, use: Callable[[Database], AbstractContextManager[CallersConnection]]
) -> None:
    # A pool of one connection keeps none at hand.
    with Database(dsn, pool_size=1) as database, use(database) as used:
        given = driver_connection(used)
        # SQLAlchemy calls this after `Pool` has looked for a close, and before the connection is in the pool.
        sqlalchemy.event.listen(database.engine, "checkin", lambda *_: database.close(), once=True)
    assert given.closed


def test_core_finds_the_tables_of_the_schema_by_their_qualified_names_alone(dsn: str) -> None:
    with Database(dsn, schema="elsewhere") as database, database.core() as connection:
        connection.execute(sqlalchemy.insert(tables.topic).values(eql_name="t", eql_partitions=1))
        assert connection.scalar(sqlalchemy.text("SELECT eql_name FROM elsewhere.topic")) == "t"
        with pytest.raises(sqlalchemy.exc.ProgrammingError, match='"topic" does not exist'):
            connection.execute(sqlalchemy.text("SELECT eql_name FROM topic"))


@pytest.mark.parametrize("schema", ["select", "user", "_x1"])
def test_a_schema_may_be_called_like_a_word_of_sql(dsn: str, schema: str) -> None:
    with EventSQL(dsn, schema=schema, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders"))
        platform.publisher.publish(Publication("orders", b"{}"))
        assert platform.transfer.run_once() == {"orders": 1}
        assert platform.reader.count("orders") == 1


def test_a_schema_that_is_no_identifier_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(InvalidNameError):
        Database("postgresql://someone@127.0.0.1:1/nowhere", schema='x"; DROP SCHEMA public; --')


# A server that goes away


def test_a_server_that_restarted_in_between_costs_no_error(database: Database, server: EmbeddedPostgres) -> None:
    # Several idle connections in the pool, and each of them is gone.
    with database.connection(), database.connection(), database.connection():
        pass
    server.stop(mode="immediate")
    server.start()
    with database.connection() as one, database.connection() as two, database.connection() as three:
        for connection in (one, two, three):
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_lost_connection_raises_an_error_of_the_package_and_the_next_one_works(
    database: Database, terminate: Terminate
) -> None:
    with pytest.raises(DatabaseUnavailableError, match="closed the connection"), database.connection() as connection:
        terminate(connection)
        connection.execute("SELECT 1")
    assert pid_of(database)


def test_a_transaction_whose_connection_is_lost_raises_an_error_of_the_package_and_is_rolled_back(
    database: Database, terminate: Terminate
) -> None:
    with database.connection() as connection:
        connection.execute("CREATE TABLE written (id int)")
    with pytest.raises(DatabaseUnavailableError), database.transaction() as connection:
        connection.execute("INSERT INTO written VALUES (1)")
        terminate(connection)
    with database.connection() as connection:
        assert connection.execute("SELECT id FROM written").fetchall() == []


def test_another_database_that_is_gone_is_not_this_one(database: Database, dsn: str, terminate: Terminate) -> None:
    with (
        psycopg.connect(dsn) as other,
        pytest.raises(psycopg.errors.AdminShutdown),
        database.transaction() as connection,
    ):
        connection.execute("SELECT 1")
        terminate(other)
        other.execute("SELECT 1")


@pytest.mark.parametrize(
    ("end", "told"), [(stand_still, "idle_in_transaction_session_timeout"), (take_too_long, "_timeout of the role")]
)
def test_a_transaction_that_took_too_long_raises_an_error_that_names_the_setting(
    database: Database, end: Callable[[Connection], None], told: str
) -> None:
    def message() -> str:
        with pytest.raises(DatabaseUnavailableError) as failure, database.transaction() as connection:
            end(connection)
        return failure.value.message

    # On a busy machine, the driver may not hear the reason at once.
    found = next(found for found in (message() for _ in range(50)) if told in found)
    assert "is the server running" not in found


# Errors of ours, and those that are not


def test_errors_of_the_callers_own_statements_pass_as_they_are(database: Database) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
        run(database, "SELECT * FROM nowhere")()
    with pytest.raises(psycopg.errors.UndefinedColumn):
        run(database, "SELECT nothing FROM eventsql.topic")()
    with pytest.raises(psycopg.errors.UndefinedTable):
        run(database, "SELECT * FROM eventsql.view_of_nobody")()
    with pytest.raises(psycopg.errors.UndefinedColumn):
        run(database, "SELECT eql_nothing FROM eventsql.topic")()
    with pytest.raises(psycopg.errors.UniqueViolation):
        run(database, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (1)")()
    with pytest.raises(psycopg.errors.SyntaxError):
        run(database, "SELEC 1")()


@pytest.mark.parametrize(
    "drop",
    [
        "DROP TABLE eventsql.topic CASCADE",
        "ALTER TABLE eventsql.topic DROP eql_compression CASCADE",
        "ALTER SCHEMA eventsql RENAME TO former",
    ],
)
def test_a_missing_table_of_the_platform_is_named_with_what_helps_if_it_was_there_before(
    database: Database, drop: str
) -> None:
    with EventSQL(database.dsn) as platform:
        platform.open()
        run(database, drop)()
        with pytest.raises(SchemaOutdatedError, match=f"run `eventsql migrate`; {IF_LOST}"):
            platform.registry.topics()


def test_the_log_of_a_deleted_topic_is_a_topic_that_is_not_found(database: Database) -> None:
    with pytest.raises(TopicNotFoundError, match="the log of topic 'orders'"), database.connection() as connection:
        connection.execute(LogQueries("read", "eventsql")("end", topic="orders"))


def test_a_statement_or_a_lock_that_takes_too_long_is_a_busy_database(database: Database) -> None:
    with database.transaction() as holder:
        holder.execute("LOCK TABLE eventsql.topic")
        for limit, slow in (("statement", "SELECT pg_sleep(60)"), ("lock", "LOCK TABLE eventsql.topic")):
            with pytest.raises(DatabaseBusyError) as caught, database.transaction() as connection:
                connection.execute(f"SET LOCAL {limit}_timeout TO 1".encode())
                connection.execute(slow.encode())
            assert not isinstance(caught.value, DatabaseUnavailableError)


def test_a_pool_that_is_used_up_says_so(dsn: str) -> None:
    with Database(dsn, pool_size=1, max_overflow=0) as database, database.connection():
        database.engine.pool._timeout = 0.01  # type: ignore[attr-defined]  # thirty seconds otherwise
        with pytest.raises(DatabaseBusyError, match="every connection of this process is in use"):
            pid_of(database)


@pytest.mark.parametrize("sqlstate", ["08000", "08006", "08P01"])
def test_a_poolers_errors_while_its_server_is_away_are_errors_of_the_package(database: Database, sqlstate: str) -> None:
    with pytest.raises(DatabaseUnavailableError, match="query_wait_timeout") as told, database.errors():
        raise psycopg.errors.lookup(sqlstate)("query_wait_timeout")
    assert not isinstance(told.value, ConnectionLostError)


def test_a_lack_of_locks_names_the_setting_that_gives_more(database: Database) -> None:
    hint = "You might need to increase max_locks_per_transaction."
    with pytest.raises(DatabaseFullError, match=r"out of shared memory\. You might need to increase max_locks"):
        run(database, f"DO $$ BEGIN RAISE 'out of shared memory' USING ERRCODE = '53200', HINT = '{hint}'; END $$")()


@pytest.mark.parametrize(
    ("sqlstate", "said"),
    [
        ("57P02", "another server process"),
        ("08P01", "server conn crashed?"),
        # A pooler ends a COMMIT that takes too long: the server may go on with it.
        ("08P01", "query timeout"),
        ("08P01", "transaction timeout"),
        ("08P01", "admin forced disconnect"),
    ],
)
def test_a_server_or_a_pooler_that_lost_the_connection_leaves_the_outcome_unknown(
    database: Database, sqlstate: str, said: str
) -> None:
    with pytest.raises(ConnectionLostError), database.errors():
        raise psycopg.errors.lookup(sqlstate)(said)


@pytest.mark.parametrize(
    ("sqlstate", "kind", "said"),
    [
        ("53100", DatabaseFullError, "nothing of this call was stored"),
        ("53200", DatabaseFullError, "nothing of this call was stored"),
        ("53400", DatabaseFullError, "nothing of this call was stored"),
        ("25006", DatabaseError, "takes no writes"),
        ("58030", DatabaseError, "look at the server's log"),
        ("58P01", DatabaseError, "look at the server's log"),
        ("XX001", DatabaseError, "look at the server's log"),
    ],
)
def test_a_server_that_cannot_store_says_why_without_values(
    database: Database, sqlstate: str, kind: type[DatabaseError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        run(
            database,
            f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}', DETAIL = 'the row is (s3cr3t)'; END $$",
        )()
    assert "s3cr3t" not in caught.value.message
    assert "\n" not in caught.value.message


# URLs and passwords


@pytest.mark.parametrize(
    "dsn",
    [
        "",
        "host=127.0.0.1 password=s3cr3t",
        "s3cr3t",
        "mysql://someone:s3cr3t@host/db",
        "sqlite:///s3cr3t",
        "postgresql://someone:s3cr3t@host:port/db",
        "someone:s3cr3t@host/db",
    ],
)
def test_a_text_that_is_no_url_of_postgresql_is_refused_and_not_repeated(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="database") as caught:
        Database(dsn)
    assert "s3cr3t" not in everything_said(caught.value)


def test_options_of_the_url_are_kept(dsn: str) -> None:
    with Database(f"{dsn}?application_name=mine&options=-cwork_mem%3D77MB") as database:
        with database.connection() as connection:
            assert connection.execute("SHOW application_name").fetchone() == ("mine",)
        with database.dedicated() as connection:
            assert connection.execute("SHOW application_name").fetchone() == ("mine",)
            assert connection.execute("SHOW work_mem").fetchone() == ("77MB",)


@pytest.fixture
def secretive(dsn: str) -> Iterator[str]:
    """The URL of the test's database with a role whose password has every character that needs care."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE secretive SUPERUSER LOGIN PASSWORD '{SECRET}'".encode())
        info = connection.info
        try:
            yield f"postgresql://secretive:{quote(SECRET, safe='')}@{info.host}:{info.port}/{info.dbname}"
        finally:
            connection.execute("REASSIGN OWNED BY secretive TO eventsql")
            connection.execute("DROP ROLE secretive")


def test_a_password_of_any_characters_works_on_every_way_to_the_database(secretive: str) -> None:
    with Database(secretive) as database:
        assert pid_of(database)
        database.dedicated().close()
        psycopg.connect(database.dsn).close()


def broken_urls(dsn: str) -> dict[str, str]:
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    host, port, name = info["host"], info["port"], info["dbname"]
    secret = quote(SECRET, safe="")
    return {
        "nobody listens": f"postgresql://eventsql:{secret}@127.0.0.1:1/{name}",
        "no such host": f"postgresql://eventsql:{secret}@no-such-host.invalid:5432/{name}",
        "wrong password": f"postgresql://eventsql:{secret}@{host}:{port}/{name}",
        "no such role": f"postgresql://nobody_here:{secret}@{host}:{port}/{name}",
    }


@pytest.mark.parametrize("what", ["nobody listens", "no such host", "wrong password", "no such role"])
def test_a_database_that_cannot_be_reached_says_where_and_why_on_one_line_and_no_password(dsn: str, what: str) -> None:
    with Database(broken_urls(dsn)[what]) as database:
        for attempt in (database.ensure_schema, database.migrate, lambda: pid_of(database)):
            with pytest.raises((DatabaseUnavailableError, ConfigurationError)) as caught:
                attempt()
            said = everything_said(caught.value)
            assert SECRET not in said
            assert quote(SECRET, safe="") not in said
            assert "\n" not in caught.value.message
            assert "***@" in caught.value.message
            refused = what in {"wrong password", "no such role"}
            assert ("refused the connection" in caught.value.message) == refused


def test_a_server_that_asks_for_a_password_the_url_lacks_has_refused_the_connection(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSFILE", os.devnull)
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    without = f"postgresql://eventsql@{info['host']}:{info['port']}/{info['dbname']}"
    with Database(without) as database, pytest.raises(DatabaseUnavailableError, match="refused the connection"):
        database.ensure_schema()


def test_a_connection_that_is_lost_while_the_password_is_sent_was_not_refused(database: Database) -> None:
    with pytest.raises(DatabaseUnavailableError, match="cannot be reached"), database.errors():
        raise psycopg.OperationalError("connection failed: fe_sendauth: error sending password authentication")


def test_a_process_without_a_free_file_descriptor_raises_an_error_of_the_package(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Database(dsn) as database:
        database.ensure_schema()
        database.engine.dispose()
        monkeypatch.setattr(psycopg, "connect", connect)
        for use in (database.revision, database.dedicated):
            with pytest.raises(DatabaseUnavailableError, match="Too many open files"):
                use()


def test_a_database_that_does_not_exist_is_named(server: EmbeddedPostgres) -> None:
    database = Database(server.start().dsn_for("no_such_database"))
    with pytest.raises(DatabaseUnavailableError, match="no_such_database"):
        database.ensure_schema()


# The schema


def test_a_missing_schema_is_made_on_first_use(fresh: str) -> None:
    with Database(fresh) as database:
        assert database.revision() is None
        with database.connection() as connection:
            assert connection.execute("SELECT count(*) FROM eventsql.topic").fetchone() == (0,)


def test_a_missing_schema_is_an_error_with_the_command_that_makes_it_where_that_was_not_wanted(fresh: str) -> None:
    with Database(fresh, migrate=False) as database:
        for use in (database.ensure_schema, database.dedicated, lambda: pid_of(database)):
            with pytest.raises(SchemaOutdatedError, match=r"missing.*run `eventsql migrate`"):
                use()
        database.migrate()
        assert pid_of(database)


def test_the_schema_of_a_newer_package_is_used_as_it_is(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = '9999'")
    with Database(dsn) as database:
        assert pid_of(database)
        assert database.revision() == "9999"


def test_many_threads_make_the_schema_once(fresh: str) -> None:
    gate = threading.Barrier(8)
    with Database(fresh) as database, ThreadPoolExecutor(8) as executor:

        def use() -> int:
            gate.wait()
            return pid_of(database)

        assert all(future.result() for future in [executor.submit(use) for _ in range(8)])


def test_a_transaction_of_sqlalchemy_that_ends_after_a_close_leaves_no_connection_open(database: Database) -> None:
    with database.core() as connection:
        driver = driver_connection(connection)
        database.close()
        connection.exec_driver_sql("CREATE TABLE public.kept ()")
    assert driver.closed
    with database, database.connection() as again:
        assert again.execute("TABLE public.kept").fetchall() == []
