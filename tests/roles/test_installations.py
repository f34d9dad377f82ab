"""Roles in other installations: another owner, the schema public, plans of restricted roles, staged blocks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, Database, Queries, migrations, role_statements
from eventsql_orchestration.database.installation import CurrentRole
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.errors import CaptureError, PermissionDeniedError, ValidationError
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.topics.catalog import lock_registry
from eventsql_orchestration.views import Retained, Timeline, Views

if TYPE_CHECKING:
    from tests.fixtures import Sessions, UntilBlocked
    from tests.roles.conftest import As, Login


@pytest.fixture
def plain_owner(direct_dsn: str) -> Iterator[str]:
    """The URL of a login without any privilege of the server's but on its own schema and to make roles."""
    name = f"o{uuid.uuid4().hex[:8]}"
    database = make_url(direct_dsn).database
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD 'x'").format(sql.Identifier(name)))
        connection.execute(
            sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(str(database)), sql.Identifier(name))
        )
    yield make_url(direct_dsn).set(username=name, password="x").render_as_string(hide_password=False)
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def test_an_owner_that_is_no_superuser_makes_roles_and_goes_on(plain_owner: str, prefix: str) -> None:
    with EventSQL(plain_owner, schema="mine", transfer=False) as owner:
        owner.registry.register_topic(Topic("orders"))
        owner.registry.register_consumer(Consumer("orders", "mailer"))
        Roles(owner.database).create(prefix=prefix, topics=["orders"])
        Roles(owner.database).create(prefix=prefix)
        owner.registry.register_topic(Topic("later"))
        owner.publisher.publish(Publication("orders", b"v"))
        assert owner.transfer.run_once() == {"orders": 1}
        owner.registry.unregister_topic("later")
        Roles(owner.database).drop()
        owner.publisher.publish(Publication("orders", b"v"))
        assert owner.transfer.run_once() == {"orders": 1}


def test_a_prefix_that_leaves_no_room_for_names_of_their_own_is_refused(direct_dsn: str) -> None:
    with EventSQL(direct_dsn, transfer=False) as superuser:
        superuser.registry.register_topic(Topic("orders"))
        roles, prefix = Roles(superuser.database), "p" * 53
        with pytest.raises(ValidationError, match="choose a shorter prefix"):
            roles.sql(prefix=f"{prefix}p")
        assert f"{prefix}_publisher" in roles.sql(prefix=prefix)
        with pytest.raises(ValidationError, match="choose a shorter prefix"):
            roles.sql(prefix=prefix, topics=["orders"])
        assert roles.sql(prefix=prefix[1:], topics=["orders", "orders"])


def capture_purchases(owner: EventSQL, shop: Connection) -> None:
    """Make the table `shop.purchase`, whose changes are the events of the topic `purchases`."""
    shop.execute("CREATE SCHEMA shop")
    shop.execute("CREATE TABLE shop.purchase (id integer PRIMARY KEY)")
    owner.registry.register_topic(Topic("purchases"))
    owner.capture("shop.purchase", "purchases")


def test_a_table_that_is_captured_before_there_are_roles_can_be_written_with_roles_and_after_them(
    plain_owner: str, prefix: str
) -> None:
    with EventSQL(plain_owner, schema="mine", transfer=False) as owner, psycopg.connect(plain_owner) as shop:
        shop.autocommit = True
        capture_purchases(owner, shop)
        Roles(owner.database).create(prefix=prefix)
        Roles(owner.database).create(prefix=prefix)
        shop.execute("INSERT INTO shop.purchase VALUES (1)")
        assert [each.problem for each in owner.captures.list()] == [None]

        shop.execute(sql.SQL("REVOKE ALL ON shop.purchase FROM {}").format(sql.Identifier(f"{prefix}_admin")))
        assert "GRANT SELECT" in str(owner.captures.list()[0].problem), "its writes would fail"
        Roles(owner.database).drop()
        shop.execute("INSERT INTO shop.purchase VALUES (2)")
        assert owner.buffered() == {"purchases": 2}


def test_roles_are_dropped_after_a_table_is_captured_no_more(plain_owner: str, prefix: str) -> None:
    with EventSQL(plain_owner, schema="mine", transfer=False) as owner, psycopg.connect(plain_owner) as shop:
        shop.autocommit = True
        capture_purchases(owner, shop)
        Roles(owner.database).create(prefix=prefix)
        owner.captures.drop("shop.purchase", "purchases")
        Roles(owner.database).drop()
        assert Roles(owner.database).states() == []


def test_a_superuser_drops_no_roles_that_a_captured_table_needs_and_finds_none_to_drop(
    plain_owner: str, prefix: str, direct_dsn: str
) -> None:
    with (
        EventSQL(plain_owner, schema="mine", transfer=False) as owner,
        EventSQL(direct_dsn, schema="mine", transfer=False) as superuser,
        psycopg.connect(plain_owner, autocommit=True) as shop,
    ):
        capture_purchases(owner, shop)
        assert Roles(superuser.database).drop() == []
        Roles(owner.database).create(prefix=prefix)
        with pytest.raises(CaptureError):
            Roles(superuser.database).drop()
        shop.execute("INSERT INTO shop.purchase VALUES (1)")
        assert owner.buffered() == {"purchases": 1}
        Roles(owner.database).drop()


def test_roles_that_would_stop_the_writers_of_a_captured_table_are_not_made(
    plain_owner: str, prefix: str, direct_dsn: str
) -> None:
    name, other = sql.Identifier(str(make_url(plain_owner).username)), sql.Identifier(f"{prefix}_other")
    with (
        EventSQL(plain_owner, schema="mine", transfer=False) as owner,
        psycopg.connect(direct_dsn, autocommit=True) as shop,
    ):
        owner.registry.register_topic(Topic("purchases"))
        # The platform's owner may read the table, and cannot let another role read it.
        shop.execute(sql.SQL("CREATE ROLE {}; GRANT {} TO {}").format(other, name, other))
        shop.execute("CREATE TABLE public.purchase (id integer PRIMARY KEY)")
        shop.execute(sql.SQL("GRANT SELECT, TRIGGER ON public.purchase TO {}").format(name))
        shop.execute(sql.SQL("ALTER TABLE public.purchase OWNER TO {}").format(other))
        with EventSQL(direct_dsn, schema="mine", transfer=False) as superuser:
            superuser.capture("public.purchase", "purchases")
        with pytest.raises(CaptureError):
            Roles(owner.database).create(prefix=prefix)
        assert Roles(owner.database).states() == []
        shop.execute("INSERT INTO public.purchase VALUES (1)")
        assert owner.buffered() == {"purchases": 1}
        shop.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(other, other))


def test_an_owner_with_the_name_of_an_admin_makes_no_roles(direct_dsn: str, prefix: str) -> None:
    admin = sql.Identifier(f"{prefix}_admin")
    with Database(direct_dsn) as database, database.connection() as connection:
        connection.execute(sql.SQL("CREATE ROLE {}").format(admin))
        connection.execute(sql.SQL("ALTER TABLE eventsql.event_buffer OWNER TO {}").format(admin))
        assert CurrentRole.of(connection, database.schema).prefix is None
        Roles(database).create(prefix=prefix)
        assert CurrentRole.of(connection, database.schema).prefix == prefix


@pytest.mark.usefixtures("own_roles")
def test_roles_are_made_beside_registrations_of_topics(
    owner: EventSQL, prefix: str, until_blocked: UntilBlocked
) -> None:
    with ThreadPoolExecutor(1) as executor:
        with owner.database.transaction() as registering:
            lock_registry(registering)
            role_statements.grant(registering, owner.database.schema, ["orders"])
            making = executor.submit(Roles(owner.database).create, prefix=prefix)
            until_blocked()
        assert making.result()


@pytest.mark.usefixtures("own_roles")
def test_roles_are_made_beside_a_migration(
    owner: EventSQL, prefix: str, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant, making = role_statements.grant, list[Future[object]]()
    with ThreadPoolExecutor(1) as executor:

        def grant_beside_another(*given: Any) -> None:
            grant(*given)
            making.append(executor.submit(Roles(owner.database).create, prefix=prefix))
            until_blocked()

        monkeypatch.setattr(role_statements, "grant", grant_beside_another)
        owner.database.migrate()
        assert making.pop().result()


@pytest.mark.usefixtures("own_roles")
@pytest.mark.parametrize("table", ["consumer", "consumer_delivery"])
@pytest.mark.parametrize("change", ["create", "drop"])
def test_a_change_of_roles_gives_way_to_a_handler_that_publishes(
    owner: EventSQL, prefix: str, sessions: Sessions, until_blocked: UntilBlocked, *, change: str, table: str
) -> None:
    handling, roles = sessions(), Roles(owner.database)
    handling.execute(f"LOCK TABLE eventsql.{table} IN ROW EXCLUSIVE MODE".encode())
    with ThreadPoolExecutor(1) as executor:
        changing = executor.submit(roles.create, prefix=prefix) if change == "create" else executor.submit(roles.drop)
        until_blocked()
        handling.execute("LOCK TABLE eventsql.event_buffer IN ROW EXCLUSIVE MODE")
        handling.commit()
        assert changing.result()


@pytest.mark.usefixtures("own_roles")
def test_a_migration_of_policies_gives_way_to_a_handler_that_publishes(
    owner: EventSQL, login: Login, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    with owner.database.connection() as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = '0076'")
    handling = sessions()
    handling.execute("LOCK TABLE eventsql.consumer_delivery IN ROW EXCLUSIVE MODE")
    with Database(login("admin")) as database, ThreadPoolExecutor(1) as executor:
        migrating = executor.submit(database.migrate)
        until_blocked()
        handling.execute("LOCK TABLE eventsql.event_buffer IN ROW EXCLUSIVE MODE")
        handling.commit()
        migrating.result()
        assert database.revision() == migrations.HEAD


@pytest.mark.usefixtures("own_roles")
@pytest.mark.parametrize("change", ["create", "drop"])
def test_a_change_of_the_owner_gives_way_to_a_transaction_that_uses_several_tables(
    owner: EventSQL, prefix: str, sessions: Sessions, until_blocked: UntilBlocked, change: str
) -> None:
    """As of a subscription, which reads the changes, and then the adopted ones."""
    subscription, roles = sessions(), Roles(owner.database)
    if change == "create":
        with owner.database.connection() as connection:
            connection.execute(f"REASSIGN OWNED BY {prefix}_admin TO CURRENT_USER")
    subscription.execute("LOCK TABLE eventsql.aggregate_change IN ACCESS SHARE MODE")
    with ThreadPoolExecutor(1) as executor:
        changing = executor.submit(roles.create, prefix=prefix) if change == "create" else executor.submit(roles.drop)
        until_blocked()
        subscription.execute("LOCK TABLE eventsql.adopted_change IN ACCESS SHARE MODE")
        subscription.commit()
        assert changing.result()


@pytest.mark.usefixtures("own_roles")
def test_views_and_archives_from_before_the_roles_belong_to_the_admin(owner: EventSQL, as_: As, prefix: str) -> None:
    Roles(owner.database).drop()
    now = datetime.now(UTC)
    shipments, views = Timeline("shipments", period=timedelta(days=1)), Views(owner.database)
    views.declare(shipments)
    with owner.database.transaction() as connection:
        views.timeline(shipments).append(connection, [("1", {}, now - timedelta(days=9))])
        connection.execute("SELECT eventsql.make_queue_archive(%s)", [now])
    Roles(owner.database).create(prefix=prefix, topics=["orders"])
    with owner.database.connection() as connection:
        owners = connection.execute(
            "SELECT DISTINCT tableowner FROM pg_tables WHERE tablename ~ '^(view_shipments|queue_archive)'"
        )
        assert owners.fetchall() == [(f"{prefix}_admin",)]

    with as_("admin").database.transaction() as connection:
        views.timeline(shipments).append(connection, [("1", {}, now - timedelta(days=3))])
    admin = Views(as_("admin").database)
    admin.declare(Timeline("shipments", period=timedelta(days=1), retention=timedelta(days=5)))
    assert admin.retain() == [Retained("shipments", dropped=1, busy=0)]


def test_the_platform_in_the_schema_public_has_roles_too(direct_dsn: str, prefix: str) -> None:
    with EventSQL(direct_dsn, schema="public", transfer=False) as owner, owner.database.connection() as connection:
        owner.registry.register_topic(Topic("orders"))
        connection.execute("CREATE TABLE public.theirs (id integer)")
        Roles(owner.database).create(prefix=prefix)
        theirs = connection.execute("SELECT tableowner FROM pg_tables WHERE tablename = 'theirs'").fetchone()
        schema = connection.execute("SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'public'")
        assert prefix not in str(theirs) + str(schema.fetchone())
        Roles(owner.database).drop()


def test_a_migration_gives_roles_their_rights_on_what_is_new(owner: EventSQL, as_: As, prefix: str) -> None:
    with owner.database.connection() as connection:
        connection.execute(
            sql.SQL("REVOKE ALL ON eventsql.consumer_claim, eventsql.event_buffer FROM {0}, {1}").format(
                sql.Identifier(f"{prefix}_consumer"), sql.Identifier(f"{prefix}_publisher")
            )
        )
    publisher = as_("publisher")
    with pytest.raises(PermissionDeniedError):
        publisher.publisher.publish(Publication("orders", b"v"))
    as_("admin").database.migrate()
    as_("publisher").publisher.publish(Publication("orders", b"v"))


def test_a_migration_shows_a_role_of_one_topic_no_rows_of_others_in_a_new_table(
    owner: EventSQL, as_: As, login: Login
) -> None:
    with owner.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.consumer_worker (eql_topic, eql_consumer, eql_name, eql_expires_at) "
            "SELECT eql_name, 'mailer', 'a process', now() FROM eventsql.topic"
        )
        connection.execute("ALTER TABLE eventsql.consumer_worker DISABLE ROW LEVEL SECURITY")
    as_("admin").database.migrate()
    with psycopg.connect(login("consumer_orders")) as connection:
        seen = connection.execute("SELECT eql_topic FROM eventsql.consumer_worker").fetchall()
    assert seen == [("orders",)]


def test_hot_statements_of_a_role_of_one_topic_go_by_an_index(owner: EventSQL, login: Login) -> None:
    with owner.database.connection() as connection:
        for topic in ("orders", "payments"):
            connection.execute(
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events) "
                "SELECT %s, 'c' || n, p, 0 FROM generate_series(1, 2000) n, generate_series(0, 1) p",
                [topic],
            )
            connection.execute(
                "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
                "eql_events, eql_epoch, eql_owner, eql_state) "
                "SELECT %s, 'c' || n, 0, n, n + 1, 1, 1, 'x', 'committed' FROM generate_series(1, 20000) n",
                [topic],
            )
        connection.execute("ANALYZE eventsql.consumer, eventsql.consumer_claim")
    log, claims = Queries("log", "eventsql"), Queries("claims", "eventsql")
    on_log = LogQueries("consumers", "eventsql")
    own: dict[str, Any] = {
        "topic": "orders", "consumer": "c7", "partition": 0, "upto": 5, "first": 1, "consumed": 1, "after": 0,
        "transaction": None, "owner": "x", "lease": 1.0, "epoch": 1, "claim": 3, "state": "released",
        "event": 1, "attempts": 1, "failure": "x", "backoff": 1.0,
    }  # fmt: skip
    statements = [
        log("lock_consumer"), log("await_consumer"), log("advance"), log("record_failure"), log("live_claim"),
        log("lease"), log("renew_lease"), log("own_claim"), log("finish_claim"), log("release_live_claim"),
        claims("last"), on_log("standings", topic="orders"),
    ]  # fmt: skip
    with psycopg.connect(login("consumer_orders")) as session, psycopg.ClientCursor(session) as cursor:
        for statement in statements:
            plan = cursor.execute(sql.SQL("EXPLAIN ") + statement, own).fetchall()
            text = "\n".join(line for (line,) in plan)
            assert "Seq Scan" not in text, f"{statement.as_string()}\n{text}"


def test_a_transfer_moves_events_of_a_topic_that_lost_partitions_where_public_may_execute_nothing(
    owner: EventSQL, as_: As
) -> None:
    with owner.database.connection() as connection:
        connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA eventsql FROM PUBLIC")
    owner.repartitioner.repartition("orders", 1)
    owner.publisher.publish(Publication("orders", b"v", key="1"))
    assert as_("transfer").transfer.run_once() == {"orders": 1}


def test_a_restored_database_whose_server_lacks_a_role_takes_topics_and_migrations(owner: EventSQL, as_: As) -> None:
    with owner.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.access_role VALUES ('left_behind', 'sender', NULL), ('left_too', 'reader', NULL)"
        )
    owner.registry.register_topic(Topic("later"))
    owner.database.migrate()
    assert list(as_("reader").reader.read("later")) == []


@pytest.mark.usefixtures("own_roles")
def test_a_restored_database_drops_roles_that_its_server_lacks(owner: EventSQL) -> None:
    with owner.database.connection() as connection:
        connection.execute("INSERT INTO eventsql.access_role VALUES ('left_behind', 'sender', NULL)")
    assert "left_behind" in {role.name for role in Roles(owner.database).drop()}
    assert Roles(owner.database).states() == []


def test_a_stager_publishes_blocks(owner: EventSQL, login: Login) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

    from eventsql_orchestration.spark.commit_protocol import Publications
    from eventsql_orchestration.spark.options import Source
    from eventsql_orchestration.spark.staging import stage

    rows = pa.RecordBatch.from_pydict({"value": [b"v"] * 3000, "key": [str(number) for number in range(3000)]})

    def publish(dsn: str) -> None:
        with Publications(Source.of([dsn], "eventsql")) as publications:
            publications.publish("w", 1, [stage(publications.write_targets("orders", {}), [rows])])

    with pytest.raises(PermissionDeniedError):
        publish(login("publisher"))
    publish(login("stager"))
    assert owner.buffered() == {"orders": 3000}
    with EventSQL(login("transfer"), transfer=False) as transfer:
        assert transfer.transfer.run_once() == {"orders": 3000}


def test_a_role_that_may_not_read_the_revision_is_told(owner: EventSQL, login: Login, prefix: str) -> None:
    with owner.database.connection() as connection:
        connection.execute(
            sql.SQL("REVOKE SELECT ON eventsql.schema_version FROM {}").format(sql.Identifier(f"{prefix}_reader"))
        )
    with Database(login("reader")) as database, pytest.raises(PermissionDeniedError) as raised:
        database.ensure_schema()
    assert raised.value.object == "schema_version"


@pytest.mark.usefixtures("own_roles")
@pytest.mark.parametrize("by", ["SELECT", "SELECT (eql_topic, eql_name)", "pg_read_all_data"])
def test_rights_that_were_given_by_hand_show_every_consumer_beside_roles_of_one_topic(
    owner: EventSQL, login: Login, prefix: str, by: str
) -> None:
    monitoring = login()
    name = sql.Identifier(str(make_url(monitoring).username))
    with owner.database.transaction() as connection:
        if by.startswith("SELECT"):
            connection.execute(sql.SQL("GRANT USAGE ON SCHEMA eventsql TO {}").format(name))
            connection.execute(sql.SQL("GRANT " + by + " ON eventsql.consumer TO {}").format(name))
        else:
            connection.execute(sql.SQL("GRANT pg_read_all_data TO {}").format(name))
    Roles(owner.database).create(prefix=prefix)
    with psycopg.connect(monitoring) as connection:
        seen = connection.execute("SELECT DISTINCT eql_topic, eql_name FROM eventsql.consumer ORDER BY 1").fetchall()
    assert seen == [("orders", "mailer"), ("payments", "mailer")]
