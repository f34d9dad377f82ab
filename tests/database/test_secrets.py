"""No text that anybody can see repeats a secret of a database URL, wherever in the URL it stands."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from urllib.parse import quote

import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import main
from eventsql_orchestration.dagster import EventSQLResource
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.urls import (
    connect_arguments,
    parse_dsn,
    split_direct,
    with_password_of_environment,
)
from eventsql_orchestration.errors import ConfigurationError, EventSQLError
from eventsql_orchestration.settings import Settings
from eventsql_orchestration.spark.adbc import CopyConnection
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import WriteTarget, stage

SIGN = "s3cretS3CRET"
"""A part of each secret, which nothing else says."""

OPTIONS = sorted({each.keyword.decode() for each in pq.Conninfo.get_defaults()} - {"host", "user", "dbname"})
"""The options of a URL, those excepted that name a place by a plain name."""

RAW = (
    "postgresql://u:{raw}@127.0.0.1:1/db",
    "postgresql://u:p@127.0.0.1:1/db?connect_timeout={raw}",
    "postgresql://u:1/{raw}@127.0.0.1:1/db",
    "postgresql://u:1?{raw}@127.0.0.1:1/db",
    "postgresql://u:p@127.0.0.1:{raw}/db",
    "postgresql://u:p@127.0.0.1:1/db?{raw}",
    "postgresql://u:p@127.0.0.1:1/db?{raw}=1",
    "postgresql://u:p@127.0.0.1:1/db?direct=u:{raw}@h",
    "postgresql://u:p@127.0.0.1:1/db?direct=u:12/{raw}@h",
    "postgresql://u:p@127.0.0.1:1/db?host=u:{raw}@h",
    "postgresql://u:{raw}@127.0.0.1:1,127.0.0.1:2/db",
    "postgresql://u:p@127.0.0.1:1/db postgresql+x://u:{raw}@h/db",
    "mysql://u:{raw}@127.0.0.1:1/db",
    "host=127.0.0.1 port=1 user=u password={raw}",
    "host=127.0.0.1 port=1 user=u password='{raw}' dbname=db",
)

QUOTED = (
    "postgresql://u:{quoted}@127.0.0.1:1/db",
    "postgresql://:{quoted}@127.0.0.1:1/db",
    "postgresql://u%3A{quoted}@127.0.0.1:1/db",
    "postgresql://u:p@127.0.0.1:1/password%3D{quoted}",
    "postgresql://u:{quoted}@127.0.0.1,localhost:1/db",
    "postgresql://u:p@127.0.0.1:1/db?options=-c%20{quoted}",
    "postgresql://u:p@127.0.0.1:1/db?options=-cx.y%3D{quoted}",
    "postgresql://u:p@127.0.0.1:1/db?host=127.0.0.1&password={quoted}&password={quoted}",
    *(f"postgresql://u:p@127.0.0.1:1/db?{option}={{quoted}}" for option in OPTIONS),
)

SECRETS = st.builds(
    lambda before, after: f"{before}{SIGN}{after}",
    st.text(alphabet="ab1 @:/%?#&=+'\"\\,[]-é", max_size=4),
    st.text(alphabet="ab1 @:/%?#&=+'\"\\,[]-é", max_size=4),
)


def url_of(form: str, secret: str) -> str:
    return form.format(raw=secret, quoted=quote(secret, safe=""))


class _Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(logging.Formatter().format(record))


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    handler, root = _Collected(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.texts
    finally:
        root.removeHandler(handler)


def said_by(use: Callable[[], object]) -> str:
    """The text that a use shows: its result, or the error with its causes."""
    try:
        return repr(use())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
        return "".join(traceback.format_exception(error)) + repr(error) + str(error)


def uses_of(url: str) -> list[Callable[[], object]]:
    def database() -> object:
        with Database(url) as opened:
            shown = f"{opened} {opened!r} {opened.engine!r} {opened.engine.url!r}"
            for use in (opened.ensure_schema, opened.migrate, opened.dedicated):
                shown += said_by(use)
            return shown

    def platform() -> object:
        with EventSQL(url, transfer=False) as opened:
            return f"{opened!r} {said_by(opened.registry.topics)}"

    def tasks() -> object:
        source = Source.of([url], "eventsql")
        return (
            repr(source)
            + said_by(lambda: CopyConnection(source.dsn))
            + said_by(
                lambda: stage([WriteTarget(source, None)], ())  # type: ignore[arg-type]  # nothing is encoded
            )
        )

    def resource() -> object:
        made = EventSQLResource(dsn=url)
        return f"{made!r} {made} {made.platform!r}"

    def program() -> object:
        wrong = (["--debug", "--dsn", url, "lag"], ["lag", url])
        return [CliRunner().invoke(main, arguments).output for arguments in wrong]

    def wrong_settings() -> object:
        return Settings(dsn=[url, 7])  # type: ignore[arg-type]  # that is the mistake

    return [database, platform, tasks, resource, program, lambda: Settings.load(dsn=url), wrong_settings]


def assert_nothing_tells(url: str) -> None:
    with logged() as texts:
        shown = [said_by(use) for use in uses_of(url)]
    for text in (*shown, *texts):
        assert SIGN not in text, url


@pytest.mark.parametrize("form", [*RAW, *QUOTED])
def test_no_place_of_a_url_tells_a_secret(form: str) -> None:
    assert_nothing_tells(url_of(form, SIGN))


@example("postgresql://u:{raw}@127.0.0.1:1/db", f"@{SIGN}?")
@example("postgresql://u:p@127.0.0.1:1/db?require_auth={quoted}", f'1"{SIGN},')
@given(st.sampled_from((*RAW, *QUOTED)), SECRETS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_characters_of_a_secret_make_a_place_tell_it(form: str, secret: str) -> None:
    assert_nothing_tells(url_of(form, secret))


@pytest.mark.parametrize(
    "options",
    [
        "options=-c%20{}", "options=-c{}%3D1", "options=-cwork_mem%3D{}", "options={}",
        "replication={}", "password={}", "require_auth={}", "service={}", "sslrootcert={}&sslmode=verify-full",
    ],
)  # fmt: skip
def test_no_answer_of_a_server_tells_a_secret(direct_dsn: str, options: str) -> None:
    assert_nothing_tells(f"{direct_dsn}?{options.format(SIGN)}")


def test_a_database_that_refuses_the_password_tells_it_nobody(direct_dsn: str) -> None:
    known = conninfo_to_dict(direct_dsn)
    url = f"postgresql://eventsql:{SIGN}@127.0.0.1:{known['port']}/{known['dbname']}"
    assert_nothing_tells(url)
    with (
        Database(url) as database,
        pytest.raises(EventSQLError, match='password authentication failed for user "eventsql"'),
    ):
        database.ensure_schema()


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("connect_timeout=soon", "connect_timeout"),
        ("sslmode=strict", "verify-full"),
        ("port=many", "port"),
        ("sslmod=require", "is sslmode meant"),
        ("sslmode=require&sslmode=disable", "more than once"),
        ("host=one&host=two", "with commas"),
        ("direct=a:b:c", "host:port"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_connects_and_the_error_says_what_to_give(
    option: str, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Database(f"postgresql://u@127.0.0.1:1/db?{option}")


def test_a_name_of_a_place_is_shown_though_the_password_is_the_same() -> None:
    with Database("postgresql://app:app@127.0.0.1:1/app") as database:
        assert str(database) == "postgresql://app:***@127.0.0.1:1/app"


@pytest.mark.parametrize("secret", ["p w", "p+w", "p@:/%?#&=w", "'\"\\", "%41"])
def test_a_password_among_the_options_is_the_one_that_is_used(direct_dsn: str, secret: str) -> None:
    known = conninfo_to_dict(direct_dsn)
    with psycopg.connect(direct_dsn, autocommit=True) as connection:
        connection.execute(
            psycopg.sql.SQL("CREATE ROLE hidden SUPERUSER LOGIN PASSWORD {}").format(psycopg.sql.Literal(secret))
        )
        try:
            place = f"127.0.0.1:{known['port']}/{known['dbname']}"
            quoted = quote(secret, safe="")
            for url in (
                f"postgresql://hidden@{place}?password={quoted}",
                f"postgresql://{place}?user=hidden&password={quoted}",
            ):
                with Database(url) as database:
                    database.ensure_schema()
                    database.dedicated().close()
                    psycopg.connect(database.dsn).close()
        finally:
            connection.execute("DROP ROLE hidden")


def test_options_with_spaces_are_those_that_libpq_reads(direct_dsn: str) -> None:
    database = Database(f"{direct_dsn}?options=-cwork_mem%3D77MB%20-cstatement_timeout%3D7s")
    with psycopg.connect(database.dsn) as connection:
        assert connection.execute("SHOW work_mem").fetchone() == ("77MB",)
        assert connection.execute("SHOW statement_timeout").fetchone() == ("7s",)


def test_a_url_of_several_hosts_shows_them_all_and_no_password() -> None:
    assert str(Database(f"postgresql://u:{SIGN}@a,b:1/db")) == "postgresql://u:***@a,b:1/db"
    assert parse_dsn("postgresql://[::1]:1/db").host == "::1"


@pytest.mark.parametrize("text", ["postgresql://h/db\n", "\npostgresql://h/db "])
def test_white_space_around_a_url_is_no_part_of_it(text: str) -> None:
    assert parse_dsn(text) == parse_dsn(text.strip())


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("postgresql://u@%2Frun%2Fpostgresql:5433/db", "/run/postgresql", "5433"),
        ("postgresql://u@/db?host=one,two&port=5433", "one,two", "5433"),
        ("postgresql://u@one,two:5433/db", "one,two", ",5433"),
        ("postgresql://u@[fe80::1%25eth0]:5433/db", "fe80::1%eth0", "5433"),
        ("postgresql://u@pooler/db?hostaddr=10.0.0.1&direct=[::1]:5433", "::1", "5433"),
    ],
)
def test_connections_lead_where_libpq_reads_that_a_url_leads(url: str, host: str, port: str) -> None:
    _, past_pooler = split_direct(parse_dsn(url))
    arguments = connect_arguments(past_pooler)
    assert arguments == {
        "user": "u", "dbname": "db", "host": host, "port": port, "client_encoding": "UTF8",
    }  # fmt: skip
    Database(url).close()


def test_the_directory_of_a_socket_is_shown() -> None:
    assert str(Database(f"postgresql://u:{SIGN}@%2Frun/db")) == "postgresql://u:***@%2Frun/db"


def test_a_url_that_libpq_cannot_read_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Database(f"postgresql://u@{SIGN}%zz/db")
    assert SIGN not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("postgresql://who@db.example.com/app", "of the environment"),
        ("postgresql://who:own@db.example.com/app", "own"),
        ("postgresql://who@db.example.com/app?password=own", "own"),
        # libpq takes the password of the service's file, which only the process with the file can read.
        ("postgresql:///?service=app", None),
    ],
)
def test_the_password_of_the_environment_stands_in_for_one_that_libpq_would_take_from_there(
    monkeypatch: pytest.MonkeyPatch, url: str, password: str | None
) -> None:
    monkeypatch.setenv("PGPASSWORD", "of the environment")
    assert parse_dsn(with_password_of_environment(url)).password == password
