"""Each role is refused other work than its own, also if it does not use the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Retention, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection, grants
from eventsql_orchestration.errors import ConsumerNotFoundError, EventSQLError, PermissionDeniedError
from eventsql_orchestration.model import BLOCKS, ROWS
from tests.forms import in_blocks, stored

if TYPE_CHECKING:
    from tests.roles.conftest import As, Login

_BUFFER: Final = "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) VALUES "
_BLOCK: Final = _BUFFER.replace(")", ", eql_values)", 1)

ALL: Final = (
    "transfer",
    "publisher",
    "publisher_orders",
    "stager",
    "consumer",
    "consumer_orders",
    "reader",
    "reader_orders",
)

NOBODY: Final = (
    "UPDATE eventsql.topic SET eql_partitions = 9",
    "UPDATE eventsql.topic SET eql_layout = 9 WHERE eql_name = 'orders'",
    "INSERT INTO eventsql.topic (eql_name, eql_partitions) VALUES ('mine', 1)",
    "DELETE FROM eventsql.topic",
    "INSERT INTO eventsql.topic_layout VALUES ('orders', 2, 1, 0)",
    "INSERT INTO eventsql.event_buffer_lock VALUES ('orders')",
    "DELETE FROM eventsql.event_buffer_lock",
    "INSERT INTO eventsql.consumer (eql_topic, eql_name) VALUES ('orders', 'x')",
    "DELETE FROM eventsql.consumer",
    "UPDATE eventsql.consumer SET eql_filter = NULL",
    "UPDATE eventsql.consumer SET eql_paused = true",
    "UPDATE eventsql.consumer SET eql_name = 'mine'",
    "UPDATE eventsql.consumer SET eql_topic = 'payments'",
    "UPDATE eventsql.consumer_claim SET eql_upto = 1000",
    "UPDATE eventsql.consumer_claim SET eql_topic = 'payments'",
    "DELETE FROM eventsql.orders_event",
    "UPDATE eventsql.orders_event SET eql_value = 'x'",
    "INSERT INTO eventsql.orders_event VALUES (1, 0, NULL, 'x', now(), now(), '{}')",
    f"DELETE FROM eventsql.{stored('orders')}",
    f"UPDATE eventsql.{stored('orders')} SET eql_id = 1",
    f"TRUNCATE eventsql.{stored('orders')}",
    "UPDATE eventsql.event_buffer SET eql_value = 'x'",
    "TRUNCATE eventsql.event_buffer",
    "INSERT INTO eventsql.event_buffer (eql_id) VALUES (1)",
    "INSERT INTO eventsql.event_buffer (eql_created_at) VALUES ('1999-01-01')",
    "SELECT setval('eventsql.event_buffer_eql_id_seq', 1)",
    f"SELECT setval('eventsql.{stored('orders')}_eql_id_seq', 1)",
    "INSERT INTO eventsql.redriven_dead_letter VALUES ('orders_dlt', 1)",
    "DELETE FROM eventsql.redriven_dead_letter",
    "INSERT INTO eventsql.shard (eql_name, eql_set) VALUES ('a', gen_random_uuid())",
    "INSERT INTO eventsql.shard_layout (eql_generation, eql_shards) VALUES (1, '{a}')",
    "INSERT INTO eventsql.shard_fence VALUES (1, 'orders', 1)",
    "UPDATE eventsql.schema_version SET version_num = '0001'",
    "INSERT INTO eventsql.access_role VALUES ('mine', 'admin', NULL)",
    "UPDATE eventsql.access_role SET eql_topic = NULL",
    "CREATE TABLE eventsql.mine (id integer)",
    f"ALTER TABLE eventsql.{stored('orders')} ADD COLUMN mine integer",
    f"DROP TABLE eventsql.{stored('orders')}",
    "DROP TRIGGER event_buffer_granted ON eventsql.event_buffer",
    "ALTER TABLE eventsql.event_buffer DISABLE TRIGGER ALL",
    "ALTER TABLE eventsql.consumer DISABLE ROW LEVEL SECURITY",
    "CREATE POLICY mine ON eventsql.consumer USING (true)",
    "CREATE TRIGGER mine AFTER INSERT ON eventsql.event_buffer EXECUTE FUNCTION eventsql.check_publication()",
    "ALTER FUNCTION eventsql.hold_topics(text[]) OWNER TO CURRENT_USER",
    "CREATE OR REPLACE FUNCTION eventsql.publish_anywhere() RETURNS void LANGUAGE sql AS 'SELECT'",
    "SET session_replication_role TO replica",
    "GRANT SELECT ON eventsql.payments_event TO PUBLIC",
    "SELECT eventsql.make_segments('orders', 1, 9)",
    "SELECT eql_body FROM eventsql.queue_message",
    "SELECT * FROM eventsql.aggregate_change",
)  # fmt: skip
"""What no role may do but the admin."""


@pytest.mark.parametrize("role", ALL)
def test_no_role_but_the_admin_changes_definitions_or_history(login: Login, role: str) -> None:
    with psycopg.connect(login(role), autocommit=True) as session:
        # The rights that a GRANT without effect would only warn of.
        session.execute("SET client_min_messages TO warning")
        for statement in NOBODY:
            if statement.startswith("GRANT"):
                continue
            try:
                session.execute(sql.SQL(statement))
            except psycopg.errors.InsufficientPrivilege:
                continue
            pytest.fail(f"{role} may {statement}")


FORBIDDEN: Final = {
    "DELETE FROM eventsql.event_buffer": ("transfer",),
    "SELECT eql_value FROM eventsql.event_buffer": ("transfer",),
    "SELECT eql_value FROM eventsql.payments_event": ("consumer", "reader"),
    "SELECT eql_value FROM eventsql.orders_event": ("consumer", "consumer_orders", "reader", "reader_orders"),
    "SELECT eql_key FROM eventsql.orders_dlt_event": ("consumer", "reader"),
    "SELECT eql_value FROM eventsql.spark_staged_event": ("transfer", "stager"),
    "DELETE FROM eventsql.spark_staged_event": ("transfer", "stager"),
    "SELECT FROM eventsql.event_buffer_lock FOR UPDATE": ("transfer",),
    "SELECT eql_last_event_id FROM eventsql.consumer": (
        "transfer", "consumer", "consumer_orders", "reader", "reader_orders",
    ),
    "SELECT eql_failure FROM eventsql.consumer": ("consumer", "consumer_orders", "reader", "reader_orders"),
    "UPDATE eventsql.consumer SET eql_last_event_id = 1": ("consumer", "consumer_orders"),
    "UPDATE eventsql.consumer_claim SET eql_state = 'released'": ("consumer", "consumer_orders"),
    "SELECT eventsql.ensure_segments('orders', 5000000, 2)": ("transfer",),
    "SELECT eventsql.enter_layout('orders', 'mailer')": ("consumer", "consumer_orders"),
    "SELECT eventsql.publish_anywhere()": ("publisher", "stager"),
    _BUFFER + "('orders', 0, 'x', '{}')": ("publisher", "publisher_orders", "stager"),
    _BUFFER + "('orders_dlt', 0, 'x', '{}')": ("publisher", "stager", "consumer", "consumer_orders"),
    _BUFFER + "('payments_dlt', 0, 'x', '{}')": ("publisher", "stager", "consumer"),
    _BUFFER + "('payments', 0, 'x', '{}')": ("publisher", "stager"),
    _BUFFER + "('orders', -2, '', '{}')": ("stager",),
    _BUFFER + "('orders', -3, '', '{}')": ("stager",),
    _BLOCK + "('orders', -3, '', '{}', '{x}')": ("publisher", "publisher_orders", "stager"),
    _BLOCK + "('orders', -2, '', '{}', '{x}')": ("stager",),
    _BLOCK + "('payments', -3, '', '{}', '{x}')": ("publisher", "stager"),
}  # fmt: skip
"""Statements, and the roles that may do them: no other may."""


@pytest.mark.parametrize("role", ALL)
def test_a_role_may_do_its_own_work_alone(login: Login, role: str) -> None:
    with psycopg.connect(login(role)) as session:
        for statement, may in FORBIDDEN.items():
            allowed = True
            try:
                session.execute(sql.SQL(statement))
            except psycopg.errors.InsufficientPrivilege:
                allowed = False
            session.rollback()
            assert allowed == (role in may), f"{role}: {statement}"


def test_a_role_of_one_topic_has_no_rows_of_others(owner: EventSQL, login: Login) -> None:
    for topic in ("orders", "payments"):
        owner.publisher.publish(Publication(topic, b"v", partition=0))
        owner.transfer.run_once()
        assert isinstance(owner.claims.claim(topic, "mailer", 0, owner="run"), Claim)
    with psycopg.connect(login("consumer_orders")) as session:
        for statement in (
            "SELECT eql_topic FROM eventsql.consumer",
            "SELECT eql_topic FROM eventsql.consumer FOR UPDATE",
            "SELECT eql_topic FROM eventsql.consumer_claim",
            "UPDATE eventsql.consumer SET eql_last_event_id = 1 RETURNING eql_topic",
            "UPDATE eventsql.consumer_claim SET eql_state = 'released' RETURNING eql_topic",
            "DELETE FROM eventsql.consumer_claim RETURNING eql_topic",
        ):
            assert {row[0] for row in session.execute(sql.SQL(statement))} == {"orders"}, statement
        session.rollback()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session.execute(
                "INSERT INTO eventsql.consumer_claim (eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
                "eql_events, eql_epoch, eql_owner) VALUES ('payments', 'mailer', 1, 0, 1, 1, 1, 'x')"
            )


def test_a_role_of_one_topic_works_where_its_sessions_begin_without_row_security(
    owner: EventSQL, login: Login, session: Connection
) -> None:
    url = login("consumer_orders")
    role = sql.Identifier(str(make_url(url).username))
    session.execute(sql.SQL("ALTER ROLE {} SET row_security TO off").format(role))
    with EventSQL(url, transfer=False) as platform:
        assert {state.topic for state in platform.registry.consumers()} == {"orders"}


def test_a_role_of_one_topic_holds_back_no_delivery_of_others(owner: EventSQL, login: Login) -> None:
    with owner.database.connection() as connection:
        (cursor,) = connection.execute(
            "INSERT INTO eventsql.consumer_cursor (eql_topic, eql_consumer, eql_partition, eql_offset, "
            "eql_claimed_upto, eql_by_key) VALUES ('payments', 'mailer', 0, 0, 0, true) RETURNING eql_id"
        ).fetchone() or (0,)
    with psycopg.connect(login("consumer_orders")) as session, pytest.raises(psycopg.errors.ForeignKeyViolation):
        session.execute(
            "INSERT INTO eventsql.consumer_delivery (eql_cursor, eql_id, eql_topic) VALUES (%s, 1, 'orders')", (cursor,)
        )


@pytest.mark.parametrize(
    "statement",
    [
        (
            "INSERT INTO eventsql.consumer_claim (eql_id, eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, "
            "eql_events, eql_epoch, eql_owner) OVERRIDING SYSTEM VALUE VALUES (9, 'orders', 'm', 0, 0, 1, 1, 1, 'x')"
        ),
        (
            "INSERT INTO eventsql.consumer_cursor (eql_id, eql_topic, eql_consumer, eql_partition, eql_offset, "
            "eql_claimed_upto, eql_by_key) OVERRIDING SYSTEM VALUE VALUES (9, 'orders', 'mailer', 0, 0, 0, true)"
        ),
        "UPDATE eventsql.consumer_cursor SET eql_id = DEFAULT",
        (
            "INSERT INTO eventsql.consumer_worker (eql_id, eql_topic, eql_consumer, eql_name, eql_expires_at) "
            "OVERRIDING SYSTEM VALUE VALUES (9, 'orders', 'mailer', 'x', now())"
        ),
        "UPDATE eventsql.consumer_worker SET eql_id = DEFAULT",
    ],
)
def test_a_role_of_one_topic_takes_no_ids_that_others_draw(login: Login, statement: str) -> None:
    with (
        psycopg.connect(login("consumer_orders"), autocommit=True) as session,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        session.execute(statement.encode())


@pytest.mark.parametrize("column", ["eql_lease_expires_at", "eql_retry_at", "eql_last_consumption_at"])
@pytest.mark.parametrize("time", ["infinity", "-infinity", "10000-01-01"])
def test_a_role_of_one_topic_writes_no_time_that_others_cannot_read(
    owner: EventSQL, login: Login, column: str, time: str
) -> None:
    with psycopg.connect(login("consumer_orders"), autocommit=True) as session:
        with pytest.raises(psycopg.errors.CheckViolation):
            session.execute(f"UPDATE eventsql.consumer SET {column} = '{time}'".encode())
        session.execute(f"UPDATE eventsql.consumer SET {column} = '9999-12-30'".encode())
    assert {lag.topic for lag in owner.lag()} == {"orders", "payments"}


def test_a_role_of_one_topic_copies_nothing_into_others(owner: EventSQL, as_: As) -> None:
    platform = as_("publisher_orders")
    many = [Publication("payments" if number == 9 else "orders", b"v") for number in range(10)]
    with pytest.raises(PermissionDeniedError) as raised:
        platform.publisher.publish_all(many)
    assert raised.value.object == "payments"
    assert owner.buffered() == {}


@pytest.mark.usefixtures("own_roles")
def test_an_upgrade_makes_the_policies_anew(owner: EventSQL, prefix: str) -> None:
    policies = "SELECT polrelid::regclass::text, polname, polcmd, polroles FROM pg_policy ORDER BY 1, 2"
    with owner.database.connection() as connection:
        wanted = connection.execute(policies).fetchall()
        for table in grants.BY_TOPIC:
            connection.execute(f"DROP POLICY eventsql_read_all_topics ON eventsql.{table}".encode())
            connection.execute(f'DROP POLICY "{prefix}_reader_orders" ON eventsql.{table}'.encode())
            connection.execute(f'CREATE POLICY "{prefix}_reader_orders" ON eventsql.{table} USING (true)'.encode())
            connection.execute(f'ALTER POLICY eventsql_all_topics ON eventsql.{table} TO "{prefix}_reader"'.encode())
        connection.execute("UPDATE eventsql.schema_version SET version_num = '0076'")
    with EventSQL(owner.database.given_dsn, transfer=False) as platform, platform.database.connection() as connection:
        assert connection.execute(policies).fetchall() == wanted
        protected = "SELECT count(*) FROM pg_class WHERE relnamespace = 'eventsql'::regnamespace AND relrowsecurity"
        assert connection.execute(protected).fetchone() == (len(grants.BY_TOPIC),)


@pytest.mark.usefixtures("own_roles")
def test_a_login_with_two_roles_of_one_topic_each_has_both(owner: EventSQL, login: Login, prefix: str) -> None:
    from eventsql_orchestration.database.roles import Roles

    Roles(owner.database).create(prefix=prefix, topics=["payments"])
    with psycopg.connect(login("consumer_orders", "consumer_payments")) as session:
        found = session.execute("SELECT DISTINCT eql_topic FROM eventsql.consumer ORDER BY 1").fetchall()
    assert found == [("orders",), ("payments",)]


@pytest.mark.usefixtures("own_roles")
@pytest.mark.parametrize(
    "right",
    [
        "{prefix}_reader", "{prefix}_reader_payments", "{prefix}_transfer", "pg_read_all_data",
        "SELECT ON eventsql.consumer, eventsql.consumer_claim",
    ],
)  # fmt: skip
def test_a_consumer_of_one_topic_that_reads_others_changes_no_row_of_theirs(
    owner: EventSQL, login: Login, session: Connection, prefix: str, right: str
) -> None:
    from eventsql_orchestration.database.roles import Roles

    for topic in ("orders", "payments"):
        owner.publisher.publish(Publication(topic, b"v", partition=0))
        owner.transfer.run_once()
        assert isinstance(owner.claims.claim(topic, "mailer", 0, owner="run"), Claim)
    Roles(owner.database).create(prefix=prefix, topics=["payments"])
    url = login("consumer_orders")
    session.execute(f'GRANT {right.format(prefix=prefix)} TO "{make_url(url).username}"'.encode())
    Roles(owner.database).create(prefix=prefix)
    with psycopg.connect(url) as connection:
        for table in ("consumer", "consumer_claim"):
            seen = connection.execute(f"SELECT DISTINCT eql_topic FROM eventsql.{table} ORDER BY 1".encode()).fetchall()
            assert seen == [("orders",), ("payments",)], table
        for statement in (
            "UPDATE eventsql.consumer SET eql_last_event_id = 1 RETURNING eql_topic",
            "UPDATE eventsql.consumer_claim SET eql_state = 'released' RETURNING eql_topic",
            "DELETE FROM eventsql.consumer_claim RETURNING eql_topic",
        ):
            assert {row[0] for row in connection.execute(sql.SQL(statement))} == {"orders"}, statement


def test_nobody_becomes_another_role(login: Login, prefix: str) -> None:
    for role in ALL:
        with psycopg.connect(login(role), autocommit=True) as session:
            for other in {"admin", "transfer", "reader", "publisher"} - {role}:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    session.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(f"{prefix}_{other}")))


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT eventsql.ensure_segments('nothing', 10, 2)",
        "SELECT eventsql.ensure_segments('orders''; DROP TABLE eventsql.topic; --', 10, 2)",
        "SELECT eventsql.ensure_segments('orders', 0, 2)",
        "SELECT eventsql.ensure_segments('orders', -5, 2)",
        "SELECT eventsql.ensure_segments('orders', NULL, 2)",
        "SELECT eventsql.ensure_segments('orders', 10, NULL)",
        "SELECT eventsql.ensure_segments('orders', 10, 1000000)",
        "SELECT eventsql.ensure_segments('access_role', 10, 2)",
    ],
)
def test_hostile_arguments_make_no_segments(owner: EventSQL, login: Login, statement: str) -> None:
    with psycopg.connect(login("transfer"), autocommit=True) as session, pytest.raises(psycopg.DataError):
        session.execute(sql.SQL(statement))
    assert owner.registry.topic("orders").partitions == 2


@pytest.mark.parametrize("expires", ["now() + interval '2 years'", "now() - interval '2 years'", "'infinity'", "NULL"])
def test_a_worker_makes_no_archive_beyond_the_longest_retention(login: Login, expires: str) -> None:
    with psycopg.connect(login("worker"), autocommit=True) as session, pytest.raises(psycopg.DataError):
        session.execute(f"SELECT eventsql.make_queue_archive({expires})".encode())


@pytest.mark.parametrize("arguments", ["'orders', 'mailer'", "'payments', 'mailer'", "NULL, NULL", "'x''y', ''"])
def test_a_consumer_that_waits_for_no_layout_is_left_as_it_is(owner: EventSQL, login: Login, arguments: str) -> None:
    before = owner.registry.consumers()
    with psycopg.connect(login("consumer_orders")) as session:
        entered = session.execute(sql.SQL("SELECT eventsql.enter_layout(" + arguments + ")")).fetchone()
        assert entered == (False,)
        locks = session.execute("SELECT FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE").fetchall()
        assert locks == []
        with owner.database.connection() as connection:
            free = connection.execute(
                "SELECT eql_partition FROM eventsql.consumer WHERE eql_topic = 'payments' FOR UPDATE SKIP LOCKED"
            ).fetchall()
    assert len(free) == 2
    assert owner.registry.consumers() == before


HOSTILE: Final = """
CREATE SCHEMA hostile;
GRANT ALL ON SCHEMA hostile TO PUBLIC;
CREATE FUNCTION hostile.lower(text) RETURNS text LANGUAGE sql AS $$ SELECT hostile.seen('lower') $$;
CREATE FUNCTION hostile.format(text, VARIADIC text[]) RETURNS text LANGUAGE sql AS $$ SELECT hostile.seen('format') $$;
CREATE FUNCTION hostile.has_column_privilege(oid, text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION hostile.less(smallint, integer) RETURNS boolean LANGUAGE sql AS 'SELECT false';
CREATE FUNCTION hostile.anything(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE OPERATOR hostile.< (LEFTARG = smallint, RIGHTARG = integer, FUNCTION = hostile.less);
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.anything);
"""


def test_a_hostile_search_path_changes_nothing(owner: EventSQL, login: Login) -> None:
    with owner.database.connection() as connection:
        connection.execute(
            "CREATE TABLE public.escalated AS SELECT current_user::text AS by WHERE false; "
            "GRANT ALL ON public.escalated TO PUBLIC"
        )
        connection.execute(
            sql.SQL(
                HOSTILE.replace(
                    "CREATE FUNCTION hostile.lower",
                    "CREATE FUNCTION hostile.seen(text) RETURNS text LANGUAGE sql AS "
                    "'INSERT INTO public.escalated SELECT current_user; SELECT $1';"
                    "CREATE FUNCTION hostile.lower",
                    1,
                )
            )
        )
    for role in ("publisher_orders", "consumer_orders", "transfer"):
        with psycopg.connect(login(role), autocommit=True) as session:
            session.execute("SET search_path TO hostile, pg_temp, pg_catalog, public")
            for statement in (
                "SELECT eventsql.ensure_segments('orders', 5000000, 2)",
                "SELECT eventsql.enter_layout('orders', 'mailer')",
                "SELECT eventsql.hold_topics('{orders}')",
                _BUFFER + "('payments', 0, 'x', '{}')",
                _BUFFER + "('orders', -2, 'x', '{}')",
            ):
                try:
                    session.execute(sql.SQL(statement))
                except psycopg.errors.InsufficientPrivilege:
                    continue
    with owner.database.connection() as connection:
        escalated = connection.execute("SELECT by FROM public.escalated").fetchall()
        published = connection.execute("SELECT eql_topic, eql_partition FROM eventsql.event_buffer").fetchall()
    assert (escalated, published) == ([], [])


def test_functions_with_the_admins_rights_have_a_fixed_path_and_are_not_for_public(owner: EventSQL) -> None:
    with owner.database.connection() as connection:
        found = connection.execute(
            "SELECT proname, 'search_path=pg_catalog, pg_temp' = ANY (proconfig), EXISTS ("
            "SELECT FROM aclexplode(coalesce(proacl, acldefault('f', proowner))) WHERE grantee = 0) "
            "FROM pg_proc WHERE prosecdef AND pronamespace = 'eventsql'::regnamespace"
        ).fetchall()
    assert {(fixed, of_public) for _, fixed, of_public in found} == {(True, False)}
    assert {name for name, _, _ in found} == {
        "hold_topics", "put_messages", "enter_layout", "ensure_segments", "make_queue_archive",
        "make_view_periods", "capture_changes", "forget_captures",
    }  # fmt: skip


def test_a_refusal_names_the_role_the_object_and_the_grant(as_: As, prefix: str) -> None:
    cases: list[tuple[str, str, str, Callable[[EventSQL], object]]] = [
        ("reader", "event_buffer", "publisher", lambda p: p.publisher.publish(Publication("orders", b"v"))),
        ("publisher_orders", "payments", "publisher", lambda p: p.publisher.publish(Publication("payments", b"v"))),
        ("publisher", "event_buffer_eql_id_seq", "transfer", lambda p: p.transfer.run_once()),
        ("publisher", stored("orders"), "reader", lambda p: list(p.reader.read("orders", after=0, limit=1))),
        ("reader", "topic", "admin", lambda p: p.registry.register_topic(Topic("mine"))),
        ("consumer", "event_buffer_lock", "admin", lambda p: p.registry.unregister_topic("orders", force=True)),
        ("publisher", "consumer", "consumer", lambda p: p.claims.claim("orders", "mailer", 0, owner="run")),
        ("reader", "consumer", "consumer", lambda p: p.claims.claim("orders", "mailer", 0, owner="run")),
    ]
    for number, (role, refused, needed, act) in enumerate(cases):
        with pytest.raises(PermissionDeniedError) as raised:
            act(as_(role))
        assert raised.value.role == f"{prefix}_login_{number}"
        assert raised.value.object == refused, str(raised.value)
        assert f"GRANT {prefix}_{needed} TO" in str(raised.value)


@pytest.mark.parametrize("act", ["claim", "start", "lag"])
def test_a_consumer_of_another_topic_is_refused_by_name(as_: As, prefix: str, act: str) -> None:
    platform = as_("consumer_orders")

    def handle(_event: Event, _connection: Connection) -> None: ...

    with pytest.raises(EventSQLError) as raised:
        if act == "claim":
            platform.claims.claim("payments", "mailer", 0, owner="run")
        elif act == "start":
            platform.consumers.start("payments", "mailer", handle)
        else:
            platform.registry.consumer("payments", "mailer")
    assert isinstance(raised.value, PermissionDeniedError)
    assert raised.value.object == stored("payments")
    assert prefix in str(raised.value)
    with pytest.raises(ConsumerNotFoundError):
        platform.registry.consumer("orders", "nobody")


@pytest.mark.parametrize(
    "said", ["keine Berechtigung für Tabelle orders_event", "droit refusé pour la table « orders_event »"]
)
def test_a_refusal_in_another_language_does_not_call_for_the_admins_rights(said: str) -> None:
    advice = str(grants.permission_error(said, "here", "app", "shop"))
    assert "GRANT shop_admin TO" not in advice
    assert '`GRANT shop_reader TO "app"`' in advice
    assert all(kind in advice for kind in grants.KINDS)


WORK_OF_THE_ADMIN: Final[dict[str, Callable[[EventSQL], object]]] = {
    "a new topic": lambda p: p.registry.register_topic(Topic("refunds")),
    "another definition of a topic": lambda p: p.registry.register_topic(Topic("orders", 3)),
    "a deletion": lambda p: p.registry.unregister_topic("orders", force=True),
    "a retention": lambda p: p.registry.set_retention("orders", Retention(events=1)),
    "another form": lambda p: p.registry.set_storage("orders", ROWS if in_blocks() else BLOCKS),
    "another compression": lambda p: p.registry.set_compression("orders", "pglz"),
    "other partitions": lambda p: p.repartitioner.repartition("orders", 5),
    "a new consumer": lambda p: p.registry.register_consumer(Consumer("orders", "printer")),
    "a deleted consumer": lambda p: p.registry.unregister_consumer("orders", "mailer"),
    "a pause": lambda p: p.registry.pause("orders", "mailer"),
    "redriven letters": lambda p: p.dead_letters.redrive("orders"),
    "dismissed letters": lambda p: p.dead_letters.dismiss("orders"),
}
if in_blocks():
    WORK_OF_THE_ADMIN["a compaction"] = lambda p: p.compactor.execute("orders")


@pytest.mark.parametrize("role", ["reader", "publisher", "consumer", "transfer"])
@pytest.mark.parametrize("work", WORK_OF_THE_ADMIN)
def test_a_refusal_of_the_admins_work_names_the_admin_alone(as_: As, prefix: str, role: str, work: str) -> None:
    platform = as_(role)
    with pytest.raises(PermissionDeniedError) as raised:
        WORK_OF_THE_ADMIN[work](platform)
    assert re.findall(r"GRANT (\w+) TO", str(raised.value)) == [f"{prefix}_admin"]


@pytest.mark.parametrize("role", ["reader", "publisher", "consumer", "transfer"])
def test_a_retention_that_may_not_drop_events_names_the_admin_alone(
    owner: EventSQL, as_: As, prefix: str, role: str
) -> None:
    owner.registry.set_retention("orders", Retention(events=1))
    with pytest.raises(PermissionDeniedError) as raised:
        as_(role).retention.run_once(["orders"])
    assert re.findall(r"GRANT (\w+) TO", str(raised.value)) == [f"{prefix}_admin"]


def test_a_refusal_names_no_role_whose_rights_on_the_object_the_login_has(as_: As, prefix: str) -> None:
    with pytest.raises(PermissionDeniedError) as raised:
        as_("sender").dead_letters.list("orders")
    assert f"`GRANT {prefix}_sender TO" not in str(raised.value)
    assert f"`GRANT {prefix}_reader TO" in str(raised.value)
    advice = str(grants.permission_error("permission denied for table topic", "here", "app", "shop", {"publisher"}))
    assert re.findall(r"GRANT (\w+) TO", advice) == ["shop_admin"]


def test_a_refusal_to_publish_names_no_role_that_may_not_exist() -> None:
    refusal = str(grants.permission_error("permission denied for topic zone_fares", "here", "app", "shop"))
    assert re.findall(r"GRANT (\S+) TO", refusal) == ["shop_publisher", "shop_admin"]
    assert "`eventsql roles create --prefix shop --topic zone_fares`" in refusal


@pytest.mark.parametrize("view", ["view_event", "view_event_count", "view_moves"])
def test_a_refused_view_is_not_taken_for_the_log_of_a_topic(view: str) -> None:
    advice = str(grants.permission_error(f"permission denied for table {view}", "here", "app", "shop"))
    assert re.findall(r"GRANT (\w+) TO", advice) == ["shop_admin"]


def test_a_role_without_any_right_learns_which_it_lacks(as_: As, prefix: str) -> None:
    with pytest.raises(PermissionDeniedError) as raised:
        as_().open()
    assert raised.value.role == f"{prefix}_login_0"
    assert f"`GRANT {prefix}_reader TO" in str(raised.value)
    assert all(kind in str(raised.value) for kind in grants.KINDS)


def test_a_transfer_from_which_row_security_hides_a_topic_says_so(owner: EventSQL, as_: As) -> None:
    owner.publisher.publish(Publication("orders", b"v"))
    with owner.database.connection() as connection:
        connection.execute("ALTER TABLE eventsql.topic ENABLE ROW LEVEL SECURITY")
    with pytest.raises(PermissionDeniedError):
        as_("transfer").transfer.run_once()
    assert owner.transfer.run_once() == {"orders": 1}
