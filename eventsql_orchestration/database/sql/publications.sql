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
