"""The Java side of a shared database: a Java service on EventSQL's library, and a stand-in that sends its statements.

The stand-in exists because the library cannot be had everywhere: its statements are those of EventSQL 1.0.0, in its
order, in its transactions and with its caches, on threads of this process.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import random
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from tests.waiting import PATIENCE

FLUSH_SECONDS = 0.25
POLLING_SECONDS = 0.02
FLUSHED_AT_ONCE = 1_000


class JavaError(Exception):
    """A refusal of the Java side, in its words."""


@dataclass(frozen=True)
class Written:
    """An event to be published."""

    key: str | None
    value: bytes
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """An event as a consumer of the Java side was handed it."""

    topic: str
    partition: int
    id: int
    key: str | None
    value: bytes
    metadata: Mapping[str, str]


class Side(Protocol):
    """The operations of a Java service. `seen` has the events that its consumers got."""

    seen: list[Seen]

    def register_topic(self, name: str, partitions: int) -> None: ...

    def register_consumer(self, topic: str, name: str, *, partitioned: bool) -> None: ...

    def unregister_topic(self, name: str) -> None: ...

    def unregister_consumer(self, topic: str, name: str) -> None: ...

    def publish(self, topic: str, events: Sequence[Written]) -> None: ...

    def start(self, topic: str, consumer: str, *, batch: int = 50, poison: str | None = None) -> None:
        """Consume in batches, or one by one and failing at the value `poison`, as dead letters where there can be."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


# The library


def _encoded(data: str | bytes | None) -> str:
    if data is None:
        return "-"
    raw = data.encode() if isinstance(data, str) else data
    return "." + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decoded(word: str) -> bytes:
    return base64.urlsafe_b64decode(word[1:] + "=" * (-len(word[1:]) % 4))


class Service:
    """A process of `Service.java`."""

    def __init__(self, command: list[str | Path], dsn: str, schema: str) -> None:
        url = make_url(dsn)
        self.seen: list[Seen] = []
        self._answers: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            [
                *command,
                f"jdbc:postgresql://{url.host}:{url.port}/{url.database}?currentSchema={schema}",
                str(url.username),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PGPASSWORD": str(url.password)},
        )
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()
        self._await()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, *words = line.split()
            if kind != "event":
                self._answers.put(line.strip())
                continue
            topic, partition, event_id, key, value, metadata = words
            pairs = [] if metadata == "-" else [pair.split("=") for pair in metadata.split(",")]
            self.seen.append(
                Seen(
                    topic, int(partition), int(event_id), None if key == "-" else _decoded(key).decode(),
                    _decoded(value), {_decoded(name).decode(): _decoded(text).decode() for name, text in pairs},
                )
            )  # fmt: skip

    def _await(self) -> None:
        answer = self._answers.get(timeout=PATIENCE)
        if answer != "done":
            raise JavaError(_decoded(answer.removeprefix("error ")).decode())

    def _tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        self._await()

    def register_topic(self, name: str, partitions: int) -> None:
        self._tell("topic", name, partitions)

    def register_consumer(self, topic: str, name: str, *, partitioned: bool) -> None:
        self._tell("consumer", topic, name, str(partitioned).lower())

    def unregister_topic(self, name: str) -> None:
        self._tell("unregister", name)

    def unregister_consumer(self, topic: str, name: str) -> None:
        self._tell("unregister", topic, name)

    def publish(self, topic: str, events: Sequence[Written]) -> None:
        words = [
            ":".join(
                [
                    _encoded(event.key),
                    _encoded(event.value),
                    ",".join(f"{_encoded(name)}={_encoded(text)}" for name, text in event.metadata) or "-",
                ]
            )
            for event in events
        ]
        self._tell("publish", topic, *words)

    def start(self, topic: str, consumer: str, *, batch: int = 50, poison: str | None = None) -> None:
        self._tell("start", topic, consumer, batch, _encoded(poison))

    def stop(self) -> None:
        self._tell("stop")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._hearing.join(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


# The stand-in

_TABLES = """
CREATE TABLE IF NOT EXISTS topic (
    eql_name varchar, eql_partitions smallint NOT NULL,
    eql_created_at timestamp NOT NULL DEFAULT current_timestamp, PRIMARY KEY (eql_name)
);
CREATE TABLE IF NOT EXISTS consumer (
    eql_topic varchar NOT NULL, eql_name varchar NOT NULL, eql_partition smallint NOT NULL, eql_first_event_id bigint,
    eql_last_event_id bigint, eql_last_consumption_at timestamp, eql_consumed_events bigint NOT NULL,
    eql_created_at timestamp NOT NULL DEFAULT current_timestamp, PRIMARY KEY (eql_topic, eql_name, eql_partition)
);
"""

_BUFFER = """
CREATE TABLE IF NOT EXISTS event_buffer (
    eql_id bigint GENERATED BY DEFAULT AS IDENTITY NOT NULL, eql_topic varchar NOT NULL,
    eql_partition smallint NOT NULL, eql_key varchar, eql_value bytea NOT NULL,
    eql_created_at timestamp NOT NULL DEFAULT current_timestamp, eql_metadata json NOT NULL, PRIMARY KEY (eql_id)
);
CREATE INDEX IF NOT EXISTS event_buffer_topic_id ON event_buffer (eql_topic, eql_id);
CREATE TABLE IF NOT EXISTS {log} (
    eql_id bigint GENERATED BY DEFAULT AS IDENTITY NOT NULL, eql_partition smallint NOT NULL, eql_key varchar,
    eql_value bytea NOT NULL, eql_buffered_at timestamp NOT NULL,
    eql_created_at timestamp NOT NULL DEFAULT current_timestamp, eql_metadata json NOT NULL, PRIMARY KEY (eql_id)
);
CREATE TABLE IF NOT EXISTS event_buffer_lock (eql_topic varchar, PRIMARY KEY (eql_topic));
INSERT INTO event_buffer_lock (eql_topic) VALUES ({topic}) ON CONFLICT DO NOTHING;
"""

_MOVE = """
INSERT INTO {log} (eql_partition, eql_key, eql_value, eql_metadata, eql_buffered_at)
SELECT eql_partition, eql_key, eql_value, eql_metadata, eql_created_at AS eql_buffered_at
FROM event_buffer WHERE eql_id = ANY (%s)
"""


class StandIn:
    """The operations of the library, as statements that this process sends."""

    def __init__(self, dsn: str, schema: str, time_zone: str) -> None:
        self._dsn = dsn
        self._options = f"-c search_path={schema} -c TimeZone={time_zone}"
        self.seen: list[Seen] = []
        self._partitions: dict[str, int | None] = {}
        self._published: set[str] = set()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        with self._connect() as connection:
            connection.execute(_TABLES)

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._dsn, options=self._options, autocommit=True)

    @staticmethod
    def _log(topic: str) -> sql.SQL:
        # Unquoted, as the library writes it.
        return sql.SQL(f"{topic}_event")

    def _compose(self, statement: str, topic: str) -> sql.Composed:
        return sql.SQL(statement).format(log=self._log(topic), topic=sql.Literal(topic))

    def register_topic(self, name: str, partitions: int) -> None:
        with self._connect() as connection:
            row = connection.execute("SELECT eql_partitions FROM topic WHERE eql_name = %s", [name]).fetchone()
            if row == (partitions,):
                return
            if row is not None:
                events = connection.execute(self._compose("SELECT FROM {log} LIMIT 1", name)).fetchone()
                consumers = connection.execute("SELECT FROM consumer WHERE eql_topic = %s", [name]).fetchone()
                if events is not None or consumers is not None:
                    raise JavaError(f"IllegalArgumentException: {name} topic has events or consumers")
            with connection.transaction():
                connection.execute(
                    "INSERT INTO topic (eql_name, eql_partitions) VALUES (%s, %s) "
                    "ON CONFLICT (eql_name) DO UPDATE SET eql_partitions = excluded.eql_partitions",
                    [name, partitions],
                )
                if row is None:
                    connection.execute(self._compose(_BUFFER, name))

    def register_consumer(self, topic: str, name: str, *, partitioned: bool) -> None:
        with self._connect() as connection:
            row = connection.execute("SELECT eql_partitions FROM topic WHERE eql_name = %s", [topic]).fetchone()
            if row is None:
                raise JavaError(f"IllegalArgumentException: {topic} topic doesn't exist")
            found = connection.execute(
                "SELECT eql_last_event_id FROM consumer WHERE eql_topic = %s AND eql_name = %s", [topic, name]
            ).fetchall()
            other_form = (len(found) == 1 and partitioned) or (len(found) > 1 and not partitioned)
            if not other_form and len(found) in {row[0], 1}:
                return
            if any(last is not None for (last,) in found):
                raise JavaError("IllegalArgumentException: Cannot modify consumers with state")
            with connection.transaction():
                connection.execute("DELETE FROM consumer WHERE eql_topic = %s AND eql_name = %s", [topic, name])
                for partition in range(row[0]) if partitioned else [-1]:
                    connection.execute(
                        "INSERT INTO consumer (eql_topic, eql_name, eql_partition, eql_first_event_id, "
                        "eql_last_event_id, eql_last_consumption_at, eql_consumed_events) "
                        "VALUES (%s, %s, %s, NULL, NULL, NULL, 0)",
                        [topic, name, partition],
                    )

    def unregister_topic(self, name: str) -> None:
        with self._connect() as connection, connection.transaction():
            if connection.execute("SELECT FROM consumer WHERE eql_topic = %s", [name]).fetchone() is not None:
                raise JavaError("IllegalArgumentException: Cannot unregister topic with consumers")
            connection.execute("DELETE FROM topic WHERE eql_name = %s", [name])
            connection.execute(self._compose("DROP TABLE IF EXISTS {log}", name))
            connection.execute("DELETE FROM event_buffer WHERE eql_topic = %s", [name])
            connection.execute("DELETE FROM event_buffer_lock WHERE eql_topic = %s", [name])

    def unregister_consumer(self, topic: str, name: str) -> None:
        with self._connect() as connection:
            connection.execute("DELETE FROM consumer WHERE eql_topic = %s AND eql_name = %s", [topic, name])

    def _partitions_of(self, connection: psycopg.Connection[Any], topic: str) -> int | None:
        # For ever, also that there is no dead letter topic.
        if topic not in self._partitions:
            row = connection.execute("SELECT eql_partitions FROM topic WHERE eql_name = %s", [topic]).fetchone()
            self._partitions[topic] = None if row is None else row[0]
        return self._partitions[topic]

    def publish(self, topic: str, events: Sequence[Written]) -> None:
        with self._connect() as connection, connection.transaction():
            self._publish(connection, topic, events)

    def _publish(self, connection: psycopg.Connection[Any], topic: str, events: Iterable[Written]) -> None:
        partitions = self._partitions_of(connection, topic)
        if partitions is None:
            raise JavaError(f"IllegalArgumentException: topic of {topic} name doesn't exist")
        for event in events:
            connection.execute(
                "INSERT INTO event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
                "VALUES (%s, %s, %s, %s, %s::json)",
                [topic, _partition(event.key, partitions), event.key, event.value, _json(dict(event.metadata))],
            )
        if not self._published:
            self._run(self._flush_on)
        self._published.add(topic)

    def _run(self, target: Any, *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _flush_on(self) -> None:
        with self._connect() as connection:
            while not self._ending.wait(FLUSH_SECONDS):
                # A failure is logged there, and tried again.
                with suppress(psycopg.Error):
                    while self._flush(connection) > FLUSHED_AT_ONCE:
                        pass

    def _flush(self, connection: psycopg.Connection[Any]) -> int:
        with connection.transaction():
            locked = [
                topic
                for (topic,) in connection.execute(
                    "SELECT eql_topic FROM event_buffer_lock WHERE eql_topic = ANY (%s) FOR UPDATE SKIP LOCKED",
                    [list(self._published)],
                )
            ]
            found = connection.execute(
                "SELECT eql_topic, eql_id FROM event_buffer WHERE eql_topic = ANY (%s) ORDER BY eql_topic, eql_id "
                "LIMIT %s",
                [locked, FLUSHED_AT_ONCE + 1],
            ).fetchall()
            for topic in dict.fromkeys(topic for topic, _ in found):
                ids = [event_id for of, event_id in found if of == topic]
                connection.execute(self._compose(_MOVE, topic), [ids])
            connection.execute("DELETE FROM event_buffer WHERE eql_id = ANY (%s)", [[each for _, each in found]])
            return len(found)

    def start(self, topic: str, consumer: str, *, batch: int = 50, poison: str | None = None) -> None:
        with self._connect() as connection:
            found = connection.execute(
                "SELECT eql_partition FROM consumer WHERE eql_topic = %s AND eql_name = %s", [topic, consumer]
            ).fetchall()
        if not found:
            raise JavaError(f"IllegalArgumentException: There are no consumers of {topic} topic and {consumer} name")
        for (partition,) in found:
            self._run(self._consume_on, topic, consumer, partition, batch if poison is None else 10, poison)

    def _consume_on(self, topic: str, consumer: str, partition: int, batch: int, poison: str | None) -> None:
        with self._connect() as connection:
            rest = False
            while not self._ending.wait(POLLING_SECONDS if rest else 0):
                with suppress(psycopg.Error), connection.transaction():
                    rest = self._consume(connection, topic, consumer, partition, batch=batch, poison=poison)

    def _consume(
        self, connection: psycopg.Connection[Any], topic: str, consumer: str, partition: int, *,
        batch: int, poison: str | None,
    ) -> bool:  # fmt: skip
        """Gives whether there is nothing to do for now."""
        state = connection.execute(
            "SELECT eql_first_event_id, eql_last_event_id, eql_consumed_events FROM consumer "
            "WHERE eql_topic = %s AND eql_name = %s AND eql_partition = %s FOR UPDATE SKIP LOCKED",
            [topic, consumer, partition],
        ).fetchone()
        if state is None:
            return True
        first, last, consumed = state
        events = connection.execute(
            self._compose(
                "SELECT eql_id, eql_partition, eql_key, eql_value, eql_metadata FROM {log} "
                "WHERE (%(last)s::bigint IS NULL OR eql_id > %(last)s) "
                "AND (%(partition)s = -1 OR eql_partition = %(partition)s) ORDER BY eql_id LIMIT %(limit)s",
                topic,
            ),
            {"last": last, "partition": partition, "limit": batch},
        ).fetchall()
        if not events:
            return True
        rest = len(events) < batch
        first, last = first or events[0][0], events[-1][0]
        for event_id, of, key, value, metadata in events:
            seen = Seen(topic, of, event_id, key, bytes(value), metadata)
            if poison is not None and seen.value == poison.encode():
                rest, last = self._fail(connection, seen, consumer)
                break
            self.seen.append(seen)
        connection.execute(
            "UPDATE consumer SET eql_first_event_id = %s, eql_last_event_id = %s, "
            "eql_last_consumption_at = current_timestamp, eql_consumed_events = %s "
            "WHERE eql_topic = %s AND eql_name = %s AND eql_partition = %s",
            [first, last, consumed + len(events), topic, consumer, partition],
        )
        return rest

    def _fail(self, connection: psycopg.Connection[Any], event: Seen, consumer: str) -> tuple[bool, int]:
        letters = f"{event.topic}_dlt"
        if self._partitions_of(connection, letters) is None:
            return True, event.id - 1
        cause = {
            **event.metadata,
            "consumerName": consumer,
            "exceptionType": "java.lang.IllegalStateException",
            "exceptionMessage": "not today",
        }
        self._publish(connection, letters, [Written(event.key, event.value, tuple(cause.items()))])
        return False, event.id

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def close(self) -> None:
        self.stop()


def _partition(key: str | None, partitions: int) -> int:
    if partitions == -1:
        return -1
    if key is None:
        return random.randrange(partitions)
    return int.from_bytes(hashlib.sha256(key.encode()).digest(), "big") % partitions


def _json(metadata: Mapping[str, str]) -> str:
    """As the library writes it: over several lines, with the escapes of its own mapper."""
    pairs = [f'  "{name}": {json.dumps(text, ensure_ascii=False)}' for name, text in metadata.items()]
    return "{\n" + ",\n".join(pairs).replace("/", "\\/") + "\n}"
