-- part nearest of time -- The time when an event was published, as a driver reads it. A program that writes into the buffer
-- may have given it any time.
greatest('0001-01-02 00:00+00', least('9999-12-31 00:00+00', {time}::timestamptz))

-- part seconds_since of time -- Seconds since an event was published. Before version 17 the server subtracts no infinite
-- time, and an infinite age is no number for people.
extract(epoch FROM clock_timestamp() - {nearest of {time}})::float8
