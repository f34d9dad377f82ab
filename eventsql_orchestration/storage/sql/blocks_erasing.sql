-- parts of erasing

-- part events of metadata -- The events of a block, whose metadata are in this column.
unnest(b.eql_keys, b.eql_values, {metadata}) WITH ORDINALITY AS e (eql_key, eql_value, eql_metadata, number)

-- part values of metadata -- The values of a block, each of an event to be erased empty.
ARRAY(SELECT CASE WHEN {wanted} THEN '' ELSE e.eql_value END FROM {events of {metadata}} ORDER BY e.number)

-- part marks of metadata -- The metadata of a block, each of an event to be erased with the mark.
ARRAY(
    SELECT CASE WHEN {wanted} THEN {marked} ELSE coalesce(e.eql_metadata, '{{}}'::json) END
    FROM {events of {metadata}}
    ORDER BY e.number
)

-- part found -- The blocks of a range that have events of the keys which are not erased, and how many of each key.
found AS MATERIALIZED (
    SELECT eql_id, eql_key, count(*) AS events
    FROM (
        SELECT b.eql_id, e.eql_key, e.eql_value, e.eql_metadata
        FROM {schema}.{block_store} b
        CROSS JOIN LATERAL {events of b.eql_metadata}
        WHERE b.eql_id > %(after)s AND b.eql_id <= %(upto)s AND b.eql_keys && %(keys)s::text[]
    ) log
    WHERE {wanted}
    GROUP BY eql_id, eql_key
)

-- part sums -- How many events of each key were found.
SELECT eql_key, sum(events)::bigint FROM found GROUP BY eql_key

-- count -- How many events of each key a range of a log has that are not erased.
WITH {found}
{sums};

-- erase -- Erase the events of keys in a range of a log; how many of each key. A second call finds none.
WITH {found}, changed AS (
    UPDATE {schema}.{block_store} b
    SET eql_values = {values of b.eql_metadata}, eql_metadata = {marks of b.eql_metadata}
    WHERE b.eql_id > %(after)s AND b.eql_id <= %(upto)s AND b.eql_id = ANY (ARRAY(SELECT found.eql_id FROM found))
)
{sums};

-- part found_buffered -- The blocks of a range of the buffer that have unerased events of the keys, and the number of these
-- events for each key.
found AS MATERIALIZED (
    SELECT eql_id, eql_key, count(*) AS events
    FROM (
        SELECT b.eql_id, e.eql_key, e.eql_value, e.eql_metadata
        FROM {schema}.event_buffer b
        CROSS JOIN LATERAL {events of b.eql_event_metadata}
        WHERE (b.eql_topic, b.eql_id) > (%(topic)s, %(after)s) AND (b.eql_topic, b.eql_id) <= (%(topic)s, %(upto)s)
          AND b.eql_keys && %(keys)s::text[]
    ) buffer
    WHERE {wanted}
    GROUP BY eql_id, eql_key
)

-- count_buffered -- The number of events of each key that are not erased, in the blocks of a range of the buffer.
WITH {found_buffered}
{sums};

-- erase_buffered -- Erase the events of keys in the blocks in a range of the buffer; how many of each key.
WITH {found_buffered}, changed AS (
    UPDATE {schema}.event_buffer b
    SET eql_values = {values of b.eql_event_metadata}, eql_event_metadata = {marks of b.eql_event_metadata}
    WHERE b.eql_id = ANY (ARRAY(SELECT found.eql_id FROM found))
)
{sums};
