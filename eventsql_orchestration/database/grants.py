"""The rights of each kind of role: on the platform's own tables, and on the log of each topic.

A role has one kind, and one topic or all of them. This module alone says what a kind may do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import sql

ADMIN: Final = "admin"
KINDS: Final = (ADMIN, "transfer", "publisher", "stager", "consumer", "reader")
"""Every kind of role. A stager publishes what it has staged in blocks, as Spark and assets do."""

TOPIC_KINDS: Final = ("publisher", "consumer", "reader")
"""The kinds that a role of one topic can have."""

DEFAULT_PREFIX: Final = "eventsql"
"""The names of roles begin with it. Roles belong to a server: installations that share one need several prefixes."""

MOST_NAME: Final = 63
"""The bytes of a PostgreSQL identifier."""

TRIGGER: Final = "event_buffer_granted"
"""The trigger on the buffer that refuses events which a role may not publish. It exists where roles exist."""

FUNCTIONS: Final = (
    "partition_of_key", "keep_published_block", "place_in_layout", "hold_topics", "publish_anywhere",
    "check_publication", "make_segments", "ensure_segments", "enter_layout", "forget_topic", "forget_consumer",
    "redefine_topic",
)  # fmt: skip
"""The platform's functions."""

BY_TOPIC: Final = ("consumer", "consumer_claim")
"""Tables with rows of all topics; row security shows a role of one topic its own rows."""

_DEFINITIONS: Final = ("SELECT ON {s}.schema_version, {s}.topic, {s}.topic_layout, {s}.shard, {s}.shard_layout",)
_PUBLISH: Final = (
    "INSERT (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) ON {s}.event_buffer",
    "USAGE ON SEQUENCE {s}.event_buffer_eql_id_seq",
    "EXECUTE ON FUNCTION {s}.hold_topics",
)
_MOVED: Final = (
    "eql_first_event_id", "eql_last_event_id", "eql_last_consumption_at", "eql_consumed_events", "eql_epoch",
    "eql_lease_owner", "eql_lease_expires_at", "eql_failed_event_id", "eql_attempts", "eql_failure", "eql_retry_at",
    "eql_until", "eql_given_up",
)  # fmt: skip
"""The columns of a consumer that consuming changes; its names, filter, most attempts and pause are not among them."""

_BUFFERED: Final = (
    "SELECT (eql_id, eql_topic, eql_partition, eql_created_at) ON {s}.event_buffer",
    "SELECT (eql_buffer_id, eql_metadata) ON {s}.spark_staged_event",
)
"""How many events wait in the buffer, and since when; not their contents."""

_RIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    "transfer": (
        *_DEFINITIONS,
        "SELECT, DELETE ON {s}.event_buffer, {s}.spark_staged_event",
        "SELECT, UPDATE (eql_topic) ON {s}.event_buffer_lock",
        "SELECT ON SEQUENCE {s}.event_buffer_eql_id_seq",
        "SELECT (eql_topic, eql_last_event_id) ON {s}.consumer",
        "EXECUTE ON FUNCTION {s}.ensure_segments",
        # Moving events of a repartitioned topic calls it, also where PUBLIC may not.
        "EXECUTE ON FUNCTION {s}.partition_of_key",
    ),
    "publisher": (*_DEFINITIONS, *_PUBLISH),
    "stager": (
        *_DEFINITIONS,
        *_PUBLISH,
        "SELECT, INSERT, UPDATE, DELETE ON {s}.spark_staged_event, {s}.spark_publication",
        "SELECT, INSERT, UPDATE, DELETE ON {s}.spark_decision, {s}.spark_part",
    ),
    "consumer": (
        *_DEFINITIONS,
        *_PUBLISH,
        *_BUFFERED,
        "SELECT ON {s}.shard_fence",
        f"SELECT, UPDATE ({', '.join(_MOVED)}) ON {{s}}.consumer",
        "SELECT, INSERT, DELETE, UPDATE (eql_epoch, eql_owner, eql_state, eql_finished_at) ON {s}.consumer_claim",
        "EXECUTE ON FUNCTION {s}.enter_layout",
    ),
    "reader": (
        *_DEFINITIONS,
        *_BUFFERED,
        "SELECT ON {s}.shard_fence, {s}.consumer, {s}.consumer_claim, {s}.redriven_dead_letter",
    ),
}  # fmt: skip
_RIGHTS_OF_ALL_TOPICS: Final[Mapping[str, tuple[str, ...]]] = {
    "publisher": ("EXECUTE ON FUNCTION {s}.publish_anywhere",),
    "stager": ("EXECUTE ON FUNCTION {s}.publish_anywhere",),
    "reader": (
        "SELECT ON {s}.access_role, {s}.event_buffer_lock, {s}.spark_publication, {s}.spark_decision, {s}.spark_part",
        "SELECT ON SEQUENCE {s}.event_buffer_eql_id_seq",
    ),
}
"""Further rights of a role of all topics."""

_READ_LOG: Final = ("SELECT ON {log}", "SELECT ON SEQUENCE {ids}")
_MAY_PUBLISH: Final = ("INSERT (eql_id) ON {log}",)
"""Stands for the right to publish to one topic: it inserts nothing, and the topic takes it along when it goes."""

_RIGHTS_ON_LOG: Final[Mapping[str, tuple[str, ...]]] = {
    "transfer": (
        "INSERT (eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata) ON {log}",
        "SELECT (eql_id, eql_buffered_at, eql_created_at) ON {log}",
        "USAGE ON SEQUENCE {ids}",
    ),
    "consumer": _READ_LOG,
    "reader": _READ_LOG,
}

GRANTED_FUNCTIONS: Final = tuple(
    dict.fromkeys(
        function
        for table in (_RIGHTS, _RIGHTS_OF_ALL_TOPICS)
        for rights_of_kind in table.values()
        for right in rights_of_kind
        for function in re.findall(r"ON FUNCTION \{s\}\.(\w+)", right)
    )
)
"""The functions that some kind of role may execute."""

_LEAST_FIRST: Final = ("reader", "publisher", "transfer", "stager", "consumer")

KINDS_FOR_LOGS: Final = tuple(kind for kind in _LEAST_FIRST if kind in _RIGHTS_ON_LOG)
"""The kinds that have rights on the logs of topics."""


@dataclass(frozen=True, slots=True)
class Role:
    """A group role of PostgreSQL, of one topic or, with None, of all."""

    name: str
    kind: str
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """A topic with the table of its log and the sequence of that table's ids, both as SQL."""

    topic: str
    table: sql.Composable
    sequence: sql.Composable


def role_name(prefix: str, kind: str, topic: str | None = None) -> str:
    """The name of a role: `{prefix}_{kind}`, and `_{topic}` for one topic.

    A name that is longer than PostgreSQL's 63 bytes keeps its first 54, and ends with `_` and the first eight digits of
    the topic's SHA-256.
    """
    name = f"{prefix}_{kind}" + ("" if topic is None else f"_{topic}")
    if topic is None or len(name.encode()) <= MOST_NAME:
        return name
    return f"{name[: MOST_NAME - 9]}_{hashlib.sha256(topic.encode()).hexdigest()[:8]}"


def kinds_for(name: str) -> tuple[str, ...]:
    """The kinds of role that have rights on a table, sequence or function of the platform.

    Of kinds that share a right, only the least one counts. A right to read some columns does not count.
    """
    found: dict[tuple[str, bool], str] = {}
    for table, of_all in ((_RIGHTS, False), (_RIGHTS_OF_ALL_TOPICS, True)):
        for kind in _LEAST_FIRST:
            for right in table.get(kind, ()):
                if name in re.findall(r"\{s\}\.(\w+)", right) and not right.startswith("SELECT ("):
                    found.setdefault((right, of_all), kind)
    return tuple(dict.fromkeys(found.values()))


def rights(role: Role, schema: str) -> Iterator[sql.Composed]:
    """GRANT statements for the platform's own tables."""
    granted = _RIGHTS[role.kind] + (_RIGHTS_OF_ALL_TOPICS.get(role.kind, ()) if role.topic is None else ())
    for right in granted:
        yield sql.SQL("GRANT " + right + " TO {role}").format(s=sql.Identifier(schema), role=sql.Identifier(role.name))


def rights_on_log(role: Role, log: Log, letters: str) -> Iterator[sql.Composed]:
    """GRANT statements for a topic's log; `letters` is the end of a dead letter topic's name."""
    granted: tuple[str, ...] = ()
    if role.topic in (None, log.topic):
        granted = _RIGHTS_ON_LOG.get(role.kind, ())
    if role.kind == "publisher" and role.topic == log.topic:
        granted = _MAY_PUBLISH
    if role.kind == "consumer" and log.topic.endswith(letters) and role.topic in (None, log.topic[: -len(letters)]):
        granted += _MAY_PUBLISH
    for right in granted:
        yield sql.SQL("GRANT " + right + " TO {role}").format(
            log=log.table, ids=log.sequence, role=sql.Identifier(role.name)
        )
