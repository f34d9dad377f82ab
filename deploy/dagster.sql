-- Dagster's own tables stand beside the events, in a schema of their own.
CREATE SCHEMA IF NOT EXISTS dagster;
