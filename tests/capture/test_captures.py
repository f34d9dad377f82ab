"""Captures are made, refused, changed and dropped; a dropped capture breaks no writer."""

from __future__ import annotations

import json
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.capture import captures
from eventsql_orchestration.database import Connection, Queries, driver_connection
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import (
    CaptureError,
    DatabaseBusyError,
    DatabaseError,
    InvalidNameError,
    RedefinitionError,
    RegistryError,
    ShardError,
    ShardSetError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.shards.add_shard import ShardAddition
from tests.capture.replay import differences, events
from tests.fixtures import Sessions, UntilBlocked
from tests.plans import custom_plan


def prepare(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text, secret text)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="orders")


@pytest.fixture
def orders(platform: EventSQL) -> EventSQL:
    """A platform with a table `orders` that is captured to the topic `changes`."""
    return platform


# Refused


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("public.absent", ""),
        ("public.seen", "CREATE VIEW seen AS SELECT 1 AS id"),
        ("public.split", "CREATE TABLE split (id int PRIMARY KEY) PARTITION BY HASH (id)"),
        ("public.child", "CREATE TABLE parent (id int); CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)"),
        ("public.parent", "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent)"),
        ("public.volatile", "CREATE UNLOGGED TABLE volatile (id int PRIMARY KEY)"),
        ("public.keyless", "CREATE TABLE keyless (id int)"),
        ("public.late", "CREATE TABLE late (id int PRIMARY KEY DEFERRABLE)"),
        ("public.moody", "CREATE TYPE mood AS ENUM ('fine'); CREATE TABLE moody (id mood PRIMARY KEY)"),
        ("eventsql.topic", ""),
        ("pg_catalog.pg_class", ""),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_captured_is_refused(
    platform: EventSQL, session: Connection, name: str, made: str
) -> None:
    session.execute(made.encode() or b"SELECT")
    platform.registry.register_topic(Topic("changes"))
    with pytest.raises(CaptureError):
        platform.capture(name, "changes")
    assert platform.captures.list() == []


def test_tables_beside_the_platforms_in_one_schema_are_captured(direct_dsn: str, session: Connection) -> None:
    with EventSQL(direct_dsn, schema="public", transfer=False) as platform:
        platform.registry.register_topic(Topic("changes"))
        own = session.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        ).fetchall()
        session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
        platform.capture("orders", "changes")
        session.execute("INSERT INTO orders VALUES (1)")
        platform.transfer.run_once()
        assert [event.key for event in platform.reader.read("changes")] == ["1"]
        for (name,) in own:
            with pytest.raises(CaptureError):
                platform.capture(name, "changes")


def test_a_connection_to_a_server_that_takes_no_more_writes_is_not_used_again(
    direct_dsn: str, session: Connection
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    with EventSQL(direct_dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("changes"))

        def capture_without_writes() -> int:
            with platform.database.engine.connect() as connection:
                driver = driver_connection(connection)
                driver.execute("SET default_transaction_read_only TO on")
                server_process = driver.info.backend_pid
            with pytest.raises(DatabaseError, match="takes no writes"):
                platform.capture("orders", "changes")
            return server_process

        assert capture_without_writes() != capture_without_writes()


@pytest.mark.parametrize("name", ["", "a.b.c", "a b", '"a', "a;b c", "x\x00"])
def test_a_name_that_no_table_can_have_is_refused(platform: EventSQL, name: str) -> None:
    platform.registry.register_topic(Topic("changes"))
    with pytest.raises(ValidationError):
        platform.capture(name, "changes")


def test_a_key_may_be_a_domain_of_a_domain(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE DOMAIN number AS integer; CREATE DOMAIN order_number AS number")
    session.execute("CREATE TABLE orders (id order_number PRIMARY KEY); INSERT INTO orders VALUES (1)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")
    session.execute("UPDATE orders SET id = 2")
    platform.transfer.run_once()
    assert [event.key for event in platform.reader.read("changes")] == ["1", "1", "2"]


def test_a_key_must_be_unique_and_never_null(platform: EventSQL, session: Connection) -> None:
    session.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, code text UNIQUE, sure text NOT NULL UNIQUE, partial int NOT NULL, "
        "part int NOT NULL, whole int NOT NULL, doubtful int NOT NULL)"
    )
    session.execute("CREATE UNIQUE INDEX ON orders (partial) WHERE partial > 0")
    session.execute("CREATE UNIQUE INDEX ON orders (part, whole) INCLUDE (code)")
    # As CREATE INDEX CONCURRENTLY leaves it when it finds a value twice.
    session.execute("CREATE UNIQUE INDEX doubt ON orders (doubtful)")
    session.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'doubt'::regclass")
    platform.registry.register_topic(Topic("changes"))
    for key in (["code"], ["partial"], ["part"], ["id", "sure"], ["doubtful"]):
        with pytest.raises(CaptureError):
            platform.capture("orders", "changes", key=key)
    for wrong in ([], ["absent"], ["id", "id"], "id"):
        with pytest.raises(ValidationError):
            platform.capture("orders", "changes", key=wrong)
    assert platform.capture("orders", "changes", key=["sure"]).key == ("sure",)
    platform.captures.drop("orders", "changes")
    assert platform.capture("orders", "changes", key=["whole", "part"]).key == ("whole", "part")


@pytest.fixture
def not_valid(platform: EventSQL, session: Connection) -> None:
    """A topic, on a server whose NOT NULL may be NOT VALID."""
    if session.info.server_version < 180_000:
        pytest.skip("PostgreSQL 18 is the first with such constraints")
    platform.registry.register_topic(Topic("changes"))


@pytest.mark.usefixtures("not_valid")
def test_a_key_whose_constraint_has_not_looked_at_older_rows_may_be_null(
    platform: EventSQL, session: Connection
) -> None:
    session.execute("CREATE TABLE orders (code text UNIQUE); INSERT INTO orders VALUES (NULL)")
    session.execute("ALTER TABLE orders ADD CONSTRAINT sure NOT NULL code NOT VALID")
    with pytest.raises(CaptureError):
        platform.capture("orders", "changes", key=["code"])
    session.execute("UPDATE orders SET code = 'x'; ALTER TABLE orders VALIDATE CONSTRAINT sure")
    assert platform.capture("orders", "changes", key=["code"]).key == ("code",)


@pytest.mark.usefixtures("not_valid")
def test_a_capture_goes_on_while_the_constraint_of_its_key_is_not_valid(
    platform: EventSQL, session: Connection
) -> None:
    session.execute("CREATE TABLE orders (code text UNIQUE NOT NULL)")
    platform.capture("orders", "changes", key=["code"])
    session.execute("ALTER TABLE orders ALTER code DROP NOT NULL, ADD CONSTRAINT sure NOT NULL code NOT VALID")
    session.execute("INSERT INTO orders VALUES ('a')")
    assert platform.transfer.run_once() == {"changes": 1}


def test_a_capture_needs_an_existing_topic_and_a_valid_name(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    with pytest.raises(TopicNotFoundError):
        platform.capture("orders", "changes")
    with pytest.raises(InvalidNameError):
        platform.capture("orders; DROP TABLE orders", "changes")


def test_a_shard_cannot_capture_and_a_captured_database_cannot_become_one(
    orders: EventSQL, server: EmbeddedPostgres
) -> None:
    new = EventSQL(server.create_database("another"))
    try:
        addition = ShardAddition(orders.shards, new.shards[0])
        for step in (addition.plan, addition.execute):
            with pytest.raises(ShardSetError, match="capture drop"):
                step()
        orders.captures.drop("orders", "changes")
        ShardAddition(orders.shards, new.shards[0]).execute()
        with pytest.raises(ShardError):
            orders.capture("orders", "changes")
    finally:
        new.close()
        server.drop_database("another")


def test_a_captured_table_of_a_database_that_has_become_a_shard_refuses_changes(
    orders: EventSQL, session: Connection
) -> None:
    session.execute("INSERT INTO eventsql.shard (eql_name, eql_set) VALUES ('a', gen_random_uuid())")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        session.execute("INSERT INTO orders VALUES (1)")


# Changed


def test_the_statements_for_missing_rights_quote_the_names_of_roles(orders: EventSQL, session: Connection) -> None:
    session.execute('CREATE ROLE "a ""role"')
    try:
        session.execute("CREATE TABLE public.others (id int PRIMARY KEY)")
        for table in (b"orders", b"others"):
            session.execute(b'ALTER TABLE public.%s OWNER TO "a ""role"' % table)
        (broken,) = orders.captures.list()
        with pytest.raises(CaptureError) as refused:
            orders.capture("others", "changes")
        assert broken.grants is not None
        assert broken.grants in str(refused.value)
        session.execute(broken.grants.encode())
        (mended,) = orders.captures.list()
        assert mended.problem is None
    finally:
        session.execute('DROP OWNED BY "a ""role"; DROP ROLE "a ""role"')


def test_a_repeated_capture_changes_nothing_and_another_key_is_refused(orders: EventSQL, session: Connection) -> None:
    before = orders.captures.list()
    assert orders.capture("public.orders", "changes") == before[0]
    with pytest.raises(RedefinitionError):
        orders.capture("orders", "changes", columns=["status"])
    assert orders.captures.list() == before


def test_a_repeated_capture_writes_nothing(orders: EventSQL, session: Connection) -> None:
    written = "SELECT xmin::text, ctid::text FROM eventsql.capture"
    before = session.execute(written).fetchall()
    orders.capture("orders", "changes")
    assert session.execute(written).fetchall() == before


def test_columns_in_another_order_are_the_same_columns(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE ride (id integer PRIMARY KEY, fare integer, driver text)")
    platform.registry.register_topic(Topic("rides"))
    made = platform.capture("ride", "rides", columns=["fare", "driver"])
    assert platform.capture("ride", "rides", columns=["driver", "fare"]).id == made.id


def test_a_column_that_was_dropped_and_added_again_is_captured_again_by_the_same_call(
    platform: EventSQL, session: Connection
) -> None:
    session.execute("CREATE TABLE ride (id integer PRIMARY KEY, fare integer, driver text, note text)")
    platform.registry.register_topic(Topic("rides"))
    platform.capture("ride", "rides", columns=["fare", "driver"])
    session.execute("ALTER TABLE ride DROP COLUMN fare")
    (capture,) = (each for each in platform.captures.list() if each.topic == "rides")
    assert (capture.outdated, capture.added_again) == (True, ())
    session.execute("ALTER TABLE ride ADD COLUMN fare numeric")
    (capture,) = (each for each in platform.captures.list() if each.topic == "rides")
    assert (capture.columns, capture.outdated, capture.added_again) == (("driver",), True, ("fare",))
    with pytest.raises(RedefinitionError):
        platform.capture("ride", "rides", columns=["fare", "driver", "note"])

    again = platform.capture("ride", "rides", columns=["fare", "driver"])
    assert (again.columns, again.outdated, again.added_again) == (("fare", "driver"), False, ())
    session.execute("INSERT INTO ride VALUES (1, 'Ann', 'late', 9.5)")
    platform.transfer.run_once()
    (event,) = platform.reader.read("rides")
    assert json.loads(event.value)["after"] == {"id": 1, "driver": "Ann", "fare": "9.5"}


def test_two_installations_capture_one_table(orders: EventSQL, session: Connection, dsn: str) -> None:
    with EventSQL(dsn, schema="second", transfer=False) as second:
        second.registry.register_topic(Topic("changes"))
        second.capture("orders", "changes")
        second.registry.register_topic(Topic("more"))
        second.capture("orders", "more")
        session.execute("INSERT INTO orders VALUES (1, 'new')")
        for platform in (orders, second):
            platform.transfer.run_once()
        assert [len(platform.reader.read("changes")) for platform in (orders, second)] == [1, 1]
        second.captures.drop("orders", "changes")
        session.execute("DELETE FROM orders")
        for platform in (orders, second):
            platform.transfer.run_once()
        assert [len(platform.reader.read("changes")) for platform in (orders, second)] == [2, 1]
        assert len(second.reader.read("more")) == 2


def test_the_name_of_a_captured_table_is_the_one_of_sql(platform: EventSQL, session: Connection) -> None:
    session.execute('CREATE TABLE "Its Rides" (id integer PRIMARY KEY)')
    platform.registry.register_topic(Topic("rides"))
    capture = platform.capture('"Its Rides"', "rides")
    assert capture.table == 'public."Its Rides"'
    session.execute('DROP TABLE "Its Rides"')
    platform.captures.drop(capture.table, "rides")
    assert platform.captures.list() == []


def test_a_capture_that_is_dropped_during_its_snapshot_is_an_error(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE orders AS SELECT 1 AS id")
    session.execute("ALTER TABLE orders ADD PRIMARY KEY (id)")
    platform.registry.register_topic(Topic("changes"))
    with pytest.raises(CaptureError):
        platform.captures.create("orders", "changes", on_rows=lambda _: platform.captures.drop("orders", "changes"))


def test_one_table_can_go_to_two_topics_and_two_tables_to_one(orders: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE more (id integer PRIMARY KEY)")
    orders.registry.register_topic(Topic("others"))
    orders.capture("orders", "others", columns=["status"])
    orders.capture("more", "changes")
    session.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    session.execute("INSERT INTO more VALUES (1)")
    assert [each["source"]["table"] for each in events(session)] == ["orders", "more"]
    orders.transfer.run_once()
    assert [event.key for event in orders.reader.read("others")] == ["1"]


def test_columns_that_are_not_captured_are_in_no_event(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text, secret text)")
    platform.registry.register_topic(Topic("changes"))
    capture = platform.capture("orders", "changes", columns=["status"])
    assert capture.columns == ("status",)
    session.execute("INSERT INTO orders VALUES (1, 'new', 'hush')")
    session.execute("UPDATE orders SET secret = 'other'")
    session.execute("ALTER TABLE orders ADD COLUMN more text DEFAULT 'hush'")
    session.execute("ALTER TABLE orders RENAME COLUMN status TO state")
    session.execute("ALTER TABLE orders RENAME COLUMN secret TO status")
    session.execute("UPDATE orders SET state = 'paid', status = 'hush'")
    session.execute("ALTER TABLE orders DROP COLUMN state")
    session.execute("DELETE FROM orders")
    assert [(each["op"], each["before"], each["after"]) for each in events(session)] == [
        ("c", None, {"id": 1, "status": "new"}),
        ("u", {"id": 1, "state": "new"}, {"id": 1, "state": "paid"}),
        ("d", {"id": 1}, None),
    ]


def test_a_column_that_is_computed_when_it_is_read_is_in_no_event(platform: EventSQL, session: Connection) -> None:
    if session.info.server_version < 180_000:
        return
    session.execute("CREATE TABLE orders (id int PRIMARY KEY, net int, tax int GENERATED ALWAYS AS (net + 1) VIRTUAL)")
    session.execute("INSERT INTO orders VALUES (1, 5)")
    platform.registry.register_topic(Topic("changes"))
    with pytest.raises(ValidationError):
        platform.capture("orders", "changes", columns=["tax"])
    platform.capture("orders", "changes")
    session.execute("UPDATE orders SET net = 6")
    assert [each["after"] for each in events(session)] == [{"id": 1, "net": 5}, {"id": 1, "net": 6}]


def test_a_changed_table_goes_on_being_captured(orders: EventSQL, session: Connection) -> None:
    session.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    for change in (
        "ALTER TABLE orders ADD COLUMN amount numeric DEFAULT 1.50",
        "ALTER TABLE orders DROP COLUMN secret",
        "ALTER TABLE orders RENAME COLUMN id TO number",
        "ALTER TABLE orders ALTER COLUMN number TYPE bigint",
        "ALTER TABLE orders ALTER COLUMN amount TYPE text",
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD UNIQUE (number)",
        "ALTER TABLE orders RENAME TO purchase",
        "CREATE SCHEMA shop",
        "ALTER TABLE purchase SET SCHEMA shop",
        "VACUUM FULL shop.purchase",
    ):
        session.execute(change.encode())
        (table,) = (
            session.execute("SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname ~ 'update'").fetchone() or ()
        )
        session.execute(f"UPDATE {table} SET status = status || '!'".encode())
    assert differences(session, "shop.purchase", "number::text") == []
    assert orders.captures.list()[0].table == "shop.purchase"
    assert orders.capture("shop.purchase", "changes", key=["number"]).id == orders.captures.list()[0].id
    assert events(session)[-1]["source"]["schema"] == "shop"


@pytest.mark.parametrize(
    "change", ["ALTER TABLE orders DROP COLUMN id", "ALTER TABLE orders DROP CONSTRAINT orders_pkey"]
)
def test_a_table_without_its_key_refuses_changes_and_says_what_to_do(
    orders: EventSQL, session: Connection, change: str
) -> None:
    session.execute(change.encode())
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        session.execute(
            "INSERT INTO orders (status) VALUES ('new')" if "COLUMN" in change else "INSERT INTO orders VALUES (1)"
        )
    assert refused.value.diag.message_hint == "Run: eventsql capture drop --execute public.orders changes"
    orders.captures.drop("orders", "changes")
    session.execute(
        "INSERT INTO orders (status) VALUES ('new')" if "COLUMN" in change else "INSERT INTO orders VALUES (1)"
    )


def test_the_command_for_such_a_table_can_be_pasted_into_a_shell(orders: EventSQL, session: Connection) -> None:
    table = """public."It's $HOME\""""
    session.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)".encode())
    orders.capture(table, "changes")
    session.execute(f'ALTER TABLE {table} DROP CONSTRAINT "It\'s $HOME_pkey"'.encode())
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        session.execute(f"INSERT INTO {table} VALUES (1)".encode())
    command = (refused.value.diag.message_hint or "").removeprefix("Run: ")
    assert shlex.split(command) == ["eventsql", "capture", "drop", "--execute", table, "changes"]


# Dropped


def triggers(session: Connection) -> int:
    return session.execute("SELECT FROM pg_trigger WHERE tgname LIKE 'eventsql_capture%'").rowcount


def test_a_dropped_capture_leaves_nothing(orders: EventSQL, session: Connection) -> None:
    orders.captures.drop("public.orders", "changes")
    assert triggers(session) == 0
    assert orders.captures.list() == []
    session.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    assert events(session) == []
    with pytest.raises(CaptureError):
        orders.captures.drop("orders", "changes")


def test_a_topic_with_captures_is_deleted_by_force_alone_and_its_tables_stay_writable(
    orders: EventSQL, session: Connection
) -> None:
    with pytest.raises(RegistryError):
        orders.registry.unregister_topic("changes")
    session.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    orders.registry.unregister_topic("changes", force=True)
    session.execute("UPDATE orders SET status = 'paid'")
    session.execute("TRUNCATE orders")
    assert orders.captures.list() == []
    assert orders.captures.idle_triggers() == [("public.orders", "changes")]
    orders.captures.drop("orders", "changes")
    assert orders.captures.idle_triggers() == []
    assert triggers(session) == 0


def test_an_idle_trigger_that_was_restored_into_a_younger_server_fails_no_transaction(
    orders: EventSQL, sessions: Sessions, session: Connection
) -> None:
    orders.registry.unregister_topic("changes", force=True)
    # The number of a transaction that this server has not come to.
    session.execute(
        "DO $$ DECLARE made text; BEGIN FOR made IN SELECT regexp_replace(pg_get_triggerdef(oid), "
        "'^CREATE (TRIGGER .*capture_changes.''[0-9]+'', '')[0-9]+', 'CREATE OR REPLACE \\199999999999') "
        "FROM pg_trigger WHERE tgname LIKE 'eventsql_capture%' LOOP EXECUTE made; END LOOP; END $$"
    )
    assert session.execute(
        "SELECT FROM pg_trigger WHERE encode(tgargs, 'escape') LIKE '%99999999999%'"
    ).rowcount == triggers(session)
    writer = sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    writer.execute("UPDATE orders SET status = 'paid'")
    writer.execute("TRUNCATE orders")
    writer.commit()


def test_a_topic_that_comes_again_does_not_get_changes_of_a_former_capture(
    orders: EventSQL, session: Connection
) -> None:
    orders.registry.unregister_topic("changes", force=True)
    orders.registry.register_topic(Topic("changes", 2))
    session.execute("INSERT INTO orders VALUES (1, 'new', 'x')")
    assert events(session) == []
    orders.capture("orders", "changes")
    session.execute("UPDATE orders SET status = 'paid'")
    assert [each["op"] for each in events(session)] == ["r", "u"]


def test_a_writer_that_waits_for_the_deletion_of_a_topic_writes_no_event_to_its_successor(
    orders: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked
) -> None:
    deletion = sessions()
    deletion.execute("LOCK TABLE eventsql.event_buffer IN SHARE ROW EXCLUSIVE MODE")
    deletion.execute("DELETE FROM eventsql.topic WHERE eql_name = 'changes'")
    deletion.execute("INSERT INTO eventsql.topic (eql_name, eql_partitions) VALUES ('changes', -1)")
    waiting = threading.Thread(target=session.execute, args=("INSERT INTO orders VALUES (1)",))
    waiting.start()
    until_blocked()
    deletion.commit()
    waiting.join(60)
    assert session.execute("SELECT FROM orders").rowcount == 1
    assert events(session) == []


def test_a_dropped_tables_capture_is_shown_and_can_be_dropped(orders: EventSQL, session: Connection) -> None:
    session.execute("DROP TABLE orders")
    assert orders.captures.list()[0].problem == "the table is gone"
    orders.captures.drop("public.orders", "changes")
    assert orders.captures.list() == []


def test_a_disabled_trigger_is_a_problem(orders: EventSQL, session: Connection) -> None:
    session.execute("ALTER TABLE orders DISABLE TRIGGER USER")
    assert orders.captures.list()[0].problem is not None


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE every (LIKE orders) PARTITION BY RANGE (id); ALTER TABLE every ATTACH PARTITION orders DEFAULT",
        "CREATE TABLE old_orders () INHERITS (orders)",
        "ALTER TABLE orders SET UNLOGGED",
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey",
        "ALTER TABLE orders DROP COLUMN id",
    ],
    ids=["partition", "inheritance", "unlogged", "key", "column of the key"],
)
def test_a_table_that_changes_to_a_kind_that_cannot_be_captured_is_a_problem(
    orders: EventSQL, session: Connection, change: str
) -> None:
    assert orders.captures.list()[0].problem is None
    session.execute(change.encode())
    assert orders.captures.list()[0].problem is not None


def test_a_table_to_which_a_subscription_writes_is_a_problem(orders: EventSQL, session: Connection) -> None:
    session.execute("CREATE SUBSCRIPTION copies CONNECTION '' PUBLICATION all_orders WITH (connect = false)")
    try:
        # The subscription would note its tables with the publisher's answer.
        session.execute(
            "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) "
            "SELECT oid, 'orders'::regclass, 'r' FROM pg_subscription WHERE subname = 'copies'"
        )
        (broken,) = orders.captures.list()
        assert broken.problem is not None
        assert "logical replication" in broken.problem
    finally:
        session.execute("ALTER SUBSCRIPTION copies SET (slot_name = NONE)")
        session.execute("DROP SUBSCRIPTION copies")
    assert orders.captures.list()[0].problem is None


def test_row_security_that_binds_the_triggers_role_is_a_problem(orders: EventSQL, session: Connection) -> None:
    session.execute("CREATE ROLE keeper; GRANT SELECT ON orders TO keeper")
    try:
        session.execute(
            "GRANT USAGE ON SCHEMA eventsql TO keeper; GRANT ALL ON ALL TABLES IN SCHEMA eventsql TO keeper; "
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA eventsql TO keeper; "
            "GRANT ALL ON ALL FUNCTIONS IN SCHEMA eventsql TO keeper"
        )
        session.execute("ALTER FUNCTION eventsql.capture_changes() OWNER TO keeper")
        assert orders.captures.list()[0].problem is None
        session.execute("INSERT INTO orders VALUES (1)")
        session.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
        (broken,) = orders.captures.list()
        assert broken.problem is not None
        # The triggers would not see the rows, and tell no change.
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session.execute("INSERT INTO orders VALUES (2)")
        with pytest.raises(CaptureError):
            orders.capture("orders", "changes")
        assert broken.grants is not None
        session.execute(broken.grants.encode())
        assert orders.captures.list()[0].problem is None
    finally:
        session.execute("REASSIGN OWNED BY keeper TO CURRENT_USER; DROP OWNED BY keeper; DROP ROLE keeper")


COPIED = "CREATE TABLE copied (LIKE orders INCLUDING ALL); INSERT INTO copied SELECT * FROM orders"
SWAPPED = "ALTER TABLE orders RENAME TO former; ALTER TABLE copied RENAME TO orders"


def test_a_table_that_takes_the_name_of_a_captured_table_is_a_problem_until_it_is_captured(
    orders: EventSQL, session: Connection
) -> None:
    session.execute(f"{COPIED}; {SWAPPED}".encode())
    (made,) = orders.captures.list()
    assert made.table == "public.former"
    assert made.replaced_by == "public.orders"
    assert made.problem is not None

    # Noting the new name keeps the capture of the renamed table alone.
    orders.capture("former", "changes", snapshot=False)
    assert [(each.problem, each.replaced_by) for each in orders.captures.list()] == [(None, None)]
    session.execute("UPDATE eventsql.capture SET eql_table = 'public.orders'")
    orders.capture("orders", "changes")
    assert [(each.table, each.problem) for each in orders.captures.list()] == [
        ("public.former", None),
        ("public.orders", None),
    ]


@pytest.mark.parametrize(
    ("made", "replaced_by"),
    [
        ("TABLE orders (id integer) PARTITION BY RANGE (id)", "public.orders"),
        # Changes through the view are changes of the renamed table.
        ("VIEW orders AS SELECT * FROM former", None),
    ],
)
def test_a_table_with_partitions_may_take_the_name_but_no_view_does(
    orders: EventSQL, session: Connection, made: str, replaced_by: str | None
) -> None:
    session.execute(f"ALTER TABLE orders RENAME TO former; CREATE {made}".encode())
    assert [(each.table, each.replaced_by) for each in orders.captures.list()] == [("public.former", replaced_by)]


def test_the_table_that_took_a_name_is_found_by_an_index(orders: EventSQL, session: Connection) -> None:
    session.execute("SET enable_seqscan = off")
    assert "relname = (parse_ident" in custom_plan(session, Queries("capture", "eventsql")("list"), {})


def test_the_list_decodes_each_trigger_once_however_many_captures_there_are(
    orders: EventSQL, session: Connection
) -> None:
    plan = custom_plan(session, Queries("capture", "eventsql")("list"), {})
    # A plan shows an expression that it computes for each comparison, and none of the columns that it computes first.
    assert "CTE Scan on triggers" in plan
    assert "string_to_array" not in plan


@pytest.mark.parametrize("operations", [["insert", "update", "delete", "truncate"], ["insert", "update"]])
def test_triggers_that_were_copied_to_the_table_that_took_the_name_count_there(
    orders: EventSQL, session: Connection, operations: list[str]
) -> None:
    session.execute(COPIED)
    for name, definition in session.execute(
        "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = 'orders'::regclass AND NOT tgisinternal"
    ).fetchall():
        if name.rpartition("_")[2] in operations:
            session.execute(definition.replace("ON public.orders", "ON public.copied").encode())
    session.execute(SWAPPED)
    (made,) = orders.captures.list()
    lacking = 4 - len(operations)
    assert made.table == "public.orders"
    assert made.problem == (f"{lacking} of its triggers are gone or disabled" if lacking else None)

    # Noting the table makes no second capture of it, and the capture that is dropped is its own.
    assert orders.capture("orders", "changes").id == made.id
    orders.captures.drop("orders", "changes")
    assert orders.captures.list() == []
    assert orders.captures.idle_triggers() == [("public.former", "changes")]


def test_a_capture_finds_the_columns_of_a_change_that_was_under_way(
    platform: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, note text)")
    platform.registry.register_topic(Topic("changes"))
    changing = sessions()
    changing.execute("ALTER TABLE orders RENAME COLUMN note TO remark")
    with ThreadPoolExecutor(1) as executor:
        capturing = executor.submit(platform.capture, "orders", "changes", columns=["remark"])
        until_blocked()
        changing.commit()
        assert capturing.result().columns == ("remark",)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("ALTER TABLE orders RENAME TO former; CREATE TABLE orders (number bigint PRIMARY KEY)", "number"),
        ("DROP TABLE orders; CREATE TABLE orders (number bigint PRIMARY KEY)", "number"),
        ("ALTER TABLE orders DROP COLUMN id, ADD COLUMN other int PRIMARY KEY", "other"),
    ],
    ids=["renamed", "made anew", "another key"],
)
def test_a_capture_describes_the_table_that_has_the_name_after_a_change_that_was_under_way(
    platform: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked,
    *, monkeypatch: pytest.MonkeyPatch, change: str, key: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(captures, "LOCK_SECONDS", 60.0)
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    platform.registry.register_topic(Topic("changes"))
    changing = sessions()
    changing.execute(change.encode())
    with ThreadPoolExecutor(1) as executor:
        capturing = executor.submit(platform.capture, "orders", "changes")
        until_blocked()
        changing.commit()
        made = capturing.result()
    assert (made.key, made.problem) == ((key,), None)
    session.execute(f"INSERT INTO orders ({key}) VALUES (5)".encode())
    assert platform.transfer.run_once() == {"changes": 1}


@pytest.mark.parametrize(
    "change", ["DROP TABLE app.orders", "DROP SCHEMA app CASCADE", "ALTER SCHEMA app RENAME TO old"]
)
def test_a_table_that_is_dropped_under_way_is_not_captured(
    platform: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked, change: str
) -> None:
    session.execute("CREATE SCHEMA app; CREATE TABLE app.orders (id integer PRIMARY KEY)")
    platform.registry.register_topic(Topic("changes"))
    changing = sessions()
    changing.execute(f"LOCK app.orders; {change}".encode())
    with ThreadPoolExecutor(1) as executor:
        capturing = executor.submit(platform.capture, "app.orders", "changes")
        until_blocked()
        changing.commit()
        with pytest.raises(CaptureError, match="does not exist"):
            capturing.result()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("DROP TABLE orders", []),
        ("DROP TABLE orders; CREATE TABLE orders (id integer PRIMARY KEY)", []),
        ("ALTER TABLE orders RENAME TO former; CREATE TABLE orders (id integer PRIMARY KEY)", ["public.former"]),
    ],
    ids=["dropped", "made anew", "renamed"],
)
def test_the_capture_that_is_dropped_is_of_the_table_that_has_the_name_after_a_change_that_was_under_way(
    orders: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, *, change: str, left: list[str]
) -> None:
    changing = sessions()
    changing.execute(change.encode())
    with ThreadPoolExecutor(1) as executor:
        dropping = executor.submit(orders.captures.drop, "orders", "changes")
        until_blocked()
        changing.commit()
        with pytest.raises(CaptureError, match="is not captured") if left else nullcontext():
            dropping.result()
    assert [each.table for each in orders.captures.list()] == left


def test_a_capture_waits_for_writers_and_gives_up(
    platform: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(captures, "RETRY_SECONDS", 0.2)
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    platform.registry.register_topic(Topic("changes"))
    writer = sessions()
    writer.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(DatabaseBusyError):
        platform.capture("orders", "changes")
    assert triggers(session) == 0
    writer.commit()
    platform.capture("orders", "changes")
    assert differences(session, "orders", "id::text") == []
