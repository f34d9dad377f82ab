-- part seconds_since of time -- Seconds since an event was published. A program that writes into the buffer may have given
-- it any time: before version 17 the server subtracts no infinite time, and an infinite age is no number for people.
extract(epoch FROM clock_timestamp()
    - greatest('0001-01-02 00:00+00', least('9999-12-31 00:00+00', {time}::timestamptz)))::float8
