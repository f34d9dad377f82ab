"""Receiving from an ordered queue and recording a failure are refused in transactions that are not READ COMMITTED.

A snapshot that is older than the statement may miss that another message of the key is received, or that an event was
erased.
"""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0034"
down_revision = "0033"

_SETTINGS = """LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

_RECEIVE = """
CREATE OR REPLACE FUNCTION {schema}.queue_receive(
    queue text, max_messages integer DEFAULT 1, visibility_timeout double precision DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata json, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb
)
LANGUAGE plpgsql VOLATILE ROWS 100 SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    seconds double precision;
BEGIN
    known := {schema}.queue_number(queue);
    seconds := coalesce(visibility_timeout, known.timeout);
    IF NOT (seconds > 0 AND seconds <= 31536000) OR (max_messages >= 1 AND max_messages <= 10000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_messages must be 1 to 10000, and visibility_timeout up to 31536000 seconds'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF known.in_order THEN
        IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
            RAISE EXCEPTION 'queue % is ordered, and this transaction is not READ COMMITTED', quote_nullable(queue)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'It may miss an earlier message of a key, that is received by now. Take READ COMMITTED.';
        END IF;
        RETURN QUERY
        SELECT t.id, t.body, t.key, t.metadata::json, t.receives, t.receipt, t.priority, t.sent_at, t.history
        FROM {schema}.take_in_order(known.number, least(max_messages, 1000), seconds) t;
    ELSE
        RETURN QUERY
        SELECT t.id, t.body, t.key, t.metadata::json, t.receives, t.receipt, t.priority, t.sent_at, t.history
        FROM {schema}.take_messages(known.number, max_messages, seconds) t;
    END IF;
END
$$;
"""

_FAIL = """
CREATE OR REPLACE FUNCTION {schema}.fail(
    claim bigint, epoch bigint, event bigint, message text, exception text DEFAULT 'Error'
) RETURNS text
{settings} AS $$
DECLARE
    held record;
    failed record;
    before record;
    tries integer;
    reached bigint;
    kind text := coalesce(exception, 'Error');
    told text := left(kind || ': ' || coalesce(message, ''), 2000);
    letters text;
    outcome text := 'retry';
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'a failure cannot be recorded in a transaction that is not READ COMMITTED'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'It may not see that the event was erased. Take READ COMMITTED.';
    END IF;
    held := {schema}.hold_claim(claim, epoch);
    -- An erasure that has erased the event by now would not look for a copy that comes later.
    PERFORM pg_advisory_xact_lock_shared(hashtextextended({literal} || '.' || held.topic, 6074604));
    SELECT * INTO failed FROM {schema}.partition_events(held.topic, held.partition, event - 1, event);
    IF NOT FOUND OR event <= held.after OR event > held.upto THEN
        RAISE EXCEPTION 'claim % has no event %', claim, coalesce(event::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the id of an event that was fetched by this claim.';
    END IF;

    tries := CASE WHEN held.failed = event THEN held.attempts ELSE 0 END + 1;
    before := {schema}.partition_waiting(held.topic, held.partition, held.after, event - 1, 9223372036854775807);
    reached := held.after;
    IF before.events > 0 THEN
        reached := before.last;
        PERFORM {schema}.advance_consumer(held.topic, held.consumer, held.partition, held.after, reached);
    END IF;
    IF tries >= held.allowed THEN
        SELECT t.eql_name INTO letters FROM {schema}.topic t WHERE t.eql_name = held.topic || '_dlt';
        outcome := CASE WHEN letters IS NULL THEN 'blocked' ELSE 'dead letter' END;
    END IF;
    IF outcome = 'dead letter' THEN
        INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
        SELECT t.eql_name,
               CASE WHEN t.eql_partitions < 0 THEN -1
                    WHEN failed.key IS NULL THEN floor(random() * t.eql_partitions)::smallint
                    ELSE {schema}.partition_of_key(failed.key, t.eql_partitions) END,
               failed.key, coalesce(failed.value, ''), (
                   -- As text: the mark of an erased event stays the first.
                   SELECT '{' || string_agg(to_json(n.name)::text || ':' || to_json(n.text)::text, ',' ORDER BY n.place)
                          || '}'
                   FROM (
                       SELECT DISTINCT ON (each.name) each.name, each.text, each.place
                       FROM (
                           SELECT m.name, coalesce(m.value #>> '{}', 'null') AS text, m.place
                           FROM json_each(failed.metadata) WITH ORDINALITY AS m (name, value, place)
                           UNION ALL
                           VALUES ('dlt_consumer', held.consumer, 1000001),
                                  ('dlt_exception', left(kind, 2000), 1000002),
                                  ('dlt_message', CASE WHEN failed.value IS NULL THEN 'the event was erased'
                                                  ELSE substr(told, length(kind) + 3) END, 1000003),
                                  ('dlt_attempts', tries::text, 1000004),
                                  ('dlt_topic', held.topic, 1000005),
                                  ('dlt_partition', failed.partition::text, 1000006),
                                  ('dlt_offset', event::text, 1000007),
                                  ('dlt_backfill', substring(held.consumer FROM
                                      '^.+__backfill_([a-z0-9][a-z0-9-]*)_[0-9]+_[0-9]+(?:__into_.+)?$'), 1000008)
                       ) each
                       WHERE each.text IS NOT NULL
                       ORDER BY each.name, each.place DESC
                   ) n
               )::json
        FROM {schema}.topic t WHERE t.eql_name = letters;
        PERFORM {schema}.advance_consumer(held.topic, held.consumer, held.partition, reached, event);
        reached := event;
        UPDATE {schema}.consumer c SET eql_given_up = c.eql_given_up + 1
        WHERE c.eql_topic = held.topic AND c.eql_name = held.consumer AND c.eql_partition = held.partition;
    ELSE
        UPDATE {schema}.consumer c
        SET eql_failed_event_id = event, eql_attempts = tries,
            eql_failure = CASE WHEN failed.value IS NULL THEN 'the event was erased' ELSE told END,
            eql_retry_at = clock_timestamp() + make_interval(secs => least(60, 2.0 ^ least(tries - 1, 30)))
        WHERE c.eql_topic = held.topic AND c.eql_name = held.consumer AND c.eql_partition = held.partition;
    END IF;
    PERFORM {schema}.end_claim(claim, CASE WHEN reached = held.upto THEN 'committed' ELSE 'released' END);
    RETURN outcome;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statement in (_RECEIVE, _FAIL):
        text = statement.replace("{settings}", _SETTINGS)
        run(text.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
