"""The rights of each kind of role: on the platform's own tables, and on the log of each topic.

A role has one kind, and one topic or all of them. This module alone says what a kind may do. The error for a right that
the current role lacks names the GRANT that gives it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from psycopg import sql

from eventsql_orchestration.database.log_names import names_log
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX
from eventsql_orchestration.validation import advised

ADMIN: Final = "admin"
KINDS: Final = (ADMIN, "transfer", "publisher", "stager", "consumer", "reader", "eraser", "sender", "worker")
"""Every kind of role. A stager publishes what it has staged in blocks, as Spark and assets do. A sender sends
messages to queues, a worker receives and settles them."""

TOPIC_KINDS: Final = ("publisher", "consumer", "reader")
"""The kinds that a role of one topic can have."""

DEFAULT_PREFIX: Final = "eventsql"
"""The names of roles begin with it. Roles belong to a server: installations that share a server need different
prefixes."""

MOST_NAME: Final = 63
"""The bytes of a PostgreSQL identifier."""

TRIGGER: Final = "event_buffer_granted"
"""The trigger on the buffer that refuses events which a role may not publish. It exists where roles exist."""

_CONSUME: Final = (
    "partition_waiting", "partition_events", "range_statement", "hold_claim", "end_claim", "advance_consumer",
    "filter_takes", "readable_metadata", "first_taken", "fetch", "commit", "release", "renew", "fail",
)  # fmt: skip
"""The functions that consume in SQL, and the functions that they call."""

_SEND: Final = ("put_messages", "queue_number", "queue_send", "queue_send_all")
"""The functions that send messages to queues, and the functions that they call."""

_WORK: Final = (
    "take_messages", "take_in_order", "take_others_in_order", "bury_messages", "promote_keys", "note_of_message",
    "acknowledge_messages", "make_queue_archive", "queue_number", "queue_receive", "queue_acknowledge",
    "queue_acknowledge_all", "queue_release", "queue_extend", "refuse_messages",
)  # fmt: skip
"""The functions that receive and settle messages, and the functions that they call."""

FUNCTIONS: Final = (
    "partition_of_key", "keep_published_block", "place_in_layout", "hold_topics", "publish_anywhere",
    "check_publication", "make_segments", "ensure_segments", "enter_layout", "forget_topic", "forget_consumer",
    "redefine_topic", "events", "capture_columns", "capture_type", "capture_destination", "capture_source",
    "capture_changes", "capture_page", "capture_key", "forget_captures", "publish", "publish_all", "lock_last_of_keys",
    *dict.fromkeys((*_SEND, *_WORK)), *_CONSUME, "make_view_periods", "refuse_rows", "order_change",
)  # fmt: skip
"""The platform's functions."""

SEQUENCES: Final = ("event_buffer_eql_id_seq",)
"""The platform's own sequences on which some kind of role has rights."""

BY_TOPIC: Final = ("consumer", "consumer_claim", "consumer_cursor", "consumer_delivery", "consumer_worker")
"""Tables with rows of all topics; row security shows a role of one topic its own rows."""

_DEFINITIONS: Final = ("SELECT ON {s}.schema_version, {s}.topic, {s}.topic_layout, {s}.shard, {s}.shard_layout",)
_PUBLISH: Final = (
    "INSERT (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) ON {s}.event_buffer",
    "INSERT (eql_events, eql_block_partition, eql_keys, eql_values, eql_event_metadata) ON {s}.event_buffer",
    "USAGE ON SEQUENCE {s}.event_buffer_eql_id_seq",
    "EXECUTE ON FUNCTION {s}.hold_topics",
    "EXECUTE ON FUNCTION {s}.partition_of_key",
    "EXECUTE ON FUNCTION {s}.publish",
    "EXECUTE ON FUNCTION {s}.publish_all",
)
_MOVED: Final = (
    "eql_first_event_id", "eql_last_event_id", "eql_last_consumption_at", "eql_consumed_events", "eql_epoch",
    "eql_lease_owner", "eql_lease_expires_at", "eql_failed_event_id", "eql_attempts", "eql_failure", "eql_retry_at",
    "eql_until", "eql_given_up",
)  # fmt: skip
"""The columns of a consumer that consuming changes; its names, filter, most attempts and pause are not among them."""

_CLAIMED: Final = (
    "eql_topic", "eql_consumer", "eql_partition", "eql_after", "eql_upto", "eql_events", "eql_epoch", "eql_owner",
)  # fmt: skip
"""The columns of a claim that claiming writes. The id is not among them: claims of all topics share its sequence, so a
role of one topic could take the next ids of other topics. The same holds for cursors and workers."""

_CURSOR_OF: Final = ("eql_topic", "eql_consumer", "eql_partition")
_CURSOR: Final = ("eql_offset", "eql_claimed_upto", "eql_unacknowledged", "eql_by_key")

_STATE_OF_MESSAGE: Final = (
    "eql_id", "eql_queue", "eql_priority", "eql_in_order", "eql_receives", "eql_unhandled", "eql_receipt",
    "eql_visible_at", "eql_due_at", "eql_origin", "eql_created_at",
)  # fmt: skip
"""The columns that tell how many messages wait, and since when; not their contents."""

_TIMES_OF_ARCHIVED: Final = (
    "SELECT (eql_queue, eql_created_at, eql_acknowledged_at, eql_expires_at) ON {s}.queue_archive"
)
"""How many messages were acknowledged, and when; not their contents."""

_MOVED_MESSAGE: Final = (
    "eql_id", "eql_queue", "eql_origin", "eql_in_order", "eql_receives", "eql_unhandled", "eql_receipt",
    "eql_visible_at", "eql_due_at", "eql_history",
)  # fmt: skip
"""The columns of a message that receiving, releasing and burying change; its body, key and metadata are not among
them."""

_CAPTURE: Final = (
    "eql_id", "eql_topic", "eql_relation", "eql_table", "eql_key_names", "eql_key_numbers", "eql_column_names",
    "eql_column_numbers", "eql_snapshot", "eql_snapshot_rows", "eql_created_at",
)  # fmt: skip
"""The columns that tell how a table is captured. The column that is left out has the key of a row."""

_BUFFERED: Final = (
    "SELECT (eql_id, eql_topic, eql_partition, eql_events, eql_block_partition, eql_created_at) ON {s}.event_buffer",
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
        # Moving events calls it, even where PUBLIC may not.
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
        "SELECT, DELETE, UPDATE (eql_epoch, eql_owner, eql_state, eql_finished_at) ON {s}.consumer_claim",
        f"INSERT ({', '.join(_CLAIMED)}) ON {{s}}.consumer_claim",
        f"SELECT, DELETE, UPDATE ({', '.join(_CURSOR)}) ON {{s}}.consumer_cursor",
        f"INSERT ({', '.join((*_CURSOR_OF, *_CURSOR))}) ON {{s}}.consumer_cursor",
        "SELECT, DELETE, UPDATE (eql_expires_at) ON {s}.consumer_worker",
        "INSERT (eql_topic, eql_consumer, eql_name, eql_expires_at) ON {s}.consumer_worker",
        "SELECT, INSERT, UPDATE, DELETE ON {s}.consumer_delivery",
        "EXECUTE ON FUNCTION {s}.enter_layout",
        "EXECUTE ON FUNCTION {s}.events",
        *(f"EXECUTE ON FUNCTION {{s}}.{name}" for name in _CONSUME),
    ),
    "reader": (
        *_DEFINITIONS,
        *_BUFFERED,
        "SELECT ON {s}.shard_fence, {s}.consumer, {s}.consumer_claim, {s}.redriven_dead_letter",
        f"SELECT ({', '.join(_CAPTURE)}) ON {{s}}.capture",
        "SELECT ON {s}.consumer_cursor, {s}.consumer_delivery, {s}.consumer_worker",
        # The function has its caller's rights: reading a topic takes SELECT on the log, too.
        "EXECUTE ON FUNCTION {s}.events",
        "EXECUTE ON FUNCTION {s}.readable_metadata",
    ),
    "eraser": (
        *_DEFINITIONS,
        "SELECT, UPDATE (eql_value, eql_metadata, eql_values, eql_event_metadata) ON {s}.event_buffer",
        "SELECT, UPDATE (eql_value, eql_values, eql_event_metadata) ON {s}.spark_staged_event",
        "SELECT, UPDATE (eql_topic) ON {s}.event_buffer_lock",
        "SELECT, UPDATE (eql_failure) ON {s}.consumer, {s}.consumer_delivery",
        "SELECT, INSERT, UPDATE (eql_finished_at, eql_events, eql_buffered, eql_dead_letters) ON {s}.erasure",
        "EXECUTE ON FUNCTION {s}.readable_metadata",
    ),
    "sender": (
        *_DEFINITIONS,
        "SELECT ON {s}.queue",
        *(f"EXECUTE ON FUNCTION {{s}}.{name}" for name in _SEND),
    ),
    "worker": (
        *_DEFINITIONS,
        "SELECT ON {s}.queue",
        f"SELECT, DELETE, UPDATE ({', '.join(_MOVED_MESSAGE)}) ON {{s}}.queue_message",
        "INSERT ON {s}.queue_archive",
        _TIMES_OF_ARCHIVED,
        *(f"EXECUTE ON FUNCTION {{s}}.{name}" for name in _WORK),
    ),
}  # fmt: skip
_RIGHTS_OF_ALL_TOPICS: Final[Mapping[str, tuple[str, ...]]] = {
    "publisher": ("EXECUTE ON FUNCTION {s}.publish_anywhere",),
    "stager": ("EXECUTE ON FUNCTION {s}.publish_anywhere",),
    "reader": (
        "SELECT ON {s}.access_role, {s}.event_buffer_lock, {s}.spark_publication, {s}.spark_decision, {s}.spark_part",
        "SELECT ON {s}.erasure",
        "SELECT ON SEQUENCE {s}.event_buffer_eql_id_seq",
        "SELECT ON {s}.queue",
        f"SELECT ({', '.join(_STATE_OF_MESSAGE)}) ON {{s}}.queue_message",
        _TIMES_OF_ARCHIVED,
    ),
}
"""Further rights of a role of all topics."""

_TABLES_OF_RIGHTS: Final = (_RIGHTS, _RIGHTS_OF_ALL_TOPICS)

_READ_LOG: Final = ("SELECT ON {log}", "SELECT ON {events}", "SELECT ON SEQUENCE {ids}")
_MAY_PUBLISH: Final = ("INSERT (eql_id) ON {events}",)
"""Marks the right to publish to one topic. It lets nobody insert events, and is removed with the topic."""

_RIGHTS_ON_LOG: Final[Mapping[str, tuple[str, ...]]] = {
    "transfer": (
        "INSERT (eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata) ON {log}",
        "SELECT (eql_id, eql_buffered_at, eql_created_at) ON {log}",
        "USAGE ON SEQUENCE {ids}",
    ),
    "consumer": _READ_LOG,
    "reader": _READ_LOG,
    "eraser": (*_READ_LOG, "UPDATE (eql_value, eql_metadata) ON {log}"),
}
_ERASE_BLOCKS: Final = (*_READ_LOG, "UPDATE (eql_values, eql_metadata) ON {log}")
"""The rights of the eraser on a log in blocks."""

_WRITE_BLOCKS: Final = (
    "INSERT ON {log}",
    "SELECT (eql_id, eql_events, eql_span, eql_entered, eql_buffered_at, eql_created_at) ON {log}",
    "USAGE ON SEQUENCE {ids}",
)
"""The rights of the transfer on a log in blocks."""

GRANTED_FUNCTIONS: Final = frozenset(
    right.removeprefix("EXECUTE ON FUNCTION {s}.")
    for table in _TABLES_OF_RIGHTS
    for right in chain.from_iterable(table.values())
    if right.startswith("EXECUTE")
)
"""The functions that some kind of role may execute. A REVOKE on any other function would store its default rights."""

_DOES: Final[Mapping[str, str]] = {
    "reader": "reads it",
    "publisher": "publishes",
    "transfer": "moves events",
    "stager": "publishes what Spark or an asset has staged",
    "consumer": "consumes",
    "eraser": "erases events of a key",
    "sender": "sends messages",
    "worker": "receives and settles messages",
}
"""The work of a member of each kind of role, in words. The kind with the least rights comes first."""

_OBJECT: Final = re.compile(
    r"(?:permission denied for|must be owner of) (?P<kind>[a-z ]+?)(?: \"?(?P<name>[^\"]+)\"?)?$"
)


@dataclass(frozen=True, slots=True)
class Role:
    """A group role of PostgreSQL, of one topic or, with None, of all."""

    name: str
    kind: str
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """A topic with a table of its log and the sequence of the ids, both as SQL. A log in both forms has several.

    `view` shows the events of a log with blocks; None for a log in rows. `blocks`: the table holds or shows blocks.
    """

    topic: str
    table: sql.Composable
    sequence: sql.Composable
    view: sql.Composable | None = None
    blocks: bool = False


def role_name(prefix: str, kind: str, topic: str | None = None) -> str:
    """The name of a role: `{prefix}_{kind}`, and `_{topic}` for one topic.

    A name that is longer than PostgreSQL's 63 bytes keeps its first 54, and ends with `_` and the first eight digits of
    the topic's SHA-256.
    """
    name = f"{prefix}_{kind}" + ("" if topic is None else f"_{topic}")
    if topic is None or len(name.encode()) <= MOST_NAME:
        return name
    return f"{name[: MOST_NAME - 9]}_{hashlib.sha256(topic.encode()).hexdigest()[:8]}"


def rights(role: Role, schema: str) -> Iterator[sql.Composed]:
    """GRANT statements for the platform's own tables."""
    granted = _RIGHTS[role.kind] + (_RIGHTS_OF_ALL_TOPICS.get(role.kind, ()) if role.topic is None else ())
    for right in granted:
        yield sql.SQL("GRANT " + right + " TO {role}").format(s=sql.Identifier(schema), role=sql.Identifier(role.name))


def rights_on_log(role: Role, log: Log) -> Iterator[sql.Composed]:
    """GRANT statements for a topic's log."""
    granted: tuple[str, ...] = ()
    if role.topic in (None, log.topic):
        granted = _RIGHTS_ON_LOG.get(role.kind, ())
        if role.kind == "transfer" and log.blocks:
            granted = _WRITE_BLOCKS
        if role.kind == "eraser" and log.blocks:
            granted = _ERASE_BLOCKS
    if role.kind == "publisher" and role.topic == log.topic:
        granted = _MAY_PUBLISH
    source = log.topic.removesuffix(DEAD_LETTER_SUFFIX)
    if role.kind == "consumer" and source != log.topic and role.topic in (None, source):
        granted += _MAY_PUBLISH
    for right in dict.fromkeys(granted):
        if log.view is None and right == "SELECT ON {events}":
            continue
        yield sql.SQL("GRANT " + right + " TO {role}").format(
            log=log.table, events=log.view or log.table, ids=log.sequence, role=sql.Identifier(role.name)
        )


def permission_error(
    detail: str, where: str, role: str | None, prefix: str | None, held: Collection[str] = (), *, by_admin: bool = False
) -> PermissionDeniedError:
    """The error for a right that the current role lacks. `detail` is the server's message.

    `role` is the current role, as far as it is known. `prefix` begins the names of this installation's roles; None
    if it has no roles. The role has the rights of the kinds in `held`, so it lacks another right. With `by_admin`, the
    call is the admin's: it needs further rights than the one that was missing first.
    """
    found = _OBJECT.search(detail)
    kind, name = (found["kind"], found["name"]) if found is not None else ("", None)
    to = f'"{role}"' if role else "it"
    if by_admin:
        advice = f"only the admin may do this: `GRANT {prefix or DEFAULT_PREFIX}_{ADMIN} TO {to}`"
    elif found is None or kind == "schema":
        # The server speaks another language, or each kind has this right: the kind that the role needs is not known.
        kinds = ", ".join(each for each in KINDS if each != "reader")
        advice = (
            f"`GRANT {prefix or DEFAULT_PREFIX}_reader TO {to}` to read, or another role in place of reader: {kinds}"
        )
    else:
        advice = ", or ".join(
            f"`GRANT {prefix or DEFAULT_PREFIX}_{each} TO {to}`" + (f", which {does}" if does else "")
            for each, does in _needed(kind, name, detail, held)
        )
    if not prefix:
        advice += "; `eventsql roles create` makes these roles"
    if kind == "topic" and name is not None:
        create = advised(f"roles create --prefix {prefix or DEFAULT_PREFIX} --topic", name)
        advice += f"; `{create}` makes a role that publishes to this topic alone"
    return PermissionDeniedError(
        f"{where} refuses role {role or 'of this connection'!r} ({detail}): {advice}", role=role, object=name
    )


def may_not_migrate(
    detail: str, where: str, *, schema: str, revision: str, role: str | None, prefix: str | None
) -> PermissionDeniedError:
    """The error for a role that may not migrate a schema to `revision`; otherwise as `permission_error`."""
    who = "as the owner of its tables"
    if prefix is not None:
        who = f'as a member of {prefix}_{ADMIN}, or `GRANT {prefix}_{ADMIN} TO "{role}"`'
    return PermissionDeniedError(
        f"role {role!r} may not migrate schema {schema!r} of {where} to revision {revision} ({detail}): run "
        f"`eventsql migrate` {who}; if there are no tables yet, as a role with CREATE on the database",
        role=role, object=schema,
    )  # fmt: skip


def _needed(kind: str, name: str | None, detail: str, held: Collection[str]) -> Sequence[tuple[str, str]]:
    """The roles that have the right, by the end of their names, and the work of each. `detail` is in English."""
    if kind == "topic":
        return [("publisher", _DOES["publisher"]), (ADMIN, "changes it")]
    if name is None or not detail.startswith("permission"):
        return [(ADMIN, "")]

    kinds = _kinds_for(name, held)
    return [*((each, _DOES[each]) for each in kinds), (ADMIN, "changes it" if kinds else "")]


def _kinds_for(name: str, held: Collection[str]) -> Sequence[str]:
    """The kinds of role that have a right on a table, sequence or function which the kinds in `held` lack.

    Of kinds that share a right, only the kind with the least rights counts. A right to read some columns does not
    count.
    """
    had = {right for kind in held for table in _TABLES_OF_RIGHTS for right in _rights_on(name, table.get(kind, ()))}
    found: dict[tuple[str, bool], str] = {}
    for table in _TABLES_OF_RIGHTS:
        for kind in _DOES:
            for right in _rights_on(name, table.get(kind, ())) - had:
                found.setdefault((right, table is _RIGHTS_OF_ALL_TOPICS), kind)
    # A log, and a segment or sequence of a log, is named after its topic. A view may be named `event_count`.
    if not found and not had and names_log(name.removeprefix("view_")):
        return [kind for kind in _DOES if kind in _RIGHTS_ON_LOG and kind not in held]
    return list(dict.fromkeys(kind for kind in _DOES if kind in found.values()))


def _rights_on(name: str, rights: Sequence[str]) -> set[str]:
    """The rights on an object, such as `SELECT` or `UPDATE eql_failure`."""
    found: set[str] = set()
    for right in rights:
        what, _, objects = right.partition(" ON ")
        if name in re.findall(r"\{s\}\.(\w+)", objects):
            for privilege, columns in re.findall(r"([A-Z]+)(?: \(([^)]*)\))?", what):
                if not columns:
                    found.add(privilege)
                elif privilege != "SELECT":
                    found.update(f"{privilege} {column}" for column in columns.split(", "))
    return found
