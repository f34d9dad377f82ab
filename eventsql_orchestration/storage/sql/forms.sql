-- form -- Whether a log is in blocks.
SELECT coalesce((SELECT relkind = 'v' FROM pg_class WHERE oid = to_regclass(%(log)s)), false);

-- exists -- Whether there is a relation of this name.
SELECT to_regclass(%(name)s) IS NOT NULL;

-- create_blocks -- The table of a log in blocks. A block has the events of one partition with consecutive ids; its id is
-- that of its last event. The arrays have an element for each event: keys, values, metadata, times of publication. NULL
-- stands for no keys, no metadata, and one time for all. A block with a wrong number or a cut array is refused.
CREATE TABLE {schema}.{block_table} (
    eql_id bigserial PRIMARY KEY,
    eql_partition smallint NOT NULL,
    eql_events integer NOT NULL,
    eql_buffered_at timestamptz NOT NULL,
    eql_created_at timestamptz NOT NULL,
    eql_times timestamptz[],
    eql_keys text[],
    eql_metadata json[],
    eql_values bytea[] NOT NULL,
    CONSTRAINT eql_events_of_block CHECK (eql_events >= 1 AND eql_events <= 20000 AND eql_id >= eql_events),
    CONSTRAINT eql_whole_values CHECK (
        array_ndims(eql_values) = 1 AND array_lower(eql_values, 1) = 1 AND cardinality(eql_values) = eql_events
        AND array_position(eql_values, NULL::bytea) IS NULL
    ),
    CONSTRAINT eql_whole_keys CHECK (
        eql_keys IS NULL
        OR array_ndims(eql_keys) = 1 AND array_lower(eql_keys, 1) = 1 AND cardinality(eql_keys) = eql_events
    ),
    CONSTRAINT eql_whole_metadata CHECK (
        eql_metadata IS NULL
        OR array_ndims(eql_metadata) = 1 AND array_lower(eql_metadata, 1) = 1 AND cardinality(eql_metadata) = eql_events
    ),
    CONSTRAINT eql_whole_times CHECK (
        eql_times IS NULL
        OR array_ndims(eql_times) = 1 AND array_lower(eql_times, 1) = 1 AND cardinality(eql_times) = eql_events
    )
) PARTITION BY RANGE (eql_id);

-- store_apart -- Keep arrays out of the rows and as they are: most of their bytes would not get smaller.
ALTER TABLE {schema}.{block_table}
    ALTER COLUMN eql_times SET STORAGE EXTERNAL, ALTER COLUMN eql_keys SET STORAGE EXTERNAL,
    ALTER COLUMN eql_metadata SET STORAGE EXTERNAL, ALTER COLUMN eql_values SET STORAGE EXTERNAL;

-- create_partition_index -- The index that the readers of one partition need.
CREATE INDEX ON {schema}.{block_table} (eql_partition, eql_id);

-- create_view -- The events of a log in blocks, with the columns of a log in rows.
CREATE VIEW {schema}.{event_table} AS
SELECT b.eql_id - b.eql_events + e.number AS eql_id, b.eql_partition, e.key AS eql_key, e.value AS eql_value,
       coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at, b.eql_created_at,
       coalesce(e.metadata, '{{}}'::json) AS eql_metadata
FROM {schema}.{block_table} b
CROSS JOIN LATERAL unnest(b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times)
    WITH ORDINALITY AS e (value, key, metadata, published, number);

-- refuse_rows -- Tell programs that know no blocks, such as EventSQL's Java library, that they cannot write to the log.
CREATE TRIGGER eql_refuse_rows INSTEAD OF INSERT OR UPDATE OR DELETE ON {schema}.{event_table}
    FOR EACH ROW EXECUTE FUNCTION {schema}.refuse_rows();

-- drop_view -- Drop the view of a log in blocks.
DROP VIEW {schema}.{event_table};

-- drop_blocks -- Drop the table of a log in blocks.
DROP TABLE {schema}.{block_table};

-- broken_blocks -- At most 100 blocks that are not whole, overlap the block before them, or are of a partition that
-- their topic never had. Only the newest 1,000 blocks' arrays are read.
SELECT eql_id, eql_partition,
       CASE WHEN NOT whole THEN 'its number of events is not that of its values'
           WHEN overlapping THEN 'it overlaps the block before it'
           ELSE 'the topic never had its partition' END
FROM (
    SELECT eql_id, eql_partition,
           CASE WHEN row_number() OVER (ORDER BY eql_id DESC) <= 1000
               THEN eql_events >= 1 AND cardinality(eql_values) = eql_events
                   AND coalesce(cardinality(eql_keys), eql_events) = eql_events
                   AND coalesce(cardinality(eql_metadata), eql_events) = eql_events
                   AND coalesce(cardinality(eql_times), eql_events) = eql_events
               ELSE true END AS whole,
           coalesce(lag(eql_id) OVER (ORDER BY eql_id) > (eql_id - eql_events), false) AS overlapping,
           eql_partition >= greatest(
               (SELECT eql_partitions FROM {schema}.topic WHERE eql_name = %(topic)s),
               (SELECT max(eql_partitions) FROM {schema}.topic_layout WHERE eql_topic = %(topic)s), 0
           ) AS foreign_partition
    FROM {schema}.{block_table}
) block
WHERE NOT whole OR overlapping OR foreign_partition
ORDER BY eql_id
LIMIT 100;
