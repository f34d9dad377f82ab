-- The partitions of keys, and layouts of topics.

-- The rule of `topics/partitioner.py`: the SHA-256 of a key as one unsigned number of 256 bits, the first byte the
-- most significant, modulo the number of partitions. The number in eight parts of 32 bits takes a fifth of the time of
-- 32 bytes.
CREATE OR REPLACE FUNCTION {schema}.partition_of_key(key text, partitions integer) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    bits pg_catalog.bit(256) := ('x' OPERATOR(pg_catalog.||) pg_catalog.encode(
        pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8')), 'hex'))::pg_catalog.bit(256);
BEGIN
    RETURN ((((((((((((((pg_catalog.substring(bits, 1, 32)::bigint OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 33, 32)::bigint) OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 65, 32)::bigint) OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 97, 32)::bigint) OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 129, 32)::bigint) OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 161, 32)::bigint) OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 193, 32)::bigint) OPERATOR(pg_catalog.%) partitions) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)
        pg_catalog.substring(bits, 225, 32)::bigint) OPERATOR(pg_catalog.%) partitions;
END
$$;

-- EventSQL's Java library gives an empty topic another number of partitions, and does not change the number of its
-- layout. The trigger deletes the former layouts and gives the layout the next number: then publishers look the topic
-- up again.
CREATE OR REPLACE FUNCTION {schema}.redefine_topic() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('DELETE FROM %I.topic_layout WHERE eql_topic = $1', TG_TABLE_SCHEMA) USING OLD.eql_name;
    NEW.eql_layout := OLD.eql_layout + 1;
    RETURN NEW;
END
$$;

-- A consumer has a row for each partition of its layout and of later layouts. The function has its owner's rights: it
-- deletes rows for a role that consumes, which must not delete other rows.
CREATE OR REPLACE FUNCTION {schema}.enter_layout(of_topic text, of_consumer text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound bigint;
    entered integer;
    partitions smallint;
    next_bound bigint;
    behind boolean;
    log text := lower(of_topic COLLATE "C") || '_event';
    -- The first offset of a row. A block has several offsets.
    first text := 'e.eql_id';
BEGIN
    -- A first look without locks: a consumer that does not wait for a layout goes on.
    SELECT min(c.eql_until) INTO bound FROM {schema}.consumer c
    WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer
    HAVING count(*) = count(c.eql_until) AND min(c.eql_until) = max(c.eql_until) AND min(c.eql_partition) >= 0;
    SELECT max(l.eql_layout) INTO entered FROM {schema}.topic_layout l
    WHERE l.eql_topic = of_topic AND l.eql_after = bound;
    IF bound IS NULL OR bound < 0 OR entered IS NULL THEN
        RETURN false;
    END IF;
    PERFORM FROM {schema}.consumer c WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer
    ORDER BY c.eql_partition FOR UPDATE;
    IF EXISTS (
        SELECT FROM {schema}.consumer c WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer
        AND (c.eql_until IS DISTINCT FROM bound
             OR c.eql_lease_owner IS NOT NULL AND c.eql_lease_expires_at > clock_timestamp())
    ) THEN
        RETURN false;
    END IF;
    IF EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, log)) AND relkind = 'v'
    ) THEN
        log := lower(of_topic COLLATE "C") || '_block';
        first := 'greatest(e.eql_id - e.eql_events, coalesce(c.eql_last_event_id, 0)) + 1';
    END IF;
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM {schema}.consumer c CROSS JOIN LATERAL (SELECT %s AS first FROM {schema}.%I e '
        'WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0)) '
        'AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807) '
        'AND e.eql_id > coalesce(c.eql_last_event_id, 0) '
        'ORDER BY e.eql_partition, e.eql_id LIMIT 1) waiting '
        'WHERE c.eql_topic = $1 AND c.eql_name = $2 AND waiting.first <= $3)',
        first, log
    ) INTO behind USING of_topic, of_consumer, bound;
    IF behind THEN
        RETURN false;
    END IF;
    SELECT max(l.eql_partitions) INTO partitions FROM {schema}.topic_layout l
    WHERE l.eql_topic = of_topic AND l.eql_layout >= entered;
    SELECT l.eql_after INTO next_bound FROM {schema}.topic_layout l
    WHERE l.eql_topic = of_topic AND l.eql_layout > entered ORDER BY l.eql_layout LIMIT 1;
    UPDATE {schema}.consumer SET eql_last_event_id = greatest(eql_last_event_id, bound), eql_until = next_bound
    WHERE eql_topic = of_topic AND eql_name = of_consumer;
    UPDATE {schema}.consumer_claim SET eql_state = 'released', eql_finished_at = clock_timestamp()
    WHERE eql_topic = of_topic AND eql_consumer = of_consumer AND eql_partition >= partitions
      AND eql_state = 'claimed';
    DELETE FROM {schema}.consumer
    WHERE eql_topic = of_topic AND eql_name = of_consumer AND eql_partition >= partitions;
    RETURN true;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.enter_layout(text, text) FROM PUBLIC;
