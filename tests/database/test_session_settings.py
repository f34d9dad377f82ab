"""Settings of sessions by a database, a URL or the environment change nothing that the platform stores or returns."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.consuming.snapshot_reader import SnapshotReader
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.translation import translate
from eventsql_orchestration.database.urls import parse_dsn
from eventsql_orchestration.errors import (
    ConfigurationError,
    EventSQLError,
    SchemaOutdatedError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.queue import NewMessage, Queue
from eventsql_orchestration.store import Change, Store
from eventsql_orchestration.views import Timeline, Views
from tests.database import everything

ODD = {
    "quote_all_identifiers": "on",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "standard_conforming_strings": "off",
    "escape_string_warning": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "client_encoding": "LATIN1",
    "row_security": "off",
}
"""Settings that a database may have for its sessions."""


def setting(dsn: str, **settings: str) -> None:
    with psycopg.connect(dsn, autocommit=True, client_encoding="UTF8") as connection:
        for name, value in settings.items():
            connection.execute(
                sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                    sql.Identifier(connection.info.dbname), sql.Identifier(name), sql.Literal(value)
                )
            )


@pytest.fixture
def encoded(server: EmbeddedPostgres) -> Iterator[Callable[[str], str]]:
    """Makes empty databases of other encodings."""
    names: list[str] = []

    def create(encoding: str) -> str:
        running, name = server.start(), f"encoded_{uuid.uuid4().hex}"
        with psycopg.connect(running.dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} ENCODING {} LOCALE 'C' TEMPLATE template0").format(
                    sql.Identifier(name), sql.Literal(encoding)
                )
            )
        names.append(name)
        return running.dsn_for(name)

    yield create
    for name in names:
        server.drop_database(name)


@pytest.mark.both_forms
def test_every_part_of_the_platform_works_in_a_database_with_odd_settings(direct_dsn: str) -> None:
    setting(direct_dsn, **ODD)
    with EventSQL(direct_dsn, transfer=False) as platform:
        everything.use(platform, direct_dsn)


@pytest.mark.parametrize("name", sorted(ODD))
def test_one_odd_setting_changes_nothing(dsn: str, direct_dsn: str, name: str) -> None:
    setting(direct_dsn, **{name: ODD[name]})
    with EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 2)).register_topic(Topic("orders", 2))
        everything.register(platform)
        everything.publish(platform, direct_dsn)


def test_a_captured_table_that_is_gone_is_forgotten_by_its_name_although_the_database_quotes_all_names(
    direct_dsn: str,
) -> None:
    setting(direct_dsn, quote_all_identifiers="on")
    with EventSQL(direct_dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("changes"))
        with psycopg.connect(direct_dsn) as mine:
            mine.execute("CREATE TABLE public.orders (id integer PRIMARY KEY)")
        assert platform.capture("public.orders", "changes").table == "public.orders"
        with psycopg.connect(direct_dsn) as mine:
            mine.execute("DROP TABLE public.orders")
        platform.captures.drop("public.orders", "changes")
        assert platform.captures.list() == []


class OnStandby(psycopg.Cursor[Any]):
    """A cursor as on a standby, which takes no statement at the level SERIALIZABLE."""

    def execute(self, *arguments: Any, **options: Any) -> OnStandby:
        if super().execute("SHOW transaction_isolation").fetchone() == ("serializable",):
            raise psycopg.errors.FeatureNotSupported("cannot use serializable mode in a hot standby")
        return super().execute(*arguments, **options)


def test_a_standby_is_read_whatever_level_its_transactions_begin_at(
    direct_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting(direct_dsn, default_transaction_isolation="serializable")
    monkeypatch.setattr(psycopg, "connect", functools.partial(psycopg.connect, cursor_factory=OnStandby))
    with Database(direct_dsn) as database, database.connection() as connection, database.dedicated() as alone:
        for each in (connection, alone):
            assert each.autocommit
            assert each.execute("SHOW default_transaction_isolation").fetchone() == ("read committed",)


@pytest.fixture
def notes(session: Connection) -> None:
    session.execute(
        "CREATE TABLE eventsql.notes (eql_transaction xid8 DEFAULT pg_current_xact_id(), eql_id bigint, "
        "at timestamptz, took interval)"
    )
    session.execute("INSERT INTO eventsql.notes VALUES (DEFAULT, 1, %s, %s)", [everything.NOON, everything.DAY])


@pytest.mark.parametrize("autocommit", [True, False])
def test_the_settings_of_a_callers_session_change_nothing_and_stay(
    platform: EventSQL, direct_dsn: str, notes: None, autocommit: bool
) -> None:
    database, moves = platform.database, Timeline("moves", retention=timedelta(days=100_000))
    queue, store, views, reader = (
        Queue(database, "jobs"), Store(database), Views(database), SnapshotReader(database, "notes", ["at"]),
    )  # fmt: skip
    views.declare(moves)
    with psycopg.connect(direct_dsn, autocommit=True, client_encoding="UTF8") as mine:
        for name in ODD.keys() - {"client_encoding", "default_transaction_isolation"}:
            mine.execute(sql.SQL("SET {} TO {}").format(sql.Identifier(name), sql.Literal(ODD[name])))
        set_before = changed_settings(mine)
        mine.autocommit = autocommit

        assert reader.read(connection=mine)[0].values == (everything.NOON,)
        assert views.timeline(moves).append(mine, [("1", {}, everything.NOON)]) == 1
        changes = [Change("placed", {"é\\": 1}, id=uuid.uuid4()), Change("paid", {})]
        assert store.append("order", "1", changes, expected_version=0, connection=mine) == 2
        assert [each.kind for each in store.load("order", "1", connection=mine)] == ["placed", "paid"]
        queue.send_all([NewMessage(b"\\"), NewMessage(b"1", due=everything.NOON)], connection=mine)
        mine.commit()
        queue.acknowledge_all(queue.receive(max_messages=2), connection=mine)
        mine.commit()
        assert changed_settings(mine) == set_before
    assert len(store.read_all()) == 2
    assert queue.statistics().visible == 0


def changed_settings(session: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return session.execute("SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name").fetchall()


def patience(connection: Connection) -> tuple[list[str], list[int]]:
    """How long the server and the client wait for the machine of the other: seconds until the first probe, seconds
    between two probes, their number; and of the client, milliseconds until the server has confirmed what was sent.
    """
    of_server = [
        fetch_one(connection, sql.SQL("SHOW {}").format(sql.Identifier(f"tcp_keepalives_{name}")))[0]
        for name in ("idle", "interval", "count")
    ]
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        return of_server, [wire.getsockopt(socket.IPPROTO_TCP, option) for option in options]


def test_each_side_finds_out_within_half_a_minute_that_the_machine_of_the_other_is_gone(direct_dsn: str) -> None:
    with Database(direct_dsn) as database, database.connection() as pooled, closing(database.dedicated()) as alone:
        assert patience(pooled) == patience(alone) == (["15", "5", "3"], [15, 5, 3, 30_000])


def test_limits_of_silence_of_the_url_and_shorter_ones_of_the_database_stay(direct_dsn: str) -> None:
    setting(direct_dsn, tcp_keepalives_idle="7")
    url = f"{direct_dsn}?keepalives_idle=60&tcp_user_timeout=90000"
    with Database(url) as database, database.connection() as connection:
        assert patience(connection) == (["7", "5", "3"], [60, 5, 3, 90_000])


def test_intervals_are_read_in_any_style_of_the_database(dsn: str, direct_dsn: str, notes: None) -> None:
    setting(direct_dsn, IntervalStyle="iso_8601")
    with Database(dsn) as database:
        assert SnapshotReader(database, "notes", ["took"]).read()[0].values == (everything.DAY,)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Relation »eventsql.orders_event« existiert nicht", TopicNotFoundError),
        ("la relation « eventsql.orders_event » n'existe pas", TopicNotFoundError),
        ("Relation »eventsql.topic« existiert nicht", SchemaOutdatedError),
    ],
)
def test_a_missing_table_is_known_in_any_language_of_the_server(said: str, kind: type[EventSQLError]) -> None:
    assert type(translate(psycopg.errors.UndefinedTable(said), "here", "eventsql")) is kind


def test_a_missing_table_of_the_callers_own_is_not_one_of_the_platform() -> None:
    assert translate(psycopg.errors.UndefinedTable('relation "accounts" does not exist'), "here", "eventsql") is None


# Encodings


def keys(platform: EventSQL) -> list[str | None]:
    platform.transfer.run_once()
    return [event.key for event in platform.reader.read("orders")]


def fill(platform: EventSQL) -> None:
    """One event by each way into the log."""
    event = Publication("orders", b"1", key="é", metadata={"é": "鍵"})
    platform.registry.register_topic(Topic("orders", 2))
    platform.publisher.publish(event)
    platform.publisher.publish_all([event])
    with platform.database.transaction() as connection:
        platform.publisher.publish_all([event], connection=connection)
    platform.transfer.run_once()
    platform.publisher.publish_all([event])
    assert keys(platform) == ["é"] * 4
    assert [event.metadata for event in platform.reader.read("orders")] == [{"é": "鍵"}] * 4


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "WIN1251"])
def test_the_environments_encoding_is_not_that_of_events(
    dsn: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    with EventSQL(dsn, transfer=False) as platform:
        fill(platform)


@pytest.mark.parametrize("option", ["client_encoding=LATIN1", "options=-cclient_encoding%3DLATIN1"])
def test_the_urls_encoding_is_not_that_of_events(direct_dsn: str, option: str) -> None:
    with EventSQL(f"{direct_dsn}?{option}", transfer=False) as platform:
        fill(platform)


def test_each_connection_reads_and_writes_utf8(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with Database(dsn) as database, database.dedicated() as alone, database.core() as core:
        assert alone.info.encoding == "utf-8"
        assert core.connection.driver_connection.info.encoding == "utf-8"  # type: ignore[union-attr]
        with psycopg.connect(database.dsn) as told:
            assert told.info.encoding == "utf-8"


def test_a_handler_that_sets_another_encoding_sets_it_for_itself_alone(dsn: str) -> None:
    with Database(dsn, pool_size=1, max_overflow=0) as database:
        with database.connection() as connection:
            connection.execute("SET client_encoding TO LATIN1")
        with database.connection() as connection:
            assert connection.info.encoding == "utf-8"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_callers_connection_of_another_encoding_is_refused(dsn: str, encoding: str) -> None:
    with EventSQL(dsn, transfer=False) as platform, psycopg.connect(dsn, client_encoding=encoding) as mine:
        platform.registry.register_topic(Topic("orders", 2))
        event = Publication("orders", b"1", key="é")
        with pytest.raises(ValidationError, match=f"client_encoding {encoding}"):
            platform.publisher.publish_all([event], connection=mine)
        mine.execute("SET client_encoding TO 'UTF8'")
        platform.publisher.publish_all([event], connection=mine)
        mine.commit()
        assert keys(platform) == ["é"]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
def test_a_database_that_cannot_hold_every_text_is_not_migrated(encoded: Callable[[str], str], encoding: str) -> None:
    dsn = encoded(encoding)
    with Database(dsn) as database:
        for attempt in (database.migrate, database.ensure_schema, database.dedicated, database.revision):
            with pytest.raises(ConfigurationError, match=f"{encoding}.*ENCODING 'UTF8' TEMPLATE template0"):
                attempt()
    with psycopg.connect(dsn, client_encoding="UTF8") as connection:
        found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'eventsql'")
        assert found.fetchone() is None


def test_a_schema_that_is_in_such_a_database_already_is_refused_at_first_use(
    encoded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = encoded("SQL_ASCII")
    with monkeypatch.context() as before:
        before.setattr("eventsql_orchestration.database.sessions.ENCODING", "SQL_ASCII")
        with EventSQL(dsn, transfer=False) as platform:
            platform.registry.register_topic(Topic("orders"))
    with EventSQL(dsn, transfer=False, migrate=False) as platform, pytest.raises(ConfigurationError, match="SQL_ASCII"):
        platform.publisher.publish(Publication("orders", b"1", key="é"))


def test_the_encoding_is_a_part_of_the_url() -> None:
    url = parse_dsn("postgresql://u@h/d?client_encoding=LATIN1&connect_timeout=3")
    assert dict(url.query) == {"connect_timeout": "3", "client_encoding": "UTF8"}
