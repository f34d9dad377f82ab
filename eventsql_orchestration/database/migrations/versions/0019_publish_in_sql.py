"""Publishing in SQL: `SELECT eventsql.publish('orders', 'key', value)`, for programs of any language and triggers."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0019"
down_revision = "0018"

# They have their caller's rights, as an INSERT into the buffer by hand would have. The INSERT chooses the partitions by
# the definition that it sees, and it locks the buffer before it looks: a redefinition waits for it, or comes before it.
# The rules are those of `model.Publication`.
_PUBLISH = """
CREATE FUNCTION {schema}.publish_all(
    topic text, keys text[], "values" bytea[], metadata json[] DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number bigint := cardinality("values");
    wrong bigint;
    own text;
    active boolean;
    names text[];
    elsewhere text;
BEGIN
    IF "values" IS NULL OR keys IS NOT NULL AND cardinality(keys) <> number
       OR metadata IS NOT NULL AND cardinality(metadata) <> number THEN
        RAISE EXCEPTION 'keys, values and metadata must have the same number of elements'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For events without keys or metadata, give NULL.';
    END IF;
    SELECT min(each.position) INTO wrong
    FROM unnest(keys, "values", metadata) WITH ORDINALITY AS each (key, value, metadata, position)
    WHERE each.value IS NULL OR octet_length(each.value) > 67108864 OR octet_length(each.key) > 65536
       OR json_typeof(each.metadata) <> 'object'
       OR octet_length(each.metadata::text) > 2 AND EXISTS (
           SELECT FROM json_each(each.metadata) field
           HAVING coalesce(bool_or(json_typeof(field.value) <> 'string'), false)
               OR count(*) <> count(DISTINCT field.key)
               OR sum(octet_length(field.key) + octet_length(field.value #>> '{}')) > 16777216
       );
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'event % of topic % cannot be stored', wrong, quote_nullable(topic)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A value has up to 67108864 bytes and is not NULL, a key up to 65536 bytes, and metadata is a '
                         'JSON object of strings, each name once, up to 16777216 bytes.';
    END IF;

    INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
    SELECT t.eql_name,
           CASE WHEN t.eql_partitions < 0 THEN -1
                WHEN each.key IS NULL THEN floor(random() * t.eql_partitions)::smallint
                ELSE {schema}.partition_of_key(each.key, t.eql_partitions) END,
           each.key, each.value, coalesce(each.metadata, '{}')
    FROM {schema}.topic t
    CROSS JOIN unnest(keys, "values", metadata) WITH ORDINALITY AS each (key, value, metadata, position)
    WHERE t.eql_name = publish_all.topic
    ORDER BY each.position;
    IF NOT FOUND AND NOT EXISTS (SELECT FROM {schema}.topic t WHERE t.eql_name = publish_all.topic) THEN
        RAISE EXCEPTION 'topic % does not exist', quote_nullable(topic)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table {schema}.topic lists the topics.';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- The snapshot may be older than the definition: then this fails, as a write to a changed row does.
        PERFORM FROM {schema}.hold_topics(ARRAY[topic]);
    END IF;

    SELECT s.eql_name, s.eql_active INTO own, active FROM {schema}.shard s;
    IF own IS NOT NULL THEN
        SELECT l.eql_shards INTO names FROM {schema}.shard_layout l ORDER BY l.eql_generation DESC LIMIT 1;
        SELECT each.key INTO elsewhere FROM unnest(keys) AS each (key)
        WHERE each.key IS NOT NULL AND own <> (
            SELECT name FROM unnest(names) AS name
            ORDER BY sha256(convert_to(name, 'UTF8') || decode('00', 'hex') || convert_to(each.key, 'UTF8')) DESC
            LIMIT 1
        )
        LIMIT 1;
        IF elsewhere IS NOT NULL OR NOT active THEN
            RAISE EXCEPTION 'shard % takes no event of key %', own, quote_nullable(elsewhere)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'Publish it on the shard of its key, or finish the addition of this shard.';
        END IF;
    END IF;
    RETURN number;
END
$$;
COMMENT ON FUNCTION {schema}.publish_all(text, text[], bytea[], json[]) IS
    'Publish events to a topic in the order of the arrays, as part of this transaction. Gives their number.';

CREATE FUNCTION {schema}.publish(topic text, key text, value bytea, metadata json DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.publish_all(topic, ARRAY[key], ARRAY[value], ARRAY[metadata]);
END
$$;
COMMENT ON FUNCTION {schema}.publish(text, text, bytea, json) IS
    'Publish one event to a topic, as part of this transaction. Events of one key keep their order; a key may be NULL.';
"""


def upgrade() -> None:
    run(_PUBLISH.replace("{schema}", f'"{context.config.attributes["schema"]}"'))
