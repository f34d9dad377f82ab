"""Fetching in SQL passes over many events at once that the consumer's filter does not take."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0050"
down_revision = "0049"

_SETTINGS = """LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

# A log that has blocks is read as blocks, also where its new events are rows: the view of its events would read all.
_IN_BLOCKS = """EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower({topic} COLLATE "C") || '_event')) AND relkind = 'v'
    )"""

# The arrays of keys and of metadata are NULL in a block without them. Its values are not read.
_FIRST_TAKEN = """
CREATE FUNCTION {schema}.first_taken(
    of_topic text, of_partition smallint, after bigint, upto bigint, conditions jsonb
) RETURNS bigint
{settings} AS $$
DECLARE
    own text := CASE WHEN of_partition >= 0 THEN 'eql_partition = $3 AND ' ELSE '' END;
    source text;
    taken bigint;
BEGIN
    IF {in_blocks} THEN
        source := format(
            'SELECT b.base + coalesce(e.place, e.number) AS eql_id, e.key AS eql_key, '
            'coalesce(e.metadata, ''{}''::json) AS eql_metadata '
            'FROM (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base FROM {schema}.%I '
            'WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
            'AND eql_id - coalesce(eql_span, eql_events) < $2 ORDER BY eql_id) b '
            'CROSS JOIN LATERAL unnest(array_fill(0, ARRAY[b.eql_events]), b.eql_keys, b.eql_metadata, b.eql_places) '
            'WITH ORDINALITY AS e (event, key, metadata, place, number) '
            'WHERE b.base + coalesce(e.place, e.number) > $1 AND b.base + coalesce(e.place, e.number) <= $2',
            lower(of_topic COLLATE "C") || '_block', own
        );
    ELSE
        source := format(
            'SELECT eql_id, eql_key, eql_metadata FROM {schema}.%I WHERE %s eql_id > $1 AND eql_id <= $2',
            lower(of_topic COLLATE "C") || '_event', own
        );
    END IF;
    EXECUTE 'SELECT min(eql_id) FROM (' || source || ') event '
        'WHERE {schema}.filter_takes($4, eql_key, eql_metadata)'
        INTO taken USING after, upto, of_partition, conditions;
    RETURN taken;
END
$$;
"""

# It gets the rights of filter_takes, which it calls. If nobody changed those, everybody has both.
_RIGHTS = """
DO $$
DECLARE
    rights aclitem[] := (
        SELECT p.proacl FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname = 'filter_takes'
    );
    grantee text;
BEGIN
    IF rights IS NULL THEN
        RETURN;
    END IF;
    REVOKE EXECUTE ON FUNCTION {schema}.first_taken FROM PUBLIC;
    FOR grantee IN
        SELECT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM aclexplode(rights) acl WHERE acl.privilege_type = 'EXECUTE'
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.first_taken TO ' || grantee;
    END LOOP;
END
$$;
"""

_FETCH = """
CREATE OR REPLACE FUNCTION {schema}.fetch(
    topic text, consumer text, max_events integer DEFAULT 100, lease double precision DEFAULT 60,
    owner text DEFAULT NULL
) RETURNS TABLE (
    claim bigint, epoch bigint, partition smallint, id bigint, key text, value bytea, metadata json,
    published_at timestamptz
)
{settings} ROWS 100 AS $$
DECLARE
    -- An hour after their end, claims of this prefix are deleted.
    named text := 'process ' || coalesce(owner, nullif(current_setting('application_name'), '') || ' in SQL', 'in SQL');
    in_blocks boolean;
    partitioned boolean;
    ready text;
    candidate smallint;
    own {schema}.consumer;
    look integer;
    looks integer := 0;
    passing boolean;
    taken bigint;
    waiting record;
BEGIN
    IF (max_events >= 1 AND max_events <= 10000) IS NOT TRUE OR (lease > 0 AND lease <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_events must be 1 to 10000, and lease more than 0 seconds, up to 31536000'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT bool_or(c.eql_partition >= 0) INTO partitioned
    FROM {schema}.consumer c WHERE c.eql_topic = topic AND c.eql_name = consumer;
    IF partitioned IS NULL THEN
        RAISE EXCEPTION 'consumer % of topic % does not exist', quote_nullable(consumer), quote_nullable(topic)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Create it with `eventsql consumer create`.';
    END IF;
    in_blocks := {in_blocks};

    -- Partitions with events after their offset, the longest waiting first: one step in an index for each.
    ready := format(
        'SELECT c.eql_partition FROM {schema}.consumer c CROSS JOIN LATERAL ('
        'SELECT %s AS before FROM {schema}.%I e '
        'WHERE e.eql_id > coalesce(c.eql_last_event_id, 0) %s LIMIT 1) first '
        'WHERE c.eql_topic = $1 AND c.eql_name = $2 AND NOT c.eql_paused '
        'AND (c.eql_lease_owner IS NOT NULL AND c.eql_lease_expires_at > clock_timestamp()) IS NOT TRUE '
        'AND first.before < coalesce(c.eql_until, 9223372036854775807) '
        'ORDER BY c.eql_last_consumption_at NULLS FIRST, c.eql_partition',
        CASE WHEN in_blocks THEN 'greatest(e.eql_id - e.eql_events, coalesce(c.eql_last_event_id, 0))'
             ELSE 'e.eql_id - 1' END,
        lower(topic COLLATE "C") || CASE WHEN in_blocks THEN '_block' ELSE '_event' END,
        CASE WHEN partitioned
             THEN 'AND (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0)) '
                  'AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807) '
                  'ORDER BY e.eql_partition, e.eql_id'
             ELSE 'ORDER BY e.eql_id' END
    );
    FOR turn IN 1..2 LOOP
        FOR candidate IN EXECUTE ready USING topic, consumer LOOP
            look := 0;
            LOOP
                SELECT * INTO own FROM {schema}.consumer c
                WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_partition = candidate AND NOT c.eql_paused
                  AND (c.eql_lease_owner IS NOT NULL AND c.eql_lease_expires_at > clock_timestamp()) IS NOT TRUE
                  AND (c.eql_failed_event_id > coalesce(c.eql_last_event_id, 0) AND (
                      c.eql_retry_at > clock_timestamp()
                      OR c.eql_attempts >= c.eql_max_attempts AND NOT EXISTS (
                          SELECT FROM {schema}.topic t WHERE t.eql_name = "fetch".topic || '_dlt')
                  )) IS NOT TRUE
                FOR UPDATE SKIP LOCKED;
                EXIT WHEN NOT FOUND;
                own.eql_last_event_id := coalesce(own.eql_last_event_id, 0);
                waiting := {schema}.partition_waiting(
                    topic, candidate, own.eql_last_event_id, coalesce(own.eql_until, 9223372036854775807),
                    -- An event that failed is fetched alone.
                    CASE WHEN own.eql_failed_event_id > own.eql_last_event_id THEN 1 ELSE greatest(max_events, look) END
                );
                EXIT WHEN waiting.events = 0;
                IF EXISTS (SELECT FROM json_object_keys(own.eql_filter::json) AS condition
                           WHERE condition <> ALL (ARRAY['keys', 'key_prefix', 'metadata'])) THEN
                    RAISE EXCEPTION 'the filter of consumer % is not understood by this version',
                        quote_literal(consumer) USING ERRCODE = 'feature_not_supported';
                END IF;
                passing := look > 0;
                IF passing THEN
                    taken := {schema}.first_taken(
                        topic, candidate, own.eql_last_event_id, waiting.last, own.eql_filter::jsonb);
                    IF taken IS NOT NULL THEN
                        look := 0;
                        waiting := {schema}.partition_waiting(
                            topic, candidate, own.eql_last_event_id, taken - 1, 9223372036854775807);
                        CONTINUE WHEN waiting.events = 0;
                    END IF;
                END IF;

                UPDATE {schema}.consumer_claim c SET eql_state = 'released', eql_finished_at = clock_timestamp()
                WHERE c.eql_topic = topic AND c.eql_consumer = consumer AND c.eql_partition = candidate
                  AND c.eql_state = 'claimed';
                INSERT INTO {schema}.consumer_claim (
                    eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_epoch, eql_owner
                ) VALUES (
                    topic, consumer, candidate, own.eql_last_event_id, waiting.last, waiting.events,
                    own.eql_epoch + 1, named
                ) RETURNING eql_id INTO claim;
                UPDATE {schema}.consumer c
                SET eql_epoch = own.eql_epoch + 1, eql_lease_owner = named,
                    eql_lease_expires_at = clock_timestamp() + make_interval(secs => lease)
                WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_partition = candidate;
                IF NOT passing THEN
                    RETURN QUERY
                    SELECT claim, own.eql_epoch + 1, e.partition, e.id, e.key, e.value, e.metadata, e.published_at
                    FROM {schema}.partition_events(topic, candidate, own.eql_last_event_id, waiting.last) e
                    WHERE own.eql_filter IS NULL OR {schema}.filter_takes(own.eql_filter::jsonb, e.key, e.metadata);
                    IF FOUND THEN
                        IF claim % 257 = 0 THEN
                            DELETE FROM {schema}.consumer_claim c WHERE c.eql_id = ANY (ARRAY(
                                SELECT o.eql_id FROM {schema}.consumer_claim o
                                WHERE o.eql_topic = topic AND o.eql_consumer = consumer AND o.eql_partition = candidate
                                  AND o.eql_state <> 'claimed' AND starts_with(o.eql_owner, 'process ')
                                  AND o.eql_finished_at < clock_timestamp() - interval '1 hour'
                                ORDER BY o.eql_upto LIMIT 500 FOR UPDATE SKIP LOCKED
                            ));
                        END IF;
                        RETURN;
                    END IF;
                    look := max_events;
                END IF;
                -- The filter takes none of these events: they are passed over, and more of them with the next look.
                PERFORM {schema}.commit(claim, own.eql_epoch + 1);
                look := least(look * 4, 10000);
                looks := looks + 1;
                EXIT WHEN looks >= 20;
            END LOOP;
        END LOOP;

        -- Where all partitions have come to the end of a layout, the consumer enters the next one.
        EXIT WHEN turn = 2 OR NOT EXISTS (
            SELECT FROM {schema}.consumer c
            WHERE c.eql_topic = topic AND c.eql_name = consumer AND c.eql_until IS NOT NULL
        );
        EXIT WHEN (SELECT count(*) FROM {schema}.consumer c WHERE c.eql_topic = topic AND c.eql_name = consumer) <> (
            SELECT count(*) FROM (
                SELECT FROM {schema}.consumer c WHERE c.eql_topic = topic AND c.eql_name = consumer
                ORDER BY c.eql_partition FOR UPDATE SKIP LOCKED
            ) locked
        );
        EXIT WHEN NOT {schema}.enter_layout(topic, consumer);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statements, topic in ((_FIRST_TAKEN, "of_topic"), (_RIGHTS, ""), (_FETCH, "topic")):
        text = statements.replace("{settings}", _SETTINGS).replace("{in_blocks}", _IN_BLOCKS.replace("{topic}", topic))
        run(text.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
