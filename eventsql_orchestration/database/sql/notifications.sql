-- notify -- Tell every listener of a channel each of the payloads, once this statement has committed.
-- All that notify in a database commit one after the other, so none may wait for the disk in that: nothing is lost with a
-- notification that a crash takes back.
SELECT pg_notify(%(channel)s, payload), set_config('synchronous_commit', 'off', true)
FROM unnest(%(payloads)s::text[]) AS payload;
