"""A database of the first release comes through every migration with all that is in it, and is as a new one then."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL

from eventsql_orchestration import Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, Database, migrations
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.queue import Queue
from tests.conftest import Administrator
from tests.database import test_adoption
from tests.fixtures import Until

FIRST = "0001"

REVISIONS = [entry.revision for entry in reversed(list(migrations.scripts().walk_revisions()))]

EVENTS = 30
BUFFERED = 9
CONSUMED = 12

DATA = f"""
INSERT INTO topic (eql_name, eql_partitions) VALUES ('plain', -1), ('plain_dlt', -1), ('split', 3);
INSERT INTO event_buffer_lock VALUES ('plain'), ('plain_dlt'), ('split');
CREATE TABLE plain_event (
    eql_id bigserial PRIMARY KEY, eql_partition smallint NOT NULL, eql_key text, eql_value bytea NOT NULL,
    eql_buffered_at timestamptz NOT NULL, eql_created_at timestamptz NOT NULL DEFAULT now(), eql_metadata json NOT NULL
);
CREATE TABLE plain_dlt_event (LIKE plain_event INCLUDING ALL);
CREATE TABLE split_event (LIKE plain_event INCLUDING ALL);
CREATE INDEX ix_split_event_eql_partition ON split_event (eql_partition, eql_id);
INSERT INTO plain_event (eql_id, eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata)
    SELECT n, -1, NULL, convert_to('plain ' || n, 'UTF8'), now(), '{{}}' FROM generate_series(1, {EVENTS}) n;
INSERT INTO split_event (eql_id, eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata)
    SELECT n, n % 3, 'k' || n % 3, convert_to('split ' || n, 'UTF8'), now(), '{{"n":"1"}}'
    FROM generate_series(1, {EVENTS}) n;
INSERT INTO plain_dlt_event (eql_id, eql_partition, eql_value, eql_buffered_at, eql_metadata)
    SELECT n, -1, 'dead', now(), '{{}}' FROM generate_series(1, 3) n;
SELECT setval('plain_event_eql_id_seq', {EVENTS}, true);
INSERT INTO event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
    SELECT 'plain', -1, NULL, convert_to('plain ' || {EVENTS} + n, 'UTF8'), '{{}}'
    FROM generate_series(1, {BUFFERED}) n;
INSERT INTO consumer (eql_topic, eql_name, eql_partition, eql_first_event_id, eql_last_event_id,
                      eql_last_consumption_at, eql_consumed_events)
VALUES ('plain', 'mailer', -1, 1, {CONSUMED}, now(), {CONSUMED}),
       ('split', 'indexer', 0, 3, {CONSUMED}, now(), 4), ('split', 'indexer', 1, 1, 10, now(), 4),
       ('split', 'indexer', 2, NULL, NULL, NULL, 0),
       ('plain_dlt', 'eventsql.redrive', -1, 1, 2, now(), 2);
UPDATE consumer SET eql_failed_event_id = {CONSUMED + 1}, eql_attempts = 2, eql_failure = 'ValueError: no'
    WHERE eql_name = 'mailer';
UPDATE consumer SET eql_epoch = 7, eql_lease_owner = 'run', eql_lease_expires_at = now() + interval '1 h'
    WHERE eql_name = 'indexer' AND eql_partition = 2;
INSERT INTO consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_epoch,
                            eql_owner, eql_state, eql_finished_at)
VALUES ('split', 'indexer', 0, 0, {CONSUMED}, 4, 1, 'run', 'committed', now()),
       ('split', 'indexer', 2, 0, {EVENTS}, 10, 7, 'run', 'claimed', NULL);
INSERT INTO spark_publication (eql_writer, eql_batch, eql_events) VALUES ('writer', 4, 100);
INSERT INTO spark_staged_event (eql_attempt, eql_position, eql_topic, eql_partition, eql_value, eql_metadata)
    VALUES ('00000000-0000-0000-0000-000000000001', 0, 'plain', -1, 'staged', '{{}}');
INSERT INTO queue_message (eql_queue, eql_key, eql_body, eql_metadata)
    SELECT 'jobs', NULL, convert_to('job ' || n, 'UTF8'), '{{}}' FROM generate_series(1, 4) n;
INSERT INTO aggregate (eql_type, eql_id, eql_version) VALUES ('account', 'a', 2);
INSERT INTO aggregate_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data)
    VALUES ('account', 'a', 1, 'opened', '{{}}'), ('account', 'a', 2, 'paid', '{{"n": 1}}');
INSERT INTO aggregate_snapshot (eql_type, eql_aggregate_id, eql_version, eql_data) VALUES ('account', 'a', 1, '{{}}');
INSERT INTO timeline_entry (eql_timeline, eql_resource, eql_data, eql_occurred_at) VALUES ('t', 'r', '{{}}', now());
INSERT INTO rollup_bucket VALUES ('r', now(), 'd', 1, 2);
INSERT INTO log_line (eql_log, eql_resource, eql_line, eql_written_at) VALUES ('l', 'r', 'line', now());
"""

CATALOG = """
SELECT 'column', table_name, column_name,
       concat_ws(' ', data_type, column_default, is_nullable, is_identity, identity_generation)
FROM information_schema.columns WHERE table_schema = %(schema)s
UNION ALL
SELECT 'index', tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = %(schema)s
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'function', '', proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(t.oid)
FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
WHERE relnamespace = %(schema)s::regnamespace AND NOT tgisinternal
"""


@pytest.fixture(scope="module")
def first_release(administrator: Administrator) -> Iterator[str]:
    """The name of a database of the first release with data of every kind."""
    name = f"old_{uuid.uuid4().hex}"
    with administrator.copied(name, template="template1") as dsn:
        upgrade(dsn, FIRST)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET search_path TO eventsql")
            connection.execute(DATA.encode())
        yield name


@dataclass(frozen=True)
class Steps:
    """A database of the first release that has come through each step; the rows before all steps and after each."""

    name: str
    before: dict[str, list[str]]
    after: dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def steps(administrator: Administrator, first_release: str) -> Iterator[Steps]:
    name = f"upgraded_{uuid.uuid4().hex}"
    with administrator.copied(name, template=first_release) as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            columns = columns_of(connection)
            # Revision 0020 names a queue by its number, and takes receipts from before it back.
            columns["queue_message"] = [
                column for column in columns["queue_message"] if column not in {"eql_queue", "eql_receipt"}
            ]
            # Revision 0067 deletes what versions before revision 0026 have staged and not published.
            del columns["spark_staged_event"]
            before = rows_of(connection, columns)
            after = {}
            for revision in REVISIONS[1:]:
                upgrade(dsn, revision)
                after[revision] = rows_of(connection, columns)
        yield Steps(name, before, after)


@pytest.fixture
def old(administrator: Administrator, first_release: str) -> Iterator[str]:
    """A database of the first release with data of every kind."""
    with administrator.copied(template=first_release) as dsn:
        yield dsn


@pytest.fixture
def upgraded(administrator: Administrator, steps: Steps) -> Iterator[str]:
    """A database of the first release with data of every kind, after each step."""
    with administrator.copied(template=steps.name) as dsn:
        yield dsn


def upgrade(dsn: str, revision: str, *, schema: str = "eventsql") -> None:
    with Database(dsn, schema=schema) as database:
        engine = database.engine.execution_options(isolation_level="READ COMMITTED")
        migrations.upgrade(engine.connect(), schema, to=revision)
        assert database.revision() == revision


def columns_of(connection: Connection) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table, column in connection.execute(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'eventsql' "
        "AND table_name <> 'schema_version' ORDER BY table_name, ordinal_position"
    ):
        found.setdefault(table, []).append(column)
    return found


def rows_of(connection: Connection, columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """The rows of each table, as text, of those columns alone."""
    return {
        table: sorted(
            str(row)
            for row in connection.execute(
                psycopg.sql.SQL("SELECT {} FROM {}").format(
                    psycopg.sql.SQL(", ").join(
                        psycopg.sql.SQL("{}::text").format(psycopg.sql.Identifier(name)) for name in names
                    ),
                    psycopg.sql.Identifier("eventsql", table),
                )
            )
            if "eventsql.redrive" not in row
        )
        for table, names in columns.items()
    }


def test_the_first_revision_and_the_newest_are_where_they_are_thought_to_be() -> None:
    assert REVISIONS[0] == FIRST
    assert REVISIONS[-1] == migrations.HEAD


def test_no_step_loses_or_changes_a_row(steps: Steps) -> None:
    assert all(steps.before.values()), "a table of the first release has no row to lose"
    assert list(steps.after) == REVISIONS[1:]
    for revision, rows in steps.after.items():
        assert rows == steps.before, revision


def catalog(dsn: str, schema: str = "eventsql") -> set[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return set(connection.execute(CATALOG, {"schema": schema}).fetchall())


def test_the_schema_is_that_of_a_new_database_afterwards(upgraded: str, direct_dsn: str) -> None:
    of_topics = ("plain_", "split_", "ix_split_", "eventsql.plain_", "eventsql.split_")
    found = {each for each in catalog(upgraded) if not any(name.startswith(of_topics) for name in each[1:3])}
    assert found == catalog(direct_dsn)


def consume(platform: EventSQL, topic: str, consumer: str, partition: int = -1) -> list[bytes]:
    seen: list[Event] = []
    while platform.consumers.consume_once(topic, consumer, lambda events, _: seen.extend(events), partition=partition):
        pass
    return [event.value for event in seen]


def test_events_go_on_where_they_were(upgraded: str) -> None:
    with EventSQL(upgraded, transfer=False) as platform:
        platform.registry.register_topic(Topic("plain")).register_topic(Topic("split", 3))
        platform.publisher.publish(Publication("plain", b"new"))
        assert platform.transfer.run_once() == {"plain": BUFFERED + 1}
        assert consume(platform, "plain", "mailer") == [
            *(b"plain %d" % n for n in range(CONSUMED + 1, EVENTS + BUFFERED + 1)),
            b"new",
        ]
        assert platform.registry.consumer("plain", "mailer")[0].consumed_events == EVENTS + BUFFERED + 1
        assert consume(platform, "split", "indexer", 0) == [b"split %d" % n for n in range(15, EVENTS + 1, 3)]
        assert consume(platform, "split", "indexer", 1) == [b"split %d" % n for n in range(13, EVENTS + 1, 3)]
        assert [letter.redriven_at is None for letter in platform.dead_letters.list("plain")] == [False, False, True]
        queue = Queue(platform.database, "jobs")
        assert [message.body for message in queue.receive(max_messages=9)] == [b"job %d" % n for n in range(1, 5)]


def test_a_transaction_that_has_read_the_event_store_may_append_while_an_upgrade_waits_for_it(
    old: str, until: Until
) -> None:
    upgrade(old, "0022")
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with (
        psycopg.connect(old) as reader,
        psycopg.connect(old, autocommit=True) as spy,
        ThreadPoolExecutor(1) as upgrading,
    ):
        (before,) = fetch_one(reader, SQL("SELECT count(*) FROM eventsql.aggregate_change"))
        upgraded = upgrading.submit(upgrade, old, "0023")
        until(lambda: spy.execute(waiting).rowcount == 1)
        reader.execute(
            "INSERT INTO eventsql.aggregate_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data) "
            "VALUES ('order', 'read first', 1, 'placed', '{}')"
        )
        reader.commit()
        upgraded.result()
        assert fetch_one(reader, SQL("SELECT count(*) FROM eventsql.aggregate_change")) == (before + 1,)


def test_a_claim_of_a_run_that_goes_on_is_still_its_own(upgraded: str) -> None:
    with EventSQL(upgraded, transfer=False) as platform:
        claim = platform.claims.live("split", "indexer", 2)
        assert claim is not None
        taken = platform.claims.adopt(claim.id, owner="run")
        assert [event.id for event in platform.claims.read(taken)] == list(range(2, EVENTS + 1, 3))
        platform.claims.process(taken, lambda _events, _connection: None)
        assert platform.registry.consumer("split", "indexer")[2].last_event_id == EVENTS


BY_HAND = """
CREATE ROLE {login} LOGIN PASSWORD 'secret';
GRANT USAGE ON SCHEMA eventsql TO {login};
GRANT SELECT ON eventsql.schema_version, eventsql.topic, eventsql.shard, eventsql.shard_layout TO {login};
GRANT SELECT, DELETE ON eventsql.event_buffer, eventsql.spark_staged_event TO {login};
GRANT SELECT ON SEQUENCE eventsql.event_buffer_eql_id_seq TO {login};
GRANT SELECT, UPDATE ON eventsql.event_buffer_lock TO {login};
GRANT SELECT, INSERT ON eventsql.plain_event TO {login};
GRANT USAGE, SELECT ON SEQUENCE eventsql.plain_event_eql_id_seq TO {login};
GRANT UPDATE (eql_layout) ON eventsql.topic TO {login};
GRANT INSERT ON eventsql.event_buffer TO {login};
GRANT USAGE ON SEQUENCE eventsql.event_buffer_eql_id_seq TO {login};
"""


def test_a_login_that_transfers_by_rights_from_before_roles_goes_on(old: str) -> None:
    for revision in REVISIONS[1 : REVISIONS.index("0012")]:
        upgrade(old, revision)
    login = f"by_hand_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute(BY_HAND.format(login=login).encode())
        try:
            for revision in REVISIONS[REVISIONS.index("0012") :]:
                upgrade(old, revision)
            theirs = psycopg.conninfo.conninfo_to_dict(old)
            url = f"postgresql://{login}:secret@{theirs['host']}:{theirs['port']}/{theirs['dbname']}"
            with EventSQL(url, transfer=False) as platform:
                with psycopg.connect(url) as outbox:
                    platform.publisher.publish(Publication("plain", b"new"), connection=outbox)
                assert platform.transfer.run_once() == {"plain": BUFFERED + 1}
        finally:
            connection.execute(f"DROP OWNED BY {login}; DROP ROLE {login}".encode())


java, java_database = test_adoption.java, test_adoption.java_database


def names_in(dsn: str, schema: str) -> set[tuple[str, str, str]]:
    """The columns, indexes, triggers and functions of a schema."""
    kinds = ("column", "index", "trigger", "function")
    return {(kind, table.rpartition(".")[2], name) for kind, table, name, _ in catalog(dsn, schema) if kind in kinds}


def test_a_database_of_the_java_library_comes_through_each_step_and_lacks_nothing_of_a_new_one(
    java: Connection, server: EmbeddedPostgres, direct_dsn: str
) -> None:
    dsn = server.start().dsn_for("java")
    values = java.execute("SELECT eql_id, eql_value FROM account_created_event ORDER BY eql_id").fetchall()
    buffered = java.execute("SELECT eql_value FROM event_buffer ORDER BY eql_id").fetchall()
    for revision in REVISIONS:
        upgrade(dsn, revision, schema="public")
        test_adoption.publish(java, 1)
    assert names_in(direct_dsn, "eventsql") <= names_in(dsn, "public")
    with EventSQL(dsn, schema="public", transfer=False) as platform:
        platform.registry.register_topic(Topic("account_created", 3))
        assert platform.transfer.run_once() == {"account_created": len(buffered) + len(REVISIONS)}
        events = platform.reader.read("account_created")
        assert [(event.id, event.value) for event in events][: len(values)] == values
        assert [event.value for event in events][len(values) : len(values) + len(buffered)] == [v for (v,) in buffered]
        rest = consume(platform, "account_created", "mailer")
        assert len(rest) == len(events) - test_adoption._OFFSET


_PUT = "put_messages(integer, bytea[], text[], text[], integer[], timestamptz[], double precision[], text[]"
_TAKE_IN_ORDER = "take_in_order(integer, integer, double precision"


@pytest.mark.parametrize(
    ("revision", "given", "new"),
    [
        (
            "0036",
            "take_messages(integer, integer, double precision)",
            "take_messages(integer, integer, double precision, timestamptz)",
        ),
        ("0041", f"{_PUT})", f"{_PUT}, boolean)"),
        ("0041", f"{_TAKE_IN_ORDER})", f"{_TAKE_IN_ORDER}, timestamptz)"),
        (
            "0044",
            f"{_TAKE_IN_ORDER}, timestamptz)",
            "take_others_in_order(integer, integer, double precision, tid[], bytea)",
        ),
        ("0050", "filter_takes(jsonb, text, json)", "first_taken(text, smallint, bigint, bigint, jsonb)"),
        ("0059", "queue_acknowledge_all(text, bigint[], integer[])", "refuse_messages(text, bigint[])"),
        ("0059", "partition_events(text, smallint, bigint, bigint)", "range_statement(text, smallint, text)"),
    ],
)
def test_rights_that_were_given_by_hand_outlive_a_new_function(old: str, revision: str, given: str, new: str) -> None:
    upgrade(old, REVISIONS[REVISIONS.index(revision) - 1])
    with psycopg.connect(old, autocommit=True) as connection:
        # As an earlier version of this package left it: without the new function, and with the one that it replaced.
        connection.execute(f"DROP FUNCTION IF EXISTS eventsql.{new}".encode())
        if connection.execute("SELECT to_regprocedure(%s)", [f"eventsql.{given}"]).fetchone() == (None,):
            connection.execute(f"CREATE FUNCTION eventsql.{given} RETURNS void LANGUAGE sql AS ''".encode())
        connection.execute(f"REVOKE EXECUTE ON FUNCTION eventsql.{given} FROM PUBLIC".encode())
        connection.execute(f"GRANT EXECUTE ON FUNCTION eventsql.{given} TO pg_monitor".encode())
        upgrade(old, revision)
        rights = "SELECT has_function_privilege(%s, %s, 'EXECUTE')"
        found = [
            connection.execute(rights, [role, f"eventsql.{new}"]).fetchone()
            for role in ("pg_monitor", "pg_read_all_stats")
        ]
        assert found == [(True,), (False,)]
        name = given.partition("(")[0]
        assert connection.execute("SELECT FROM pg_proc WHERE proname = %s", [name]).rowcount == 1


IN_BUFFER = """
UPDATE spark_staged_event SET eql_buffer_id = 99;
INSERT INTO event_buffer (eql_id, eql_topic, eql_partition, eql_value, eql_metadata) VALUES (99, 'plain', -2, '', '{}')
"""

IN_PART = """
INSERT INTO spark_part (eql_id, eql_shard, eql_writer, eql_batch, eql_attempts, eql_events)
SELECT eql_attempt, 'one', 'writer', 5, ARRAY[eql_attempt], 1 FROM spark_staged_event
"""

TRANSFERRED = """
DELETE FROM spark_staged_event;
UPDATE event_buffer SET eql_partition = -1;
UPDATE spark_part SET eql_published_at = now()
"""


@pytest.mark.parametrize("published", [IN_BUFFER, IN_PART], ids=["in the buffer", "in a part of a publication"])
def test_published_events_that_an_early_version_has_packed_are_transferred_by_it(old: str, published: str) -> None:
    upgrade(old, "0025")
    with psycopg.connect(old, autocommit=True) as connection, Database(old) as database:
        connection.execute("SET search_path TO eventsql")
        connection.execute(published.encode())
        with pytest.raises(DatabaseError, match="transfer them by that version, and migrate again"):
            database.migrate()
        assert database.revision() == "0025"
        connection.execute(TRANSFERRED.encode())
        database.migrate()
        assert database.revision() == migrations.HEAD


def test_messages_that_nobody_could_receive_are_within_reach_after_an_upgrade(old: str) -> None:
    upgrade(old, "0060")
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute("TRUNCATE eventsql.queue_message")
        connection.execute(
            """
            INSERT INTO eventsql.queue_message (
                eql_queue, eql_metadata, eql_key, eql_body, eql_priority, eql_in_order, eql_visible_at, eql_due_at
            ) VALUES
                (1, '{}', 'k', 'as it is', 9, true, 'infinity', NULL), (1, '{}', NULL, 'above', 10, false, now(), NULL),
                (1, '{}', NULL, 'below', -1, true, '-infinity', NULL),
                (1, '{}', 'k', 'never', 0, false, 'infinity', NULL),
                (1, '{}', 'k', 'late', 0, true, 'infinity', 'infinity')
            """
        )
        upgrade(old, migrations.HEAD)
        found = connection.execute(
            "SELECT eql_body, eql_priority, eql_in_order, eql_visible_at <= now(), eql_visible_at = 'infinity', "
            "eql_due_at < '10000-01-01 00:00+00' FROM eventsql.queue_message ORDER BY eql_id"
        ).fetchall()
    assert found == [
        (b"as it is", 9, True, False, True, None), (b"above", 9, False, True, False, None),
        (b"below", 0, False, True, False, None), (b"never", 0, False, False, False, None),
        (b"late", 0, True, False, True, True),
    ]  # fmt: skip


def test_an_archive_from_before_an_upgrade_is_cleared_although_a_publication_has_all_tables(old: str) -> None:
    upgrade(old, "0070")
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE eventsql.queue_archive_20260101 PARTITION OF eventsql.queue_archive "
            "FOR VALUES FROM ('2026-01-01') TO ('2026-01-02')"
        )
        connection.execute("CREATE PUBLICATION every_table FOR ALL TABLES")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            connection.execute("DELETE FROM eventsql.queue_archive")
        upgrade(old, migrations.HEAD)
        connection.execute("DELETE FROM eventsql.queue_archive")


def test_a_login_that_may_count_messages_by_rights_from_before_an_upgrade_reads_the_times_of_the_archive(
    old: str,
) -> None:
    upgrade(old, "0073")
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute("GRANT SELECT ON eventsql.queue_message TO pg_monitor")
        upgrade(old, migrations.HEAD)
        for column, may_read in (("eql_acknowledged_at", True), ("eql_created_at", True), ("eql_body", False)):
            rights = "SELECT has_column_privilege('pg_monitor', 'eventsql.queue_archive', %s, 'SELECT')"
            assert connection.execute(rights, [column]).fetchone() == (may_read,)


def test_a_sender_from_before_an_upgrade_sends_after_it_and_a_new_sender_has_fewer_rights(old: str) -> None:
    upgrade(old, "0060")
    put = f"eventsql.{_PUT}, boolean)"
    with psycopg.connect(old, autocommit=True) as connection:
        # PostgreSQL has these roles, and their rights go with the database.
        connection.execute(
            "INSERT INTO eventsql.access_role VALUES ('pg_signal_backend', 'sender', NULL), ('gone', 'sender', NULL);"
            "GRANT INSERT ON eventsql.queue_message TO pg_monitor, pg_signal_backend;"
            "GRANT ALL ON eventsql.queue_deduplication, eventsql.queue_message_eql_id_seq TO pg_signal_backend;"
            "GRANT EXECUTE ON FUNCTION eventsql.lock_last_of_keys TO pg_signal_backend;"
            f"GRANT EXECUTE ON FUNCTION {put} TO PUBLIC".encode()
        )
        upgrade(old, migrations.HEAD)
        may_put = "SELECT has_function_privilege(%s, %s, 'EXECUTE')"
        assert connection.execute(may_put, ["pg_monitor", put]).fetchone() == (True,)
        assert connection.execute(may_put, ["pg_read_all_settings", put]).fetchone() == (False,)
        kept = connection.execute(
            "SELECT has_any_column_privilege(r, 'eventsql.queue_message', 'INSERT'), "
            "has_any_column_privilege(r, 'eventsql.queue_deduplication', 'SELECT, INSERT, UPDATE'), "
            "has_table_privilege(r, 'eventsql.queue_deduplication', 'DELETE'), "
            "has_sequence_privilege(r, 'eventsql.queue_message_eql_id_seq', 'USAGE'), "
            "has_function_privilege(r, 'eventsql.lock_last_of_keys(integer, text[])', 'EXECUTE') "
            "FROM (VALUES ('pg_signal_backend'::name)) AS role (r)"
        ).fetchone()
    # The migration grants to a role what it needs where the roles were made by the package.
    assert kept == (False, False, False, False, False)


def test_an_upgrade_passes_over_roles_that_a_restored_database_notes_and_its_server_lacks(old: str) -> None:
    upgrade(old, "0047")
    with psycopg.connect(old, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO eventsql.access_role SELECT 'left_behind_' || kind, kind, NULL "
            "FROM unnest(ARRAY['consumer', 'reader', 'sender']) AS kind"
        )
        upgrade(old, migrations.HEAD)
        assert connection.execute("SELECT FROM eventsql.access_role").rowcount == 3
