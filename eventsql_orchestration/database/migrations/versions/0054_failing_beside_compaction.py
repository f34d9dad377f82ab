"""Consuming in SQL counts the events of a range by one snapshot: compaction may give blocks gaps at any moment."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0054"
down_revision = "0053"

_SETTINGS = """LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

# As in revision 0047.
_IN_BLOCKS = """EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_event')) AND relkind = 'v'
    )"""

# Of revision 0047. The statement that takes blocks for consecutive ids also finds out whether they are. As a statement
# before it, that was true of an earlier snapshot: then `fail` did not commit the events before the failing one.
_READ = """
CREATE OR REPLACE FUNCTION {schema}.partition_waiting(
    of_topic text, of_partition smallint, after bigint, upto bigint, most bigint,
    OUT events bigint, OUT first bigint, OUT last bigint
)
{settings} AS $$
DECLARE
    own text := CASE WHEN of_partition >= 0 THEN 'eql_partition = $4 AND ' ELSE '' END;
    log text := format('{schema}.%I', lower(of_topic COLLATE "C") || '_block');
    gaps boolean;
BEGIN
    IF {in_blocks} THEN
        EXECUTE format(
            'WITH with_gaps AS MATERIALIZED ('
            'SELECT EXISTS (SELECT FROM %1$s WHERE eql_span IS NOT NULL AND eql_id > $1) AS found) '
            'SELECT coalesce(sum(least(held, $3 - before)), 0)::bigint, min(start) + 1, '
            'max(start + least(held, $3 - before)), (SELECT found FROM with_gaps) FROM ('
            'SELECT block.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before FROM ('
            'SELECT greatest(eql_id - eql_events, $1) AS start, '
            'least(eql_id, $2) - greatest(eql_id - eql_events, $1) AS held FROM %1$s '
            'WHERE NOT (SELECT found FROM with_gaps) AND %2$s eql_id > $1 '
            'AND eql_id <= least($2, 9223372036854755807) + 20000 AND eql_id - eql_events < $2 '
            'ORDER BY eql_id LIMIT $3) block) next WHERE before < $3',
            log, own
        ) INTO events, first, last, gaps USING after, upto, most, of_partition;
        IF gaps THEN
            -- The first blocks with enough events, at most 20,000 of which come before the range, and the blocks with
            -- gaps that have events before the end of these.
            EXECUTE format(
                'WITH own AS NOT MATERIALIZED (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base '
                'FROM %s WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
                'AND eql_id - coalesce(eql_span, eql_events) < $2), '
                'reach AS MATERIALIZED (SELECT max(eql_id) AS id FROM ('
                'SELECT eql_id, sum(eql_events) OVER (ORDER BY eql_id) - eql_events AS before FROM ('
                'SELECT eql_id, eql_events FROM own ORDER BY eql_id LIMIT $3) block) found WHERE before - 20000 < $3), '
                'near AS (SELECT * FROM own WHERE eql_id <= (SELECT id FROM reach) UNION ALL '
                'SELECT * FROM own WHERE eql_span IS NOT NULL AND eql_id > (SELECT id FROM reach) '
                'AND eql_id <= (SELECT id FROM reach) + 20000 AND base < (SELECT id FROM reach)) '
                'SELECT count(*), min(next.id), max(next.id) FROM ('
                'SELECT each.id FROM near CROSS JOIN LATERAL ('
                'SELECT near.base + number AS id FROM generate_series(1, near.eql_events) AS number '
                'WHERE near.eql_span IS NULL UNION ALL SELECT near.base + place FROM unnest(near.eql_places) AS place'
                ') each WHERE each.id > $1 AND each.id <= least($2, (SELECT id FROM reach)) '
                'ORDER BY each.id LIMIT $3) next',
                log, own
            ) INTO events, first, last USING after, upto, most, of_partition;
        END IF;
        RETURN;
    END IF;
    EXECUTE format(
        'SELECT count(*), min(eql_id), max(eql_id) FROM (SELECT eql_id FROM {schema}.%I '
        'WHERE %s eql_id > $1 AND eql_id <= $2 ORDER BY eql_id LIMIT $3) next',
        lower(of_topic COLLATE "C") || '_event', own
    ) INTO events, first, last USING after, upto, most, of_partition;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    text = _READ.replace("{settings}", _SETTINGS).replace("{in_blocks}", _IN_BLOCKS)
    run(text.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
