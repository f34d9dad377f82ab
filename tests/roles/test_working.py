"""Each role does its work, with its own rights alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.database import Connection, Database, migrations
from eventsql_orchestration.database.grants import role_name
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.errors import PermissionDeniedError, RedefinitionError
from eventsql_orchestration.model import BLOCKS, STORAGES, Storage
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.erasing import FAILURE
from eventsql_orchestration.topics.leftovers import Leftovers
from tests.forms import stored
from tests.maintenance.test_erasure import stage

if TYPE_CHECKING:
    from tests.roles.conftest import As, Login


def _orders(count: int, topic: str = "orders") -> list[Publication]:
    return [Publication(topic, b"v", key=str(number)) for number in range(count)]


@pytest.mark.parametrize("role", ["publisher", "publisher_orders"])
def test_a_publisher_publishes_any_number_of_events(owner: EventSQL, as_: As, role: str) -> None:
    platform = as_(role)
    for count in (1, 10, 200):
        assert platform.publisher.publish_all(_orders(count)) == count
        assert owner.transfer.run_once() == {"orders": count}


@pytest.mark.parametrize("role", ["publisher", "publisher_orders"])
def test_a_batch_for_a_log_in_blocks_takes_the_rights_that_its_events_take(owner: EventSQL, as_: As, role: str) -> None:
    for topic in ("orders", "payments"):
        owner.registry.set_storage(topic, BLOCKS)
    platform = as_(role)
    platform.publisher.publish_all(_orders(100))
    with owner.database.connection() as connection:
        waiting = connection.execute("SELECT sum(eql_events) FROM eventsql.event_buffer WHERE eql_partition = -3")
        assert waiting.fetchone() == (100,)
    assert as_("reader").buffered() == {"orders": 100}
    assert as_("transfer").transfer.run_once() == {"orders": 100}
    if role == "publisher_orders":
        with pytest.raises(PermissionDeniedError):
            platform.publisher.publish_all(_orders(100, "payments"))
        assert owner.buffered() == {}


@pytest.mark.parametrize("role", ["publisher", "publisher_orders"])
def test_an_outbox_publishes_at_every_isolation_level(owner: EventSQL, login: Login, role: str) -> None:
    dsn = login(role)
    with EventSQL(dsn, transfer=False) as platform, psycopg.connect(dsn) as connection:
        for isolation in psycopg.IsolationLevel:
            connection.isolation_level = isolation
            platform.publisher.publish(Publication("orders", b"one"), connection=connection)
            platform.publisher.publish_all(_orders(3), connection=connection)
            connection.commit()
            assert owner.transfer.run_once() == {"orders": 4}


@pytest.mark.parametrize("role", ["publisher", "publisher_orders", "consumer", "reader"])
def test_a_service_registers_a_topic_at_its_start_that_is_as_it_declares(owner: EventSQL, as_: As, role: str) -> None:
    owner.registry.set_retention("orders", Retention(seconds=3600))
    existing = owner.registry.topic("orders")
    platform = as_(role)
    for declared in (Topic("orders", partitions=existing.partitions), existing):
        registration = platform.registry.declare_topic(declared)
        assert (registration.created, registration.changes) == (False, ())
    for other in (
        Topic("orders", partitions=existing.partitions + 1),
        replace(existing, retention=Retention(seconds=60)),
        Topic("parcels"),
    ):
        with pytest.raises(PermissionDeniedError, match="only the admin may do this"):
            platform.registry.declare_topic(other)
    with pytest.raises(RedefinitionError):
        platform.registry.declare_topic(replace(existing, compression="pglz"))
    assert owner.registry.topic("orders") == existing
    assert "parcels" not in {topic.name for topic in owner.registry.topics()}


@pytest.mark.parametrize("role", ["publisher", "publisher_orders", "consumer", "reader"])
def test_a_service_registers_a_topic_at_its_start_with_the_number_before_a_repartitioning(
    owner: EventSQL, as_: As, role: str
) -> None:
    former = owner.registry.topic("orders").partitions
    owner.publisher.publish(Publication("orders", b"1"))
    owner.repartitioner.repartition("orders", former + 2)
    platform = as_(role)
    assert platform.registry.declare_topic(Topic("orders", former)).outdated is not None
    with pytest.raises(PermissionDeniedError):
        platform.registry.declare_topic(Topic("orders", former + 1))


def test_a_publisher_that_may_not_transfer_has_no_background_transfer(owner: EventSQL, as_: As) -> None:
    platform = as_("publisher", transfer=True)
    platform.publisher.publish(Publication("orders", b"v"))
    assert not any(thread.name == "eventsql-transfer" for thread in threading.enumerate())
    assert owner.buffered() == {"orders": 1}


@pytest.mark.parametrize("role", ["transfer", "admin", "superuser"])
def test_segments_that_a_transfer_comes_to_belong_to_the_admin_whoever_makes_them(
    owner: EventSQL, as_: As, prefix: str, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 100)
    with owner.database.connection() as connection:
        connection.execute(f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 15000000)")
    owner.publisher.publish_all(_orders(45))
    maker = owner if role == "superuser" else as_(role)
    assert maker.transfer.run_once() == {"orders": 45}
    with owner.database.connection() as connection:
        found = segments.segments(connection, "eventsql", "orders") or []
        owners = connection.execute(
            "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'eventsql'"
        ).fetchall()
    assert found[-1].start > 15_000_045
    assert owners == [(f"{prefix}_admin",)]


def test_a_transfer_leaves_leftovers_to_the_admin_without_a_warning(
    owner: EventSQL, as_: As, caplog: pytest.LogCaptureFixture
) -> None:
    with owner.database.connection() as connection:
        connection.execute("INSERT INTO eventsql.shard_fence VALUES (2, 'gone', 40)")
    with caplog.at_level("WARNING"):
        assert as_("transfer").retention.run_once() == []
    assert caplog.messages == []
    assert len(Leftovers(owner.database).find()) == 1
    as_("admin").retention.run_once()
    assert Leftovers(owner.database).find() == []


def test_rows_of_topics_that_row_security_hides_are_no_leftovers(owner: EventSQL, as_: As) -> None:
    owner.publisher.publish_all(_orders(2))
    with owner.database.connection() as connection:
        connection.execute("ALTER TABLE eventsql.topic ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        assert as_("admin").retention.run_once() == []
        connection.execute("ALTER TABLE eventsql.topic DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY")
    assert {each.consumer for each in owner.lag("orders")} == {"mailer"}
    assert owner.transfer.run_once() == {"orders": 2}


@pytest.mark.parametrize("role", ["publisher", "publisher_orders"])
def test_a_role_of_publishing_and_transfer_takes_the_straight_path(owner: EventSQL, as_: As, role: str) -> None:
    platform = as_(role, "transfer")
    platform.publisher.publish_all(_orders(200))
    assert owner.reader.end("orders") == 200


@pytest.mark.parametrize("roles", [("publisher_orders", "transfer"), ("transfer",)])
def test_a_role_of_a_transfer_publishes_no_batch_to_a_topic_that_is_not_its_own(
    owner: EventSQL, as_: As, roles: tuple[str, ...]
) -> None:
    publisher = as_(*roles).publisher
    for number in (1, 2_000):
        with pytest.raises(PermissionDeniedError):
            publisher.publish_all([Publication("payments", b"v", partition=0)] * number)
    owner.transfer.run_once()
    assert owner.reader.end("payments") == 0


def test_a_publisher_whose_role_was_taken_back_publishes_no_batch(
    owner: EventSQL, login: Login, session: Connection, prefix: str
) -> None:
    url = login("publisher_orders", "transfer")
    with EventSQL(url, transfer=False) as platform:
        platform.publisher.publish_all(_orders(200))
        session.execute(f'REVOKE "{prefix}_publisher_orders" FROM "{make_url(url).username}"'.encode())
        with pytest.raises(PermissionDeniedError):
            platform.publisher.publish_all(_orders(200))
    assert owner.reader.end("orders") == 200


@pytest.mark.parametrize("role", ["consumer", "consumer_orders"])
def test_a_consumer_consumes_and_moves_its_offset(owner: EventSQL, as_: As, role: str) -> None:
    owner.publisher.publish_all(_orders(20))
    owner.transfer.run_once()
    platform, seen, done = as_(role), [], threading.Event()

    def handle(event: Event, _connection: Connection) -> None:
        seen.append(event.id)
        if len(seen) == 20:
            done.set()

    platform.consumers.start("orders", "mailer", handle)
    assert done.wait(60)
    platform.consumers.close(10)
    assert sum(lag.events for lag in owner.lag("orders")) == 0


@pytest.mark.parametrize("role", ["consumer", "consumer_orders"])
def test_a_consumer_writes_dead_letters(owner: EventSQL, as_: As, role: str) -> None:
    owner.registry.register_consumer(Consumer("orders", "failing"), max_attempts=1)
    owner.publisher.publish(Publication("orders", b"bad"))
    owner.transfer.run_once()
    platform, failed = as_(role), threading.Event()

    def handle(_event: Event, _connection: Connection) -> None:
        failed.set()
        raise RuntimeError("no")

    platform.consumers.start("orders", "failing", handle)
    assert failed.wait(60)
    platform.consumers.close(30)
    assert owner.transfer.run_once() == {"orders_dlt": 1}


@pytest.mark.parametrize("role", ["consumer", "consumer_orders"])
def test_a_consumer_claims_leases_and_commits(owner: EventSQL, as_: As, role: str) -> None:
    owner.publisher.publish_all(_orders(20))
    owner.transfer.run_once()
    platform = as_(role)
    claimed = platform.claims.claim("orders", "mailer", 0, owner="run")
    assert isinstance(claimed, Claim)
    with platform.database.transaction() as connection:
        platform.claims.commit(connection, claimed)
    assert [state.consumed_events > 0 for state in owner.registry.consumer("orders", "mailer")] == [True, False]


@pytest.mark.parametrize("role", ["consumer", "consumer_orders"])
def test_a_consumer_enters_the_next_layout(owner: EventSQL, as_: As, role: str) -> None:
    owner.publisher.publish_all(_orders(20))
    owner.transfer.run_once()
    owner.repartitioner.repartition("orders", 1)
    platform = as_(role)
    assert not platform.shards[0].layouts.settle("orders", "mailer").entered
    for partition in range(2):
        claimed = platform.claims.claim("orders", "mailer", partition, owner="run")
        assert isinstance(claimed, Claim)
        with platform.database.transaction() as connection:
            platform.claims.commit(connection, claimed)
    platform.shards[0].layouts.settle("orders", "mailer")
    assert len(owner.registry.consumer("orders", "mailer")) == 1


def test_events_of_an_ended_process_are_free_if_one_of_another_topic_has_its_number(
    owner: EventSQL, as_: As, session: Connection
) -> None:
    def process(platform: EventSQL, topic: str) -> tuple[Deliveries, int]:
        shard = platform.shards[0]
        own = Deliveries(shard.database, shard.dead_letters, topic, "mailer", by_key=True, lease=60, most=9)
        return own, own.register("a process")

    owner.publisher.publish(Publication("payments", b"v", partition=0))
    owner.transfer.run_once()
    consumer = as_("consumer")
    ended, number = process(consumer, "payments")
    ended.hand_out(number, 0, 9)
    ended.leave(number)

    # As on a logical replica, which has no values of sequences. This role does not see the events of `payments`.
    session.execute("ALTER SEQUENCE eventsql.consumer_worker_eql_id_seq RESTART")
    assert process(as_("consumer_orders"), "orders")[1] == number
    own, number = process(consumer, "payments")
    assert len(own.hand_out(number, 0, 9).deliveries) == 1


@pytest.mark.parametrize("role", ["reader", "reader_orders"])
def test_a_reader_reads_events_and_lag(owner: EventSQL, as_: As, role: str) -> None:
    owner.publisher.publish_all(_orders(20))
    owner.transfer.run_once()
    owner.publisher.publish(Publication("orders", b"v"))
    platform = as_(role)
    assert len(list(platform.reader.read("orders", after=0, limit=100))) == 20
    assert sum(lag.events for lag in platform.lag()) == 21
    assert platform.buffered() == {"orders": 1}


def test_an_admin_registers_topics_that_all_roles_can_use_at_once(owner: EventSQL, as_: As, prefix: str) -> None:
    admin = as_("admin")
    admin.registry.register_topic(Topic("later", partitions=2))
    admin.registry.register_consumer(Consumer("later", "mailer"))
    publisher, transfer, reader = as_("publisher"), as_("transfer"), as_("reader")
    publisher.publisher.publish(Publication("later", b"v"))
    assert transfer.transfer.run_once() == {"later": 1}
    assert [lag.events for lag in reader.lag("later")] == [1]
    with owner.database.connection() as connection:
        owners = connection.execute(
            "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'eventsql' AND tablename LIKE 'later%'"
        ).fetchall()
    assert owners == [(f"{prefix}_admin",)]
    assert admin.registry.topic("later").partitions == 2


def test_an_admin_repartitions_retains_and_deletes(owner: EventSQL, as_: As) -> None:
    admin = as_("admin")
    admin.publisher.publish_all(_orders(100))
    admin.transfer.run_once()
    assert admin.repartitioner.repartition("orders", 1) is not None
    admin.retention.run_once()
    admin.registry.unregister_topic("payments", force=True)
    admin.registry.register_topic(Topic("payments", partitions=3))
    publisher = as_("publisher")
    publisher.publisher.publish(Publication("payments", b"v"))


def test_the_roles_of_a_topic_have_it_again_when_it_is_made_anew(owner: EventSQL, as_: As) -> None:
    owner.registry.unregister_topic("orders", force=True)
    owner.registry.register_topic(Topic("orders", partitions=1))
    as_("publisher_orders").publisher.publish(Publication("orders", b"v"))
    as_("transfer").transfer.run_once()
    assert len(list(as_("reader_orders").reader.read("orders", after=0, limit=10))) == 1


def test_making_roles_again_changes_nothing(owner: EventSQL, prefix: str) -> None:
    roles = Roles(owner.database)
    before, grants = roles.states(), _grants(owner)
    roles.create(prefix=prefix, topics=["orders"])
    roles.create(prefix=prefix)
    assert (roles.states(), _grants(owner)) == (before, grants)


@pytest.mark.usefixtures("own_roles")
def test_the_printed_sql_makes_the_same_roles(owner: EventSQL, direct_dsn: str, prefix: str) -> None:
    roles, expected = Roles(owner.database), _grants(owner)
    roles.drop()
    script = roles.sql(prefix=prefix, topics=["orders"])
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL(script))
    assert _grants(owner) == expected


@pytest.mark.usefixtures("own_roles")
def test_dropped_roles_leave_nothing(owner: EventSQL, prefix: str, direct_dsn: str) -> None:
    roles = Roles(owner.database)
    roles.drop(topics=["orders"])
    assert all(state.role.topic is None for state in roles.states())
    roles.drop()
    with psycopg.connect(direct_dsn) as connection:
        left = connection.execute("SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s)", [prefix]).fetchall()
    assert left == []
    owner.publisher.publish_all(_orders(5))
    assert owner.transfer.run_once() == {"orders": 5}


def test_a_long_role_name_keeps_within_63_bytes_and_its_own() -> None:
    names = {role_name("eventsql", "publisher", "t" * 50 + letter) for letter in "ab"}
    assert len(names) == 2
    assert {len(name) for name in names} == {63}


def test_a_schema_that_is_current_is_used_without_rights_to_migrate(login: Login) -> None:
    with Database(login("reader")) as database:
        database.ensure_schema()


def test_a_migration_that_is_needed_names_the_role_that_may(owner: EventSQL, login: Login, prefix: str) -> None:
    with owner.database.connection() as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = '0011'")
    dsn = login("publisher")
    with Database(dsn) as database, pytest.raises(PermissionDeniedError) as raised:
        database.ensure_schema()
    assert raised.value.role == f"{prefix}_login_0"
    assert f"{prefix}_admin" in str(raised.value)
    with owner.database.connection() as connection:
        connection.execute("UPDATE eventsql.schema_version SET version_num = %s", [migrations.HEAD])


@pytest.mark.parametrize("roles", [(), ("publisher",), ("reader",)])
def test_a_role_that_may_not_migrate_current_tables_is_told_which_role_may(
    login: Login, prefix: str, roles: tuple[str, ...]
) -> None:
    with Database(login(*roles)) as database, pytest.raises(PermissionDeniedError) as raised:
        database.migrate()
    assert re.findall(r"GRANT (\w+) TO", str(raised.value)) == [f"{prefix}_admin"]


def test_a_role_is_taken_on_by_an_option_of_the_url(owner: EventSQL, login: Login, prefix: str) -> None:
    dsn = login("publisher", "transfer", options=f"-c role={prefix}_publisher")
    with EventSQL(dsn, transfer=False) as platform:
        platform.publisher.publish_all(_orders(100))
        assert owner.buffered() == {"orders": 100}
        with pytest.raises(PermissionDeniedError) as raised:
            platform.transfer.run_once()
    assert raised.value.role == f"{prefix}_publisher"


def _grants(owner: EventSQL) -> set[tuple[object, ...]]:
    with owner.database.connection() as connection:
        return set(
            connection.execute(
                "SELECT relname, acl::text, NULL FROM pg_class, unnest(relacl) acl"
                " WHERE relnamespace = 'eventsql'::regnamespace AND acl::text NOT LIKE '%%\\_admin=%%'"
                " UNION ALL SELECT proname, acl::text, NULL FROM pg_proc, unnest(proacl) acl"
                " WHERE pronamespace = 'eventsql'::regnamespace AND acl::text NOT LIKE '%%\\_admin=%%'"
                " UNION ALL SELECT attrelid::regclass::text, attname, attacl::text FROM pg_attribute"
                " WHERE attacl IS NOT NULL AND attrelid::regclass::text LIKE 'eventsql.%%'"
                " UNION ALL SELECT tablename, policyname, roles::text FROM pg_policies WHERE schemaname = 'eventsql'",
            ).fetchall()
        )


@pytest.mark.parametrize("role", ["reader", "reader_orders", "consumer", "consumer_orders"])
def test_a_role_that_reads_logs_reads_a_range_in_sql(owner: EventSQL, login: Login, role: str) -> None:
    with owner.database.connection() as connection:
        connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA eventsql FROM PUBLIC")
    owner.publisher.publish_all(_orders(3))
    owner.transfer.run_once()
    with psycopg.connect(login(role)) as session:
        assert session.execute("SELECT eql_id FROM eventsql.events('orders', 1, 2)").fetchall() == [(2,)]


@pytest.mark.parametrize(
    ("role", "topic"), [("publisher", "orders"), ("transfer", "orders"), ("reader_orders", "payments")]
)
def test_the_function_for_a_range_gives_no_role_a_log_that_it_may_not_read(login: Login, role: str, topic: str) -> None:
    with psycopg.connect(login(role)) as session, pytest.raises(psycopg.errors.InsufficientPrivilege):
        session.execute("SELECT FROM eventsql.events(%s)", [topic])


@pytest.mark.parametrize("role", ["publisher", "publisher_orders"])
def test_a_publisher_publishes_in_sql_to_its_topics_alone(owner: EventSQL, login: Login, role: str) -> None:
    with psycopg.connect(login(role), autocommit=True) as connection:
        connection.execute("SELECT eventsql.publish('orders', 'k', 'v', '{}')")
        connection.execute("SELECT eventsql.publish_all('orders', NULL, ARRAY['v']::bytea[])")
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        connection.execute("SELECT eventsql.publish('orders', 'k', 'v')")
        if role == "publisher":
            connection.execute("SELECT eventsql.publish('payments', 'k', 'v')")
        else:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT eventsql.publish('payments', 'k', 'v')")
    assert owner.transfer.run_once()["orders"] == 3
    with (
        psycopg.connect(login("reader"), autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("SELECT eventsql.publish('orders', 'k', 'v')")


@pytest.mark.usefixtures("own_roles")
def test_a_topic_may_be_called_by_a_word_of_sql(owner: EventSQL, as_: As, prefix: str) -> None:
    owner.registry.register_topic(Topic("order"))
    Roles(owner.database).create(prefix=prefix, topics=["order"])
    as_("publisher_order").publisher.publish(Publication("order", b"v"))
    assert owner.transfer.run_once() == {"order": 1}


@pytest.mark.parametrize("storage", STORAGES)
def test_an_eraser_erases_and_lists_what_was_erased(owner: EventSQL, as_: As, storage: Storage) -> None:
    owner.registry.register_topic(Topic("people", 2, storage=storage)).register_topic(Topic("people_dlt"))
    owner.publisher.publish_all([Publication("people", b"v", key="ann"), Publication("people", b"v", key="bob")])
    owner.transfer.run_once()
    owner.publisher.publish(Publication("people", b"v", key="ann"))
    platform = as_("eraser")
    assert platform.eraser.plan("people", ["ann"]).events == 1
    done = platform.eraser.execute("people", ["ann"], requested_by="ticket 7")
    # VACUUM takes the ownership of the table.
    assert (done.events, done.buffered, done.vacuumed) == (1, 1, False)
    (record,) = platform.eraser.records()
    assert "login" in record.role
    with pytest.raises(PermissionDeniedError):
        platform.publisher.publish(Publication("people", b"v"))
    with pytest.raises(psycopg.errors.InsufficientPrivilege), platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.erasure")
    assert as_("reader").eraser.records() == [record]


@pytest.mark.parametrize("storage", STORAGES)
def test_roles_keep_their_rights_when_a_topic_changes_its_form(owner: EventSQL, as_: As, storage: Storage) -> None:
    for form in STORAGES if storage == "blocks" else reversed(STORAGES):
        owner.publisher.publish_all(_orders(4))
        owner.transfer.run_once()
        as_("admin").registry.set_storage("orders", form)
    as_("publisher_orders").publisher.publish_all(_orders(4))
    assert as_("transfer").transfer.run_once() == {"orders": 4}
    assert as_("reader_orders").reader.count("orders") == 12
    assert sum(lag.events for lag in as_("reader").lag("orders")) == 12
    seen: list[Event] = []

    def take(events: Sequence[Event], _: Connection) -> None:
        seen.extend(events)

    consumer = as_("consumer_orders")
    while consumer.consumers.consume_once("orders", "mailer", take):
        pass
    assert len(seen) == 12
    assert as_("eraser").eraser.execute("orders", [seen[0].key or ""]).events >= 1


def test_an_eraser_reaches_staged_blocks_and_failed_deliveries(owner: EventSQL, as_: As) -> None:
    stage(owner, "ann", "bob")
    owner.publisher.publish(Publication("orders", b"v", key="ann"))
    owner.transfer.run_once()
    with owner.database.connection() as connection:
        connection.execute(
            "WITH cursor AS (INSERT INTO eventsql.consumer_cursor (eql_topic, eql_consumer, eql_partition, eql_offset, "
            "eql_claimed_upto, eql_by_key) VALUES ('orders', 'mailer', 0, 0, 9, true) RETURNING eql_id) "
            "INSERT INTO eventsql.consumer_delivery (eql_cursor, eql_id, eql_topic, eql_attempts, eql_failure) "
            "SELECT c.eql_id, e.eql_id, 'orders', 1, 'a quote' FROM cursor c, eventsql.orders_event e"
        )
    done = as_("eraser").eraser.execute("orders", ["ann"])
    assert (done.events, done.buffered) == (1, 1)
    with owner.database.connection() as connection:
        (failure,) = connection.execute("SELECT eql_failure FROM eventsql.consumer_delivery").fetchone() or (None,)
    assert failure == FAILURE


@pytest.mark.parametrize("role", ["publisher", "transfer", "consumer", "reader", "stager"])
def test_other_roles_do_not_erase(owner: EventSQL, as_: As, role: str) -> None:
    owner.publisher.publish(Publication("orders", b"v", key="ann"))
    with pytest.raises(PermissionDeniedError):
        as_(role).eraser.execute("orders", ["ann"])
