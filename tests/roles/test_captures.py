"""A role that writes to a captured table needs no right on the platform, and gets none."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import main
from eventsql_orchestration.database import Connection, migrations
from eventsql_orchestration.errors import CaptureError, PermissionDeniedError

if TYPE_CHECKING:
    from tests.roles.conftest import As, Login


def buffered(owner: EventSQL) -> list[str]:
    with owner.database.connection() as connection:
        rows = connection.execute("SELECT convert_from(eql_value, 'UTF8') FROM eventsql.event_buffer ORDER BY eql_id")
        return [text for (text,) in rows]


@pytest.fixture
def table(owner: EventSQL, session: Connection, as_: As) -> str:
    """A table `purchase` of an admin, which the admin captures; any role may write to it."""
    admin = as_("admin")
    session.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    with admin.database.connection() as connection:
        connection.execute("CREATE TABLE public.purchase (id integer PRIMARY KEY, note text)")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON public.purchase TO PUBLIC")
    admin.capture("public.purchase", "orders")
    return "public.purchase"


def test_a_writer_without_rights_on_the_platform_is_captured(owner: EventSQL, table: str, login: Login) -> None:
    with psycopg.connect(login(), autocommit=True) as writer:
        writer.execute("INSERT INTO purchase VALUES (1, 'new')")
        writer.execute("UPDATE purchase SET note = 'paid'")
        writer.execute("DELETE FROM purchase")
        writer.execute("TRUNCATE purchase")
        assert len(buffered(owner)) == 5
        writer.execute("CREATE TABLE mine (id integer PRIMARY KEY)")
        for forged in (
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value) VALUES ('orders', 0, '')",
            "SELECT * FROM eventsql.capture",
            "SELECT eventsql.capture_page(1, 1, false)",
            """CREATE TRIGGER forged AFTER INSERT ON mine REFERENCING NEW TABLE AS new_rows
            FOR EACH STATEMENT EXECUTE FUNCTION eventsql.capture_changes('1', '1', 'orders')""",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                writer.execute(forged.encode())


HOSTILE = """
    CREATE TABLE public.proof (who text);
    GRANT INSERT ON public.proof TO PUBLIC;
    CREATE FUNCTION public.evil() RETURNS text LANGUAGE sql AS
        'INSERT INTO public.proof VALUES (current_user) RETURNING who';
    CREATE FUNCTION public.concat(text, text) RETURNS text LANGUAGE sql AS 'SELECT public.evil()';
    CREATE FUNCTION public.convert_to(text, text) RETURNS bytea LANGUAGE sql AS 'SELECT public.evil()::bytea';
    CREATE FUNCTION public.partition_of_key(text, integer) RETURNS smallint LANGUAGE sql AS 'SELECT 1::smallint';
    CREATE FUNCTION public.glue(text, text) RETURNS text LANGUAGE sql AS 'SELECT public.evil()';
    CREATE OPERATOR public.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = public.glue);
    CREATE TEMP TABLE event_buffer (eql_topic text);
    CREATE TEMP TABLE pg_attribute (attrelid oid);
    CREATE TEMP TABLE old_rows (id integer);
"""


def test_names_that_a_writer_puts_before_the_systems_are_not_found(owner: EventSQL, table: str, login: Login) -> None:
    with psycopg.connect(login(), autocommit=True) as writer:
        writer.execute(HOSTILE)
        writer.execute("SET search_path TO pg_temp, public, pg_catalog")
        writer.execute("SET session standard_conforming_strings TO off")
        writer.execute("INSERT INTO public.purchase VALUES (1, 'new')")
        writer.execute("UPDATE public.purchase SET note = 'paid', id = 2")
        assert writer.execute("SELECT count(*) FROM public.proof").fetchone() == (0,)
        assert writer.execute("SHOW search_path").fetchone() == ("pg_temp, public, pg_catalog",)
    assert len(buffered(owner)) == 3


def test_types_with_casts_of_their_own_run_nothing(owner: EventSQL, session: Connection, prefix: str) -> None:
    session.execute("CREATE TYPE public.mood AS ENUM ('fine')")
    session.execute("CREATE TYPE public.pair AS (a integer)")
    for kind in ("mood", "pair"):
        for target in ("text", "json"):
            session.execute(
                f"CREATE FUNCTION public.evil(public.{kind}) RETURNS {target} LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE 'a cast of the owner''s ran'; END $$".replace("evil", f"evil_{kind}_{target}").encode()
            )
            session.execute(
                f"CREATE CAST (public.{kind} AS {target}) WITH FUNCTION public.evil_{kind}_{target}(public.{kind}) "
                "AS IMPLICIT".encode()
            )
    session.execute("CREATE TABLE public.kinds (id integer PRIMARY KEY, m public.mood, p public.pair)")
    session.execute(sql.SQL("GRANT SELECT ON public.kinds TO {}").format(sql.Identifier(f"{prefix}_admin")))
    owner.capture("public.kinds", "orders")
    session.execute("INSERT INTO public.kinds VALUES (1, 'fine', ROW(1))")
    session.execute("UPDATE public.kinds SET m = NULL")
    session.execute("DROP TABLE public.kinds")
    assert len(buffered(owner)) == 2


def test_a_table_whose_owner_is_less_than_the_platforms_is_refused(
    owner: EventSQL, session: Connection, login: Login, prefix: str
) -> None:
    session.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    with psycopg.connect(login(), autocommit=True) as other:
        other.execute("CREATE TABLE public.theirs (id integer PRIMARY KEY)")
        with pytest.raises(CaptureError):
            owner.capture("public.theirs", "orders")
        session.execute(
            sql.SQL("GRANT {} TO {}").format(sql.Identifier(f"{prefix}_admin"), sql.Identifier(other.info.user))
        )
        other.execute(sql.SQL("GRANT SELECT ON public.theirs TO {}").format(sql.Identifier(f"{prefix}_admin")))
        owner.capture("public.theirs", "orders")
        other.execute("INSERT INTO public.theirs VALUES (1)")
        assert len(buffered(owner)) == 1
        # What the owner's index runs while a statement is planned would run as the platform's owner.
        session.execute(
            sql.SQL("REVOKE {} FROM {}").format(sql.Identifier(f"{prefix}_admin"), sql.Identifier(other.info.user))
        )
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            other.execute("INSERT INTO public.theirs VALUES (2)")
        (broken,) = owner.captures.list()
        assert broken.problem is not None
        assert broken.grants == f'GRANT "{prefix}_admin" TO "{other.info.user}"'
        found = CliRunner().invoke(main, ["--dsn", owner.database.dsn, "doctor", "--json"])
        remedies = [each["remedy"] for each in json.loads(found.stdout)["findings"] if each["check"] == "captures"]
        assert remedies == [broken.grants]
        other.execute("DROP TABLE public.theirs")


def test_a_role_that_only_publishes_makes_no_capture_and_a_reader_sees_them(
    owner: EventSQL, table: str, as_: As
) -> None:
    with pytest.raises(PermissionDeniedError):
        as_("publisher").capture(table, "orders", columns=["note"])
    assert [each.table for each in as_("reader").captures.list()] == [table]


@pytest.mark.parametrize("made", ["new", "before revision 0048"])
@pytest.mark.parametrize("kind", ["reader", "reader_orders"])
def test_a_reader_sees_no_key_of_a_captured_row(
    table: str, session: Connection, login: Login, as_: As, prefix: str, *, kind: str, made: str
) -> None:
    if made != "new":
        revision = importlib.import_module(f"{migrations.__name__}.versions.0048_captures_for_readers")
        session.execute(sql.SQL("GRANT SELECT ON eventsql.capture TO {}").format(sql.Identifier(f"{prefix}_{kind}")))
        session.execute(f"SET search_path TO eventsql; {revision._REVOKE}")
        as_("admin").database.migrate()
    with psycopg.connect(login(kind)) as reader, pytest.raises(psycopg.errors.InsufficientPrivilege):
        reader.execute("SELECT eql_snapshot_after FROM eventsql.capture")
    assert [each.table for each in as_(kind).captures.list()] == [table]
