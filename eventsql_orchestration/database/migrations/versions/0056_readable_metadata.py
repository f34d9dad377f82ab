"""Metadata of any JSON, which another program may write, hold up no consumer, no redrive and no erasure."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0056"
down_revision = "0055"

# JSON can name a NUL character and half of a character, which no text of PostgreSQL can hold: functions that take such
# JSON apart fail. An escaped backslash is written otherwise first: in JSON, `\\u0000` is a text without a NUL. The body
# is parsed here, so no session's settings change it, and the planner inlines it.
_READABLE = r"""
CREATE FUNCTION {schema}.readable_metadata(metadata json) RETURNS json LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN json_typeof(metadata) <> 'object' THEN '{}'::json
    WHEN strpos(metadata::text, E'\\u') = 0 THEN metadata
    ELSE regexp_replace(
        replace(metadata::text, E'\\\\', E'\\u005c'),
        E'\\\\u(?:0000|[dD][89abAB][0-9a-fA-F]{2}(?!\\\\u[dD][c-fC-F])'
            || E'|(?<!\\\\u[dD][89abAB][0-9a-fA-F]{2}\\\\u)[dD][c-fC-F][0-9a-fA-F]{2})',
        E'\\\\ufffd', 'g'
    )::json
END;
COMMENT ON FUNCTION {schema}.readable_metadata(json) IS
    'Metadata that PostgreSQL can take apart: without NUL and halves of characters, and {} where it is no object.';
"""

_CHANGED = (
    ("fail(bigint, bigint, bigint, text, text)", "json_each(failed.metadata)", "failed.metadata"),
    ("filter_takes(jsonb, text, json)", "WHERE metadata ->>", "metadata"),
    ("filter_takes(jsonb, text, json)", "json_typeof(metadata ->", "metadata"),
)
"""Functions, and in each the place where it takes metadata apart."""

_CHANGE = """
DO $do$
DECLARE
    was CONSTANT text := pg_get_functiondef('{schema}.{function}'::regprocedure);
BEGIN
    ASSERT strpos(was, $old${old}$old$) > 0, 'the function is not the one of an earlier revision';
    EXECUTE replace(was, $old${old}$old$, $new${new}$new$);
END
$do$;
"""


def upgrade() -> None:
    schema = '"{}"'.format(context.config.attributes["schema"])
    run(_READABLE.replace("{schema}", schema))
    for function, place, metadata in _CHANGED:
        readable = place.replace(metadata, f"{schema}.readable_metadata({metadata})")
        change = _CHANGE.replace("{function}", function).replace("{old}", place).replace("{new}", readable)
        run(change.replace("{schema}", schema))
