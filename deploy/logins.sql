-- The logins of processes that need less than the owner of the database. It may run again, and sets the passwords anew.
\getenv metrics METRICS_PASSWORD
SELECT 'CREATE ROLE metrics' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'metrics') \gexec
ALTER ROLE metrics LOGIN PASSWORD :'metrics';
GRANT eventsql_reader TO metrics;
