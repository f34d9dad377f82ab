-- notify -- Send each payload to every listener of a channel after the commit; no row if nobody listens. Commits with
-- notifications run one after another, so none waits for the disk: a crash loses only a notification.
SELECT pg_notify(%(channel)s, payload), set_config('synchronous_commit', 'off', true)
FROM unnest(%(payloads)s::text[]) AS payload
WHERE NOT pg_try_advisory_xact_lock(hashtextextended(%(channel)s, 6074605));

-- listening -- A row if anybody listens to a channel, or another sender looks just now.
SELECT true WHERE NOT pg_try_advisory_xact_lock(hashtextextended(%(channel)s::text, 6074605));

-- announce -- Tell senders until the end of the session that it listens to a channel. A sender holds the lock for the
-- time of a statement. Any role could hold it for longer: then this fails after a second. A listener may be idle.
SELECT set_config('lock_timeout', '1s', true), set_config('idle_session_timeout', '0', false),
       pg_advisory_lock_shared(hashtextextended(%(channel)s, 6074605));
