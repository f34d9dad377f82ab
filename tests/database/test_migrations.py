"""Migrations make the tables that the package describes, for any number of processes that start at once."""

from __future__ import annotations

import importlib
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database import Connection, Database, driver_connection, migrations, tables
from eventsql_orchestration.database.migrations import holding
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError, PermissionDeniedError
from tests.conftest import Administrator
from tests.fixtures import Sessions, Until, UntilBlocked, Worker
from tests.forms import in_blocks, stored


def test_the_tables_are_those_that_the_package_names_and_describes(dsn: str) -> None:
    with Database(dsn) as database, database.engine.connect() as connection:
        names = sqlalchemy.inspect(connection).get_table_names(schema="eventsql")
        assert sorted(names) == sorted([*tables.NAMES, tables.VERSION_TABLE])
        for table in tables.metadata.tables.values():
            reflected = sqlalchemy.Table(table.name, sqlalchemy.MetaData(), schema="eventsql", autoload_with=connection)
            described, made = (
                {column.name: column.type.compile(connection.dialect) for column in each.columns}
                for each in (table, reflected)
            )
            assert described.items() <= made.items()


def test_a_topic_that_is_partitioned_has_an_index_for_its_partitions(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("partitioned", 3)).register_topic(Topic("whole"))
    with platform.database.core() as connection:
        inspector = sqlalchemy.inspect(connection)
        columns = {
            name: [index["column_names"] for index in inspector.get_indexes(stored(name), schema="eventsql")]
            for name in ("partitioned", "whole")
        }
    # Blocks have an index of those with gaps, too.
    gaps = [["eql_id"]] if in_blocks() else []
    assert columns == {"partitioned": [*gaps, ["eql_partition", "eql_id"]], "whole": gaps}


def test_processes_that_start_at_once_migrate_once(fresh: str) -> None:
    workers = [Worker("migrate", fresh) for _ in range(4)]
    try:
        assert [worker.line() for worker in workers] == ["ready"] * 4
        for worker in workers:
            worker.tell("now")
        assert [worker.line() for worker in workers] == [migrations.HEAD] * 4
        assert [worker.end() for worker in workers] == [0] * 4
    finally:
        for worker in workers:
            worker.close()


def test_a_process_that_comes_during_a_migration_waits_for_it(fresh: str) -> None:
    with psycopg.connect(fresh) as first, Database(fresh) as second:
        first.execute("SELECT pg_advisory_xact_lock(%s)", (migrations._ADVISORY_LOCK,))
        second.engine.dispose()
        waiting = Database(f"{fresh}?options=-clock_timeout%3D100")
        with pytest.raises(DatabaseError, match="lock timeout"):
            waiting.migrate()
        first.rollback()
        waiting.migrate()
        assert second.revision() == migrations.HEAD
        waiting.close()


def test_a_process_that_waits_for_the_migration_of_a_newer_package_uses_its_schema(
    direct_dsn: str, until_blocked: UntilBlocked
) -> None:
    at = "UPDATE eventsql.schema_version SET version_num = %s"
    with psycopg.connect(direct_dsn) as newer, Database(direct_dsn) as older, ThreadPoolExecutor(1) as executor:
        newer.execute(at, ["0001"])
        newer.commit()
        newer.execute("SELECT pg_advisory_xact_lock(%s)", (migrations._ADVISORY_LOCK,))
        using = executor.submit(older.ensure_schema)
        until_blocked()
        newer.execute(at, ["9999"])
        newer.commit()
        using.result()
        assert older.revision() == "9999"


def test_a_migration_outlasts_the_limits_of_its_role(fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, found, run = ("statement_timeout", "idle_in_transaction_session_timeout"), list[object](), migrations._run

    def look(connection: sqlalchemy.Connection, *arguments: str) -> None:
        found.extend(connection.exec_driver_sql(f"SHOW {limit}").scalar() for limit in limits)
        run(connection, *arguments)

    monkeypatch.setattr(migrations, "_run", look)
    options = {"options": " ".join(f"-c {limit}=60s" for limit in limits)}
    with Database(make_url(fresh).update_query_dict(options).render_as_string(False)) as database:
        database.migrate()
        assert database.revision() == migrations.HEAD
    assert found == ["0", "0"]


@pytest.mark.parametrize(("table", "found"), [("consumer_claim", "consumer_claim"), ("topic", "eql_name")])
def test_a_migration_that_fails_leaves_nothing_behind(fresh: str, table: str, found: str) -> None:
    with psycopg.connect(fresh, autocommit=True) as connection:
        # A table of somebody else's in the way of one of ours.
        connection.execute(f"CREATE SCHEMA eventsql; CREATE TABLE eventsql.{table} (theirs int)")
        with Database(fresh) as database, pytest.raises(DatabaseError, match=f"{found}.*: rename those that are yours"):
            database.migrate()
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'eventsql'").fetchall()
    assert rows == [(table,)]


def test_the_tables_of_a_restore_that_did_not_end_are_told_from_those_to_migrate(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection, Database(dsn) as database:
        connection.execute("DELETE FROM eventsql.schema_version")
        with pytest.raises(DatabaseError, match="a restore that did not end, drop the database"):
            database.migrate()
        connection.execute("DROP TABLE eventsql.schema_version")
        with pytest.raises(DatabaseError, match="a restore that did not end, drop the database"):
            database.migrate()
        assert database.revision() is None
        connection.execute("DROP SCHEMA eventsql CASCADE")
        database.migrate()
        assert database.revision() == migrations.HEAD


def test_migrating_again_changes_nothing(dsn: str) -> None:
    with Database(dsn) as database:
        database.migrate()
        database.migrate()
        assert database.revision() == migrations.HEAD


def test_installations_in_schemas_of_one_database_are_apart(dsn: str) -> None:
    with EventSQL(dsn, schema="one", transfer=False) as one, EventSQL(dsn, schema="two", transfer=False) as two:
        one.registry.register_topic(Topic("orders"))
        assert one.registry.topics() == [Topic("orders")]
        assert two.registry.topics() == []


def test_a_role_without_rights_on_the_database_migrates_a_schema_that_was_made_for_it(fresh: str) -> None:
    with psycopg.connect(fresh, autocommit=True) as connection:
        info = connection.info
        connection.execute("CREATE ROLE tenant LOGIN PASSWORD 'tenant'")
        try:
            connection.execute("CREATE SCHEMA eventsql AUTHORIZATION tenant")
            with EventSQL(
                f"postgresql://tenant:tenant@{info.host}:{info.port}/{info.dbname}", transfer=False
            ) as platform:
                platform.registry.register_topic(Topic("orders"))
                assert platform.transfer.run_once() == {}
        finally:
            connection.execute("DROP OWNED BY tenant CASCADE")
            connection.execute("DROP ROLE tenant")


def test_the_newest_revision_is_the_one_that_the_package_names() -> None:
    assert migrations.scripts().get_heads() == [migrations.HEAD]


def test_only_revisions_of_this_package_are_known() -> None:
    assert migrations.known(migrations.HEAD)
    assert not migrations.known("9999")


def test_a_migration_clears_the_layouts_of_former_topics_and_keeps_those_of_topics_that_are_there(
    fresh: str,
) -> None:
    with EventSQL(fresh, transfer=False) as platform:
        platform.registry.register_topic(Topic("anew", 6)).register_topic(Topic("there", 2))
        for topic in ("anew", "there"):
            platform.registry.register_consumer(Consumer(topic, "sums", partitioned=True))
        platform.repartitioner.repartition("there", 4)
        before = platform.shards[0].layouts.of("there")
        with platform.database.connection() as connection:
            # What an older version left, where another program had registered the topic anew.
            connection.execute(
                "INSERT INTO eventsql.topic_layout VALUES "
                "('anew', 1, 2, 0, now() - interval '1 day'), ('anew', 2, 4, 70, now() - interval '1 day')"
            )
            connection.execute("UPDATE eventsql.consumer SET eql_until = 70 WHERE eql_topic = 'anew'")
            for statement in importlib.import_module(f"{migrations.__name__}.versions.0009_leftovers")._MEND.split(";"):
                connection.execute(f"SET search_path TO eventsql;{statement}")
        assert platform.shards[0].layouts.of("anew") == []
        assert platform.shards[0].layouts.of("there") == before
        assert platform.shards[0].layouts.unsettled("anew") == {}
        assert platform.shards[0].layouts.unsettled("there") == {"sums": 0}


@pytest.mark.parametrize(
    ("revision", "first", "then"),
    [
        # From 0037 on, `topic` is altered first, and `event_buffer` then; a publisher has them the other way round.
        ("0037", "LOCK TABLE eventsql.event_buffer IN ROW EXCLUSIVE MODE", "SELECT FROM eventsql.topic"),
        # 0043 makes an index, and drops others then; a receive reads messages, and writes them then.
        (
            "0041",
            "LOCK TABLE eventsql.queue_message IN ROW SHARE MODE",
            "LOCK TABLE eventsql.queue_message IN ROW EXCLUSIVE MODE",
        ),
        # 0057 alters `consumer`: a handler publishes in the transaction that has locked its consumer.
        ("0056", "LOCK TABLE eventsql.consumer IN ROW EXCLUSIVE MODE", "SELECT FROM eventsql.event_buffer"),
    ],
)
def test_a_migration_gives_way_to_a_transaction_that_has_a_lock_which_it_needs_later(
    fresh: str, until: Until, revision: str, first: str, then: str
) -> None:
    with (
        Database(fresh) as database,
        psycopg.connect(fresh) as other,
        psycopg.connect(fresh, autocommit=True) as looking,
        ThreadPoolExecutor(1) as executor,
    ):
        engine = database.engine.execution_options(isolation_level="READ COMMITTED")
        migrations.upgrade(engine.connect(), "eventsql", to=revision)
        other.execute(first.encode())
        migrating = executor.submit(database.migrate)
        until(lambda: looking.execute("SELECT FROM pg_locks WHERE NOT granted AND locktype = 'relation'").rowcount > 0)
        other.execute(then.encode())
        other.commit()
        migrating.result()
        assert database.revision() == migrations.HEAD


def test_a_migration_that_gives_up_says_whom_it_waited_for(
    direct_dsn: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "SECONDS", 0.0)
    handling = sessions()
    handling.execute("UPDATE eventsql.schema_version SET version_num = '0056'")
    handling.commit()
    handling.execute("LOCK TABLE eventsql.event_buffer IN ROW EXCLUSIVE MODE")
    with Database(direct_dsn) as database:
        with pytest.raises(DatabaseBusyError, match=r"changed nothing: .* stop these processes first"):
            database.migrate()
        assert database.revision() == "0056"


@pytest.mark.parametrize(("of_role", "used"), [("2s", "2s"), ("60s", "10s"), ("0", "10s")])
def test_a_migration_waits_for_a_table_for_ten_seconds_or_as_long_as_its_role_may(
    direct_dsn: str, session: Connection, monkeypatch: pytest.MonkeyPatch, of_role: str, used: str
) -> None:
    found: list[object] = []

    def look(connection: Connection, *_others: object) -> None:
        found.append(connection.execute("SHOW lock_timeout").fetchone())
        raise DatabaseBusyError("seen")

    monkeypatch.setattr(holding, "hold_publishers", look)
    session.execute("UPDATE eventsql.schema_version SET version_num = '0056'")
    with Database(f"{direct_dsn}?options=-clock_timeout%3D{of_role}") as database, pytest.raises(DatabaseBusyError):
        database.migrate()
    assert found == [(used,)]


def test_a_migration_comes_through_between_transactions_that_overlap(
    fresh: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "POLITE_SECONDS", 0.0)
    columns = "eql_topic, eql_partition, eql_value, eql_metadata"
    publish = f"INSERT INTO eventsql.event_buffer ({columns}) VALUES ('t', 0, '', '{{}}')".encode()
    waits = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND query LIKE %s AND clock_timestamp() - query_start > make_interval(secs => %s)"
    )
    longer = holding.ATTEMPT_MILLISECONDS / 1000 + 0.1
    with (
        Database(fresh) as database,
        psycopg.connect(fresh) as first,
        psycopg.connect(fresh) as second,
        psycopg.connect(fresh, autocommit=True) as looking,
        ThreadPoolExecutor(2) as executor,
    ):
        engine = database.engine.execution_options(isolation_level="READ COMMITTED")
        migrations.upgrade(engine.connect(), "eventsql", to="0056")
        first.execute(publish)
        migrating = executor.submit(database.migrate)
        until(lambda: looking.execute(waits, ["LOCK TABLE%", longer]).rowcount == 1)
        overlapping = executor.submit(second.execute, publish)
        until(lambda: looking.execute(waits, ["INSERT%", 0]).rowcount == 1)
        first.commit()
        overlapping.result()
        second.rollback()
        migrating.result()
        assert database.revision() == migrations.HEAD


def test_a_migration_that_ends_after_a_close_leaves_no_connection_open(
    fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Connection] = []

    def close(connection: sqlalchemy.Connection, *_: object) -> None:
        used.append(driver_connection(connection))
        database.close()

    monkeypatch.setattr(migrations, "_run", close)
    with Database(fresh) as database:
        database.migrate()
    assert [connection.closed for connection in used] == [True]


def test_threads_of_a_process_migrate_two_databases_one_after_the_other(
    administrator: Administrator, fresh: str, until: Until
) -> None:
    waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LOCK TABLE%'"
    with (
        administrator.copied(template="template1") as other_dsn,
        Database(fresh) as first,
        Database(other_dsn) as second,
        psycopg.connect(fresh) as handling,
        psycopg.connect(fresh, autocommit=True) as looking,
        ThreadPoolExecutor(2) as executor,
    ):
        engine = first.engine.execution_options(isolation_level="READ COMMITTED")
        migrations.upgrade(engine.connect(), "eventsql", to="0056")
        handling.execute("LOCK TABLE eventsql.consumer IN ROW EXCLUSIVE MODE")
        migrating = executor.submit(first.migrate)
        until(lambda: looking.execute(waits).rowcount == 1)
        after_it = executor.submit(second.migrate)
        handling.rollback()
        migrating.result()
        after_it.result()
        assert {first.revision(), second.revision()} == {migrations.HEAD}


def test_where_there_are_no_roles_a_login_that_may_not_migrate_is_told_of_none(platform: EventSQL) -> None:
    role = f"guest_{uuid.uuid4().hex}"
    url = make_url(platform.database.url).set(username=role, password="secret").render_as_string(hide_password=False)
    with platform.database.connection() as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
    with Database(url) as database, pytest.raises(PermissionDeniedError) as refused:
        database.migrate()
    with platform.database.connection() as connection:
        connection.execute(f"DROP ROLE {role}".encode())
    assert (refused.value.role, "_admin" in str(refused.value)) == (role, False)
