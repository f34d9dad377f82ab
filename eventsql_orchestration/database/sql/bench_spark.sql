-- drop_raw -- Make way for the table of another shape.
DROP TABLE {schema}.{event_table};

-- create_plain -- A plain table with the columns that Spark writes, as its JDBC source would make it.
CREATE TABLE {schema}.{event_table} (key pg_catalog.text, value pg_catalog.bytea, topic pg_catalog.text, partition integer);
