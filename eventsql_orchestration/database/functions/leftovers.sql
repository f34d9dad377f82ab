-- A deleted topic or consumer leaves nothing behind.

-- EventSQL's Java library deletes the rows of its own tables, and does not know the other tables. The program that
-- deletes the topic also deletes the topic's events in the buffer.
CREATE OR REPLACE FUNCTION {schema}.forget_topic() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept_by text;
BEGIN
    FOREACH kept_by IN ARRAY ARRAY[
        'consumer', 'consumer_claim', 'topic_layout', 'shard_fence', 'redriven_dead_letter', 'event_buffer_lock',
        'finished_backfill'
    ] LOOP
        EXECUTE format('DELETE FROM %I.%I WHERE eql_topic = $1', TG_TABLE_SCHEMA, kept_by) USING OLD.eql_name;
    END LOOP;
    EXECUTE format(
        'DELETE FROM %1$I.spark_staged_event block WHERE eql_topic = $1 AND ('
        'eql_buffer_id IS NOT NULL OR EXISTS ('
        'SELECT FROM %1$I.spark_part part WHERE eql_published_at IS NULL AND block.eql_attempt = ANY (eql_attempts)))',
        TG_TABLE_SCHEMA
    ) USING OLD.eql_name;
    RETURN NULL;
END
$$;

-- A consumer may lose some of its partitions. Its claims are deleted with its last partition, and cursors and
-- deliveries with their own partition.
CREATE OR REPLACE FUNCTION {schema}.forget_consumer() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    kept_by text;
BEGIN
    FOREACH kept_by IN ARRAY ARRAY['consumer_claim', 'finished_backfill', 'consumer_worker'] LOOP
        EXECUTE format(
            'DELETE FROM %1$I.%2$I WHERE (eql_topic, eql_consumer) IN ('
            'SELECT eql_topic, eql_name FROM gone WHERE NOT EXISTS ('
            'SELECT FROM %1$I.consumer c WHERE c.eql_topic = gone.eql_topic AND c.eql_name = gone.eql_name))',
            TG_TABLE_SCHEMA, kept_by
        );
    END LOOP;
    EXECUTE format(
        'WITH cursors AS ('
        'DELETE FROM %1$I.consumer_cursor k USING gone WHERE k.eql_topic = gone.eql_topic '
        'AND k.eql_consumer = gone.eql_name AND k.eql_partition = gone.eql_partition RETURNING k.eql_id) '
        'DELETE FROM %1$I.consumer_delivery d USING cursors WHERE d.eql_cursor = cursors.eql_id',
        TG_TABLE_SCHEMA
    );
    RETURN NULL;
END
$$;
