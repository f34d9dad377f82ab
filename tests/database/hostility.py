"""Makes a database where names without a schema lead to objects of another role, and each of these objects fails."""

from __future__ import annotations

import psycopg

from eventsql_orchestration.database.tables import NAMES

_PLANT = """
DO $plant$
DECLARE
    statement text;
    failing text := $$ LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''captured''; END' $$;
BEGIN
    CREATE FUNCTION public.eql_captured() RETURNS boolean LANGUAGE plpgsql
        AS 'BEGIN RAISE EXCEPTION ''captured''; END';
    FOR statement IN
        SELECT format('CREATE FUNCTION public.%I(%s) RETURNS %s %s', proname, pg_get_function_arguments(oid),
                      pg_get_function_result(oid), failing)
        FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f' AND prorettype <> 'trigger'::regtype
    UNION ALL
        SELECT format(
            'CREATE FUNCTION public.eql_state_%s(bigint%s) RETURNS bigint %s;'
            'CREATE AGGREGATE public.%I(%s) (SFUNC = public.eql_state_%s, STYPE = bigint)',
            oid, arguments, failing, proname, coalesce(nullif(substr(arguments, 3), ''), '*'), oid
        )
        FROM (
            SELECT oid, proname, coalesce(
                ', ' || nullif(replace(oidvectortypes(proargtypes), '"any"', 'anyelement'), ''), ''
            ) AS arguments
            FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'a'
        ) aggregates
    UNION ALL
        SELECT format(
            'CREATE FUNCTION public.eql_operator_%s(%s) RETURNS %s %s;'
            'CREATE OPERATOR public.%s (FUNCTION = public.eql_operator_%s, %s)',
            o.oid, concat_ws(', ', nullif(oprleft, 0)::regtype, oprright::regtype), oprresult::regtype, failing,
            oprname, o.oid,
            concat_ws(', ', 'LEFTARG = ' || nullif(oprleft, 0)::regtype, 'RIGHTARG = ' || oprright::regtype)
        )
        FROM pg_operator o WHERE oprnamespace = 'pg_catalog'::regnamespace
    UNION ALL
        SELECT format('CREATE DOMAIN public.%I AS pg_catalog.%1$I CHECK (public.eql_captured())', typname)
        FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b' AND typelem = 0
    UNION ALL
        SELECT format('CREATE VIEW public.%I AS SELECT * FROM pg_catalog.%1$I WHERE public.eql_captured()', relname)
        FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
    LOOP
        BEGIN
            EXECUTE statement;
        EXCEPTION WHEN OTHERS THEN
            -- Of a pseudo-type that no such function may have.
            NULL;
        END;
    END LOOP;
    CREATE COLLATION public."C" (PROVIDER = libc, LOCALE = 'C');
END
$plant$
"""


def make_hostile(dsn: str) -> None:
    """Let every session of the database find the hostile objects of `public` first, the system's names after them."""
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=pg_catalog") as connection:
        connection.execute(_PLANT)
        for table in NAMES:
            connection.execute(f'CREATE TABLE public."{table}" (captured integer)'.encode())
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET search_path = public, pg_catalog'.encode())
