-- notify -- Send each payload to every listener of a channel after the commit. Commits with notifications run one after
-- another, so none waits for the disk: a crash loses only a notification.
SELECT pg_notify(%(channel)s, payload), set_config('synchronous_commit', 'off', true)
FROM unnest(%(payloads)s::text[]) AS payload;
