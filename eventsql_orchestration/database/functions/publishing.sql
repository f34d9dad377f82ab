-- Publishing in SQL, and the checks of the buffer.

-- A program that moves rows of the buffer and does not know blocks fails here, and takes nothing out of the buffer.
CREATE OR REPLACE FUNCTION {schema}.keep_published_block() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    waiting boolean := OLD.eql_values IS NOT NULL;
BEGIN
    IF NOT waiting THEN
        EXECUTE pg_catalog.format(
            'SELECT EXISTS (SELECT FROM %I.spark_staged_event WHERE eql_buffer_id OPERATOR(pg_catalog.=) $1)',
            TG_TABLE_SCHEMA
        ) INTO waiting USING OLD.eql_id;
    END IF;
    IF waiting THEN
        RAISE EXCEPTION 'row % of the buffer of topic % stands for a block of events, which only the transfer of '
            'eventsql-orchestration moves', OLD.eql_id, OLD.eql_topic
            USING ERRCODE = 'check_violation', CONSTRAINT = 'event_buffer_published_block';
    END IF;
    RETURN NULL;
END
$$;

-- A role can lock a row only with the right to change it, which a publisher must not have. So the function has its
-- owner's rights.
CREATE OR REPLACE FUNCTION {schema}.hold_topics(names text[])
RETURNS TABLE (name text, partitions smallint, layout integer)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT t.eql_name, t.eql_partitions, t.eql_layout
    FROM {schema}.topic t
    WHERE t.eql_name = ANY (names)
    ORDER BY t.eql_name
    FOR SHARE
$$;
REVOKE EXECUTE ON FUNCTION {schema}.hold_topics(text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.publish_anywhere() RETURNS void LANGUAGE sql AS 'SELECT';
COMMENT ON FUNCTION {schema}.publish_anywhere() IS
    'Does nothing. A role that may execute this function may publish to every topic.';
REVOKE EXECUTE ON FUNCTION {schema}.publish_anywhere() FROM PUBLIC;

-- A right on the log stands for the right to publish: INSERT of the id alone lets nobody insert an event. A row with a
-- block needs the same right as the events of the block. A row that stands for a staged block needs the rights of a
-- stager. The whole name of the log is quoted, and not a part of it: the topic may be called `order`.
CREATE OR REPLACE FUNCTION {schema}.check_publication() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.eql_partition OPERATOR(pg_catalog.<) -1 THEN
        IF (NEW.eql_partition OPERATOR(pg_catalog.<>) -3 OR NEW.eql_values IS NULL)
            AND NOT pg_catalog.has_table_privilege('{schema}.spark_staged_event'::pg_catalog.regclass, 'INSERT')
        THEN
            RAISE EXCEPTION 'permission denied for table spark_staged_event' USING ERRCODE = 'insufficient_privilege';
        END IF;
        IF pg_catalog.has_function_privilege('{schema}.publish_anywhere()'::pg_catalog.regprocedure, 'EXECUTE') THEN
            RETURN NULL;
        END IF;
    END IF;
    -- A role that may publish to every topic does not come here.
    IF pg_catalog.has_column_privilege(
        pg_catalog.to_regclass(pg_catalog.format(
            '%I.%I', TG_TABLE_SCHEMA,
            pg_catalog.lower(NEW.eql_topic COLLATE pg_catalog."C") OPERATOR(pg_catalog.||) '_event'
        ))::pg_catalog.oid, 'eql_id', 'INSERT'
    ) IS NOT TRUE THEN
        RAISE EXCEPTION 'permission denied for topic %', NEW.eql_topic USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NULL;
END
$$;

-- The function has its caller's rights, as an INSERT into the buffer by hand has. The INSERT locks the buffer, and then
-- chooses the partitions by the definition of the topic: a change of the definition comes before the INSERT, or waits
-- for this transaction. The rules for events are the rules of `model.Publication`.
CREATE OR REPLACE FUNCTION {schema}.publish_all(
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
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For events without keys or metadata, pass NULL.';
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
                  HINT = 'A value is not NULL and has at most 67108864 bytes, a key has at most 65536 bytes, and '
                         'metadata are a JSON object of strings, each name once, with at most 16777216 bytes.';
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
    IF NOT FOUND AND (
        number > 0 OR NOT EXISTS (SELECT FROM {schema}.topic t WHERE t.eql_name = publish_all.topic)
    ) THEN
        RAISE EXCEPTION 'topic % does not exist', quote_nullable(topic)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table {schema}.topic lists the topics.';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- The snapshot may be older than the definition. Then this call fails, as a write to a changed row does.
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
                      HINT = 'Publish the event on the shard of its key, or finish the addition of this shard.';
        END IF;
    END IF;
    RETURN number;
END
$$;
COMMENT ON FUNCTION {schema}.publish_all(text, text[], bytea[], json[]) IS
    'Publish events to a topic in the order of the arrays, as part of this transaction. Gives their number.';

CREATE OR REPLACE FUNCTION {schema}.publish(topic text, key text, value bytea, metadata json DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.publish_all(topic, ARRAY[key], ARRAY[value], ARRAY[metadata]);
END
$$;
COMMENT ON FUNCTION {schema}.publish(text, text, bytea, json) IS
    'Publish one event to a topic, as part of this transaction. Events of one key keep their order; a key may be NULL.';
