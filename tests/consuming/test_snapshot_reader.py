"""The second ordering: in whatever order transactions commit, no row is passed over and none is read twice."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

from eventsql_orchestration.consuming.snapshot_reader import MAX_TRANSACTION, START, Checkpoint, SnapshotReader
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseError, ValidationError
from tests.conftest import own_server

Sessions = Callable[[], Connection]

TABLE = """
CREATE TABLE eventsql.change (
    eql_id bigint GENERATED ALWAYS AS IDENTITY,
    eql_transaction xid8 NOT NULL DEFAULT pg_current_xact_id(),
    eql_kind text NOT NULL DEFAULT 'order',
    eql_value text NOT NULL
);
CREATE UNIQUE INDEX change_order ON eventsql.change (eql_transaction, eql_id);
CREATE INDEX change_kind ON eventsql.change (eql_kind, eql_transaction, eql_id);
"""


@pytest.fixture
def reader(database: Database) -> SnapshotReader:
    with database.connection() as connection:
        connection.execute(TABLE)
    return SnapshotReader(database, "change", ["eql_value"])


def write(connection: Connection, *values: str, kind: str = "order") -> None:
    for value in values:
        connection.execute("INSERT INTO eventsql.change (eql_kind, eql_value) VALUES (%s, %s)", [kind, value])


def values(reader: SnapshotReader, after: Checkpoint = START, **options: Any) -> list[str]:
    return [row.values[0] for row in reader.read(after, **options)]


# What is promised


def test_a_transaction_that_commits_late_is_not_passed_over(reader: SnapshotReader, sessions: Sessions) -> None:
    late, early = sessions(), sessions()
    write(late, "late")
    write(early, "early")
    early.commit()
    # By its position alone, `early` would be read now, and `late`, which has a smaller one, never.
    assert values(reader) == []
    assert reader.held_back() == 1
    late.commit()
    assert values(reader) == ["late", "early"]
    assert reader.held_back() == 0


def test_rows_committed_before_the_oldest_writer_began_are_read(reader: SnapshotReader, sessions: Sessions) -> None:
    before, open_, after = sessions(), sessions(), sessions()
    write(before, "before")
    before.commit()
    write(open_, "open")
    write(after, "after")
    after.commit()
    assert values(reader) == ["before"]
    reached = reader.read()[-1].checkpoint
    open_.rollback()
    assert values(reader, reached) == ["after"]


def test_a_transaction_that_never_wrote_holds_nothing_up(reader: SnapshotReader, sessions: Sessions) -> None:
    idle, writer = sessions(), sessions()
    idle.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    idle.execute("SELECT count(*) FROM eventsql.change")
    write(writer, "one")
    writer.commit()
    assert values(reader) == ["one"]
    assert idle.execute("SELECT count(*) FROM eventsql.change").fetchone() == (0,), "its snapshot is still the old one"


def test_a_transaction_that_wrote_elsewhere_holds_up(
    reader: SnapshotReader, sessions: Sessions, server: EmbeddedPostgres
) -> None:
    """Also in another database: transaction ids are the server's."""
    with psycopg.connect(server.start().dsn) as elsewhere:
        elsewhere.execute("SELECT pg_current_xact_id()")
        writer = sessions()
        write(writer, "one")
        writer.commit()
        assert values(reader) == []
        elsewhere.rollback()
    assert values(reader) == ["one"]


def test_rows_of_savepoints_lie_with_their_transaction(reader: SnapshotReader, sessions: Sessions) -> None:
    nested, other = sessions(), sessions()
    write(nested, "a")
    write(other, "b")
    other.commit()
    with nested.transaction():
        write(nested, "c")
        with nested.transaction(force_rollback=True):
            write(nested, "never")
        write(nested, "d")
    assert values(reader) == []
    nested.commit()
    assert values(reader) == ["a", "c", "d", "b"]
    assert len({row.checkpoint.transaction for row in reader.read()}) == 2


def test_a_batch_may_end_within_a_transaction(reader: SnapshotReader, sessions: Sessions) -> None:
    writer = sessions()
    write(writer, *"abcde")
    writer.commit()
    first = reader.read(limit=2)
    assert [row.values for row in first] == [("a",), ("b",)]
    assert values(reader, first[-1].checkpoint) == ["c", "d", "e"]
    assert [[row.values[0] for row in batch] for batch in reader.stream(batch=2)] == [["a", "b"], ["c", "d"], ["e"]]


def test_only_rows_that_are_asked_for_are_read_in_the_same_order(reader: SnapshotReader, sessions: Sessions) -> None:
    first, second = sessions(), sessions()
    write(first, "f1")
    write(second, "s1", kind="ride")
    write(first, "f2", kind="ride")
    second.commit()
    assert reader.held_back(only={"eql_kind": "ride"}) == 1
    first.commit()
    assert values(reader, only={"eql_kind": "ride"}) == ["f2", "s1"]
    assert values(reader, only={"eql_kind": "order"}) == ["f1"]


def test_rows_without_a_value_are_asked_for_by_none(reader: SnapshotReader, database: Database) -> None:
    with database.connection() as connection:
        connection.execute("ALTER TABLE eventsql.change ALTER eql_kind DROP NOT NULL")
        connection.execute("INSERT INTO eventsql.change (eql_kind, eql_value) VALUES (NULL, 'bare'), ('order', 'full')")
    assert values(reader, only={"eql_kind": None}) == ["bare"]
    assert values(reader, only={"eql_kind": "order", "eql_value": "full"}) == ["full"]


def test_effects_and_checkpoint_commit_together_and_a_writer_reads_up_to_itself(
    database: Database, reader: SnapshotReader, sessions: Sessions
) -> None:
    writer = sessions()
    write(writer, *"abc")
    writer.commit()
    with database.connection() as connection:
        connection.execute("CREATE TABLE eventsql.subscription (eql_transaction xid8, eql_position bigint, seen text)")
        connection.execute("INSERT INTO eventsql.subscription VALUES ('0', 0, '')")

    def consume(*, fail: bool) -> None:
        with database.transaction() as connection:
            connection.row_factory = dict_row  # type: ignore[assignment]  # a caller's own
            stored: Any = connection.execute(
                "SELECT eql_transaction::text AS transaction, eql_position AS position FROM eventsql.subscription "
                "FOR UPDATE SKIP LOCKED"
            ).fetchone()
            after = Checkpoint(int(stored["transaction"]), stored["position"])
            rows = reader.read(after, limit=2, connection=connection)
            for row in rows:
                connection.execute("UPDATE eventsql.subscription SET seen = seen || %s", row.values)
            write(connection, "fails" if fail else "own")
            assert "own" not in values(reader, after, connection=connection, limit=3), "not before it is committed"
            reached = rows[-1].checkpoint
            connection.execute(
                "UPDATE eventsql.subscription SET eql_transaction = %s::xid8, eql_position = %s",
                [str(reached.transaction), reached.position],
            )
            if fail:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume(fail=True)
    consume(fail=False)
    with database.connection() as connection:
        assert connection.execute("SELECT seen FROM eventsql.subscription").fetchone() == ("ab",)
    assert values(reader) == ["a", "b", "c", "own"]


# Any interleaving

Step = tuple[str, int, int]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["write", "write", "savepoint", "undone", "commit", "commit", "rollback", "read", "touch"]),
            st.integers(0, 3),
            st.integers(1, 3),
        ),
        min_size=5,
        max_size=50,
    )
)
def test_every_committed_row_is_read_once_and_in_order_whatever_the_order_of_commits(
    interleaved: tuple[SnapshotReader, list[Connection], str], steps: list[Step]
) -> None:
    """Four writers, any of which may only look at the server, and a reader that comes between any two steps."""
    reader, writers, dsn = interleaved
    with psycopg.connect(dsn, autocommit=True) as connection:
        for writer in writers:
            # Of an example that failed.
            writer.rollback()
        connection.execute("TRUNCATE eventsql.change")
        pending: list[list[str]] = [[] for _ in writers]
        committed: set[str] = set()
        read: list[tuple[Checkpoint, str]] = []
        count = 0

        def look(limit: int) -> int:
            after = read[-1][0] if read else START
            # As it would be stored and loaded again.
            rows = reader.read(Checkpoint.parse(str(after)), limit=limit)
            read.extend((row.checkpoint, row.values[0]) for row in rows)
            return len(rows)

        for kind, number, amount in steps:
            writer = writers[number]
            names = [f"{count + extra}" for extra in range(amount)]
            count += amount
            match kind:
                case "write":
                    write(writer, *names)
                    pending[number] += names
                case "savepoint":
                    with writer.transaction():
                        write(writer, *names)
                    # Outside of a transaction, that was one of its own.
                    if writer.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
                        committed.update(names)
                    else:
                        pending[number] += names
                case "undone":
                    with writer.transaction(force_rollback=True):
                        write(writer, *names)
                case "commit" | "rollback":
                    writer.commit() if kind == "commit" else writer.rollback()
                    committed.update(pending[number] if kind == "commit" else ())
                    pending[number] = []
                case "touch":
                    writer.execute("SELECT 1")
                case "read":
                    look(amount)
        for number, writer in enumerate(writers):
            writer.commit()
            committed.update(pending[number])
        while look(3):
            pass
        rows = connection.execute(
            "SELECT eql_transaction::text, eql_id, eql_value FROM eventsql.change c "
            "ORDER BY c.eql_transaction, c.eql_id"
        ).fetchall()
        assert read == [(Checkpoint(int(transaction), position), value) for transaction, position, value in rows]
        assert {value for _, value in read} == committed


@pytest.fixture
def interleaved(reader: SnapshotReader, direct_dsn: str) -> Iterator[tuple[SnapshotReader, list[Connection], str]]:
    with ExitStack() as opened:
        yield reader, [opened.enter_context(psycopg.connect(direct_dsn)) for _ in range(4)], direct_dsn


# Transaction ids


@pytest.fixture
def about_to_wrap() -> Iterator[Database]:
    """A server of its own whose next transaction ids are the last of 32 bits."""
    with own_server() as embedded:
        for name in ("postgres", "template1", "eventsql"):
            with psycopg.connect(embedded.start().dsn_for(name), autocommit=True) as connection:
                # What older transactions wrote must not count as being of the future then.
                connection.execute("VACUUM (FREEZE)")
        data = embedded.start().data_directory
        running = data / "postmaster.pid"
        owner = running.stat()
        programs = Path(f"/proc/{running.read_text().split()[0]}/exe").readlink().parent
        if not (programs / "pg_resetwal").exists():
            pytest.skip("this PostgreSQL comes without pg_resetwal, which sets the next transaction id")
        embedded.stop()
        next_id = 2**32 - 40
        # Where it keeps what became of these transactions, in files of a fixed size.
        status = data / "pg_xact" / f"{next_id // (8192 * 4 * 32):04X}"
        status.write_bytes(bytes(8192 * 32))
        os.chown(status, owner.st_uid, owner.st_gid)
        subprocess.run(
            [programs / "pg_resetwal", "-x", str(next_id), "-u", str(next_id - 10), "-D", str(data)],
            check=True, capture_output=True,
            user=owner.st_uid if os.geteuid() == 0 else None, group=owner.st_gid if os.geteuid() == 0 else None,
            extra_groups=[] if os.geteuid() == 0 else None,
        )  # fmt: skip
        with Database(embedded.start().dsn) as database:
            yield database


def test_the_order_goes_on_where_ids_of_32_bits_begin_anew(about_to_wrap: Database) -> None:
    with about_to_wrap.connection() as connection:
        connection.execute(TABLE)
    reader = SnapshotReader(about_to_wrap, "change", ["eql_value"])
    read: list[str] = []
    reached = START
    with about_to_wrap.connection() as connection:
        for number in range(60):
            write(connection, str(number))
            for row in reader.read(reached, limit=7):
                read.append(row.values[0])
                reached = row.checkpoint
    assert reached.transaction > 2**32, "it went past"
    assert read == [str(number) for number in range(60)]
    first = reader.read(limit=1)[0].checkpoint
    assert first.transaction < 2**32 < reached.transaction


def test_rows_of_another_servers_transactions_are_refused_and_not_waited_for(
    database: Database, reader: SnapshotReader
) -> None:
    def restore(kind: str) -> None:
        with database.connection() as connection:
            connection.execute(
                "INSERT INTO eventsql.change (eql_transaction, eql_kind, eql_value) VALUES ('9000000000', %s, 'lost')",
                [kind],
            )

    refused = pytest.raises(DatabaseError, match="transaction 9000000000 of another server")
    with database.connection() as connection:
        write(connection, "own", kind="ride")
    restore("order")
    with refused:
        reader.read()
    only_rides = {"eql_kind": "ride"}
    (row,) = reader.read(only=only_rides)
    with refused:
        reader.read(only={"eql_kind": "order"})
    restore("ride")
    with refused:
        reader.read(row.checkpoint, only=only_rides)


def test_a_checkpoint_of_another_server_is_refused_instead_of_finding_nothing_for_ever(
    reader: SnapshotReader, database: Database
) -> None:
    with database.connection() as connection:
        write(connection, "one")
    (row,) = reader.read()
    assert reader.read(row.checkpoint) == []
    foreign = Checkpoint(row.checkpoint.transaction + 2**20, 1)
    with pytest.raises(DatabaseError, match=str(foreign)):
        reader.read(foreign)


def test_a_checkpoint_is_checked_again_after_it_was_let_pass(reader: SnapshotReader, database: Database) -> None:
    with database.connection() as connection:
        write(connection, "one")
    (row,) = reader.read()
    lost = Checkpoint(row.checkpoint.transaction + 2**20, 1)
    with database.transaction() as connection:
        # As by a standby, which may be behind: it is promoted before it has had the transaction.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert reader.read(lost, connection=connection) == []
    with pytest.raises(DatabaseError, match=str(lost)):
        reader.read(lost)


def test_rows_that_the_reading_transaction_wrote_itself_are_not_taken_for_anothers(
    database: Database, reader: SnapshotReader
) -> None:
    with database.transaction() as connection:
        write(connection, "own")
        assert reader.read(connection=connection) == []
    assert values(reader) == ["own"]


# Its plan


def plan_of(database: Database, reader: SnapshotReader, name: str, only: dict[str, object]) -> str:
    """The plan of a statement for a table with 60,000 rows."""
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.change (eql_transaction, eql_kind, eql_value) "
            "SELECT (3 + n / 100)::text::xid8, CASE WHEN n % 10 = 0 THEN 'ride' ELSE 'order' END, 'x' "
            "FROM generate_series(1, 60000) n"
        )
        connection.execute("ANALYZE eventsql.change")
        query = reader._compose(name, only)
        values = {"transaction": "300", "position": 30_000, "limit": 100, "only_0": "ride"}
        rows = connection.execute(b"EXPLAIN (COSTS off) " + query.as_bytes(connection), values)
        return "\n".join(row[0] for row in rows)


@pytest.mark.parametrize("only", [{}, {"eql_kind": "ride"}])
def test_rows_are_found_through_the_index_in_their_order(
    database: Database, reader: SnapshotReader, only: dict[str, object]
) -> None:
    plan = plan_of(database, reader, "after", only)
    assert re.search(r"Index Scan using change_(kind|order)", plan), plan
    assert "Sort" not in plan
    (condition,) = re.findall(r"Index Cond: (.*)", plan)
    assert "ROW(eql_transaction, eql_id) > ROW(" in condition
    assert "eql_transaction < pg_snapshot_xmin" in condition
    assert ("Filter" in plan) is False


@pytest.mark.parametrize("only", [{}, {"eql_kind": "ride"}])
def test_a_look_for_rows_of_another_server_reads_no_others(
    database: Database, reader: SnapshotReader, only: dict[str, object]
) -> None:
    plan = plan_of(database, reader, "foreign", only)
    conditions = re.findall(r"Index Cond: (.*)", plan)
    assert [condition for condition in conditions if "eql_transaction >= pg_snapshot_xmax" in condition], plan
    assert "Seq Scan" not in plan


# What is read, and on what


@pytest.mark.parametrize("schema", [None, "nowhere", "public"])
def test_a_table_that_is_not_there_is_named(database: Database, schema: str | None) -> None:
    reader = SnapshotReader(database, "no_table", ["eql_value"], schema=schema)
    for ask in (reader.read, reader.held_back):
        with pytest.raises(
            DatabaseError, match=rf"table {schema or 'eventsql'}\.no_table of .* cannot be read"
        ) as caught:
            ask()
        assert "migrate" not in caught.value.message


def test_names_with_a_percent_sign_are_read(database: Database) -> None:
    with database.connection() as connection:
        connection.execute(
            'CREATE TABLE eventsql."100%s" '
            '(eql_id bigint, eql_transaction xid8 DEFAULT pg_current_xact_id(), "50%" text)'
        )
        connection.execute("""INSERT INTO eventsql."100%s" (eql_id, "50%") VALUES (1, 'half')""")
    reader = SnapshotReader(database, "100%s", ["50%"])
    (row,) = reader.read(only={"50%": "half"})
    assert row.values == ("half",)
    assert reader.read(row.checkpoint) == []
    assert reader.held_back(only={"50%": "half"}) == 0


def test_a_column_that_is_not_there_is_named(reader: SnapshotReader, database: Database) -> None:
    assert values(reader) == []
    with pytest.raises(DatabaseError, match=r"table eventsql\.change .*no_column"):
        SnapshotReader(database, "change", ["no_column"]).read()


def test_rows_are_read_in_a_transaction_of_sqlalchemy(
    reader: SnapshotReader, database: Database, engine: sqlalchemy.Engine
) -> None:
    with database.transaction() as connection:
        write(connection, "a", "b")
    with engine.connect() as mine:
        assert values(reader, connection=mine) == ["a", "b"]
        assert reader.held_back(connection=mine) == 0
        assert reader.horizon(mine) >= reader.read(connection=mine)[-1].checkpoint.transaction
        assert mine.in_transaction()


# Checkpoints


def test_checkpoints_compare_as_rows_are_ordered() -> None:
    numbers = [(9, 10), (10, 2), (10, 10), (2**32, 1), (MAX_TRANSACTION, -1)]
    checkpoints = [Checkpoint(*pair) for pair in numbers]
    shuffled = dict.fromkeys((checkpoints[3], *checkpoints[::-1]))
    assert sorted(shuffled) == checkpoints
    assert [Checkpoint.parse(str(each)) for each in checkpoints] == checkpoints
    assert max(START, *checkpoints) is checkpoints[-1]


@pytest.mark.parametrize(
    "text", ["", "1", "1:", ":1", "a:1", "1:2:3", "-1:0", f"{MAX_TRANSACTION + 1}:0", f"1:{2**63}"]
)
def test_a_text_that_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Checkpoint.parse(text)


def test_wrong_arguments_are_refused_before_the_database_is_used() -> None:
    with Database("postgresql://someone:secret@127.0.0.1:1/nowhere") as nowhere:
        reader = SnapshotReader(nowhere, "change", ["eql_value"])
        with pytest.raises(ValidationError, match="limit"):
            reader.read(limit=0)
        with pytest.raises(ValidationError, match="columns"):
            SnapshotReader(nowhere, "change", "eql_value")
