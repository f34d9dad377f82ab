-- old_writers -- Writers of assets whose publications are older than a time, in order, after a given writer. Only an asset's
-- writer is a list in JSON.
SELECT eql_writer
FROM {schema}.spark_publication
WHERE starts_with(eql_writer, '[') AND eql_writer > %(after)s
GROUP BY eql_writer
HAVING max(eql_created_at) < %(before)s
ORDER BY eql_writer
LIMIT %(limit)s;

-- delete_writers -- The publications of some writers from before a time.
DELETE FROM {schema}.spark_publication WHERE eql_writer = ANY (%(writers)s) AND eql_created_at < %(before)s;

-- delete_batches -- Delete old batches of other writers, except each writer's newest. As in spark.sql, the last old
-- batch stays as a mark.
WITH old AS MATERIALIZED (
    SELECT eql_writer, eql_batch, max(eql_batch) OVER (PARTITION BY eql_writer) AS last
    FROM {schema}.spark_publication p
    WHERE NOT starts_with(eql_writer, '[') AND eql_created_at < %(before)s
      AND EXISTS (
          SELECT FROM {schema}.spark_publication later
          WHERE later.eql_writer = p.eql_writer AND later.eql_batch > p.eql_batch
      )
), marked AS (
    UPDATE {schema}.spark_publication p SET eql_oldest = true
    FROM old
    WHERE p.eql_writer = old.eql_writer AND p.eql_batch = old.last AND old.eql_batch < old.last AND NOT p.eql_oldest
)
DELETE FROM {schema}.spark_publication p
USING old
WHERE p.eql_writer = old.eql_writer AND p.eql_batch = old.eql_batch AND old.eql_batch < old.last;
