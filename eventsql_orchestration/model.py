"""The values of the log: topics, publications, events and ranges of offsets.

All are frozen and independent of a database. Each checks its own rules when it is made, so that every value can be
stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from eventsql_orchestration.errors import (
    InvalidNameError,
    InvalidPublicationError,
    PartitionOutOfRangeError,
    ValidationError,
)
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.validation import (
    MAX_VALUE_BYTES,
    NO_METADATA,
    check_choice,
    check_kind,
    check_metadata,
    check_text,
    check_time,
    check_whole,
    decode_metadata,
    shown,
    storable_metadata,
)

NOT_PARTITIONED: Final = -1
"""Stands for "not partitioned": as a topic's number of partitions, and as the partition of a consumer or an event."""

MAX_PARTITIONS: Final = 32_767
"""`eql_partition` is a smallint."""

MAX_TOPIC_NAME_LENGTH: Final = 57
"""PostgreSQL cuts identifiers at 63 bytes, and a topic's table is called `{topic}_event`."""

MAX_KEY_BYTES: Final = 64 * 1024

MAX_AGE: Final = timedelta(days=36_525)
"""A hundred years: the longest age, far within PostgreSQL's range."""

ERASED: Final = '{"eventsql_erased":'
"""The beginning of an erased event's metadata, as JSON. The time of the erasure follows. The event's value is empty."""

DEAD_LETTER_SUFFIX: Final = "_dlt"

_ADDED_METADATA: Final = ("dlt_", "redriven_")
"""The beginnings of the names that dead letters and redriven events have beside those of their events."""

_TOPIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)


def check_schema_name(name: object) -> str:
    """Return `name`, or raise `InvalidNameError`: a lower-case SQL identifier of at most 63 characters."""
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidNameError(
            f"schema name {shown(name)} is not usable: use a lower-case SQL identifier of at most 63 characters"
        )
    return name


def check_topic_name(name: object) -> str:
    """Return `name`, or raise `InvalidNameError`.

    The name becomes part of a table's name, which EventSQL's Java library writes unquoted: ASCII letters, digits and
    underscores. That library also makes topics with capitals, whose tables PostgreSQL names in lower case. The registry
    makes no such topics, so that one name is one table.
    """
    if not isinstance(name, str) or not _TOPIC_NAME.fullmatch(name):
        raise InvalidNameError(
            f"topic name {shown(name)} is not usable: use lower-case letters, digits and underscores, a letter first"
        )
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        raise InvalidNameError(
            f"topic name {shown(name)} has {len(name)} characters; {MAX_TOPIC_NAME_LENGTH} are allowed"
        )
    return name


def check_partitions(partitions: object) -> int:
    """Return a topic's number of partitions, or raise `ValidationError`: -1, or 1 to 32,767."""
    if isinstance(partitions, bool) or not isinstance(partitions, int):
        raise ValidationError(f"partitions must be a whole number, not {shown(partitions)}")
    if partitions != NOT_PARTITIONED and not 1 <= partitions <= MAX_PARTITIONS:
        raise ValidationError(
            f"{shown(partitions)} partitions are not possible: use 1 to {MAX_PARTITIONS}, or -1 for no partitions"
        )
    return partitions


def check_partition(topic: str, partition: object, partitions: int) -> int:
    """Return `partition`, or raise `PartitionOutOfRangeError` when a topic of `partitions` has no such partition."""
    number = check_whole(f"a partition of topic {topic!r}", partition, error=PartitionOutOfRangeError)
    least, most = (0, partitions - 1) if partitions != NOT_PARTITIONED else (NOT_PARTITIONED, NOT_PARTITIONED)
    if not least <= number <= most:
        having = f"has partitions 0 to {most}" if most >= 0 else "is not partitioned (its only partition is -1)"
        raise PartitionOutOfRangeError(f"partition {number} is out of range: topic {topic!r} {having}")
    return number


Storage: TypeAlias = Literal["rows", "blocks"]

ROWS: Final = "rows"
BLOCKS: Final = "blocks"
STORAGES: Final = (ROWS, BLOCKS)
"""The forms of a topic's log: a row for each event, or a row for many events."""

Compression: TypeAlias = Literal["none", "pglz", "lz4"]

UNCOMPRESSED: Final = "none"
COMPRESSIONS: Final = (UNCOMPRESSED, "pglz", "lz4")
"""How the server compresses the events of blocks. A server may be built without lz4."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The bounds of a topic's log: events beyond any of them may be dropped.

    `seconds` is an age by the time of entering the log, `bytes` and `events` are sizes of the log. None is no bound;
    `Retention()` keeps everything for ever. Raises `ValidationError` for bounds that are not positive, and for an age
    above a hundred years.
    """

    seconds: float | None = None
    bytes: int | None = None
    events: int | None = None

    def __post_init__(self) -> None:
        seconds: object = self.seconds
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not -math.inf < seconds < math.inf:
                raise ValidationError(f"the age of a retention must be a number of seconds, not {shown(seconds)}")
            if not 0 < seconds <= MAX_AGE.total_seconds():
                raise ValidationError(
                    f"the age of a retention must be above 0 and at most a hundred years, not {shown(seconds)} s"
                )
        for what, bound in (("size in bytes", self.bytes), ("number of events", self.events)):
            if bound is not None:
                check_whole(f"the {what} of a retention", bound, least=1)

    @property
    def for_ever(self) -> bool:
        return self.seconds is None and self.bytes is None and self.events is None


@dataclass(frozen=True, slots=True)
class Topic:
    """A named log of events.

    `partitions` is -1 for a topic that is not partitioned, else 1 to 32,767.

    `storage` is the form of its log: "blocks", or "rows" for a topic that a service on EventSQL's Java library shares.
    When a topic is registered, None keeps the form that it has; a new topic gets blocks, or rows if it is for dead
    letters.

    `compression` is the compression of its blocks: "none", "pglz" or "lz4". Events that are published one at a time are
    in small blocks, which are compressed when they are merged. When a topic is registered, None keeps the compression
    that it has; a new topic gets "lz4" if the server has it, else "none". A topic in rows has a compression too, for
    the time when its new events are in blocks.

    Equality looks at `name` and `partitions` alone. In a topic from the registry, the retention None means that
    everything is kept. When a topic is registered, None keeps the retention that it has, and `Retention()` ends it.
    `layout` counts how often the partitions of its keys have changed. `shards` are the databases that share the topic,
    if there are several.
    """

    name: str
    partitions: int = NOT_PARTITIONED
    created_at: datetime | None = field(default=None, compare=False)
    retention: Retention | None = field(default=None, compare=False)
    layout: int = field(default=1, compare=False)
    shards: ShardSet | None = field(default=None, compare=False, repr=False)
    storage: Storage | None = field(default=None, compare=False)
    compression: Compression | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_topic_name(self.name)
        check_partitions(self.partitions)
        if self.created_at is not None:
            check_time("created_at", self.created_at)
        check_kind("retention", self.retention, Retention | None)
        check_whole("layout", self.layout, least=1)
        check_kind("shards", self.shards, ShardSet | None)
        if self.storage is not None:
            check_choice("storage", self.storage, STORAGES)
        if self.compression is not None:
            check_choice("compression", self.compression, COMPRESSIONS)
        if self.storage == BLOCKS and self.name.endswith(DEAD_LETTER_SUFFIX):
            raise ValidationError(
                f"topic {self.name!r} takes dead letters, which are read one by one: its storage must be {ROWS!r}"
            )

    @property
    def partitioned(self) -> bool:
        return self.partitions != NOT_PARTITIONED

    @property
    def all_partitions(self) -> tuple[int, ...]:
        """The partitions that events of this topic may carry; `(-1,)` when it is not partitioned."""
        return tuple(range(self.partitions)) if self.partitioned else (NOT_PARTITIONED,)

    @property
    def dead_letter_topic(self) -> str:
        """The name of the topic that takes its dead letters, if it is registered."""
        return self.name + DEAD_LETTER_SUFFIX


@dataclass(frozen=True, slots=True)
class Publication:
    """An event to be published.

    `value` is any bytes, up to 64 MiB. Events with the same `key` keep their order and their partition; without a key
    the partition is drawn at random. `partition` overrides the partitioner. `metadata` maps strings to strings, up to
    16 MiB together. The publication keeps a copy of it, which cannot be changed.

    A publication that cannot be stored raises `InvalidPublicationError` when it is made.
    """

    topic: str
    value: bytes
    key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    partition: int | None = None

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        value: object = self.value
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidPublicationError(
                f"value must be bytes, not {type(value).__name__}: encode it first, as UTF-8 or JSON for example"
            )
        if not isinstance(value, bytes):
            object.__setattr__(self, "value", bytes(value))
        if len(self.value) > MAX_VALUE_BYTES:
            raise InvalidPublicationError(
                f"value has {len(self.value)} bytes; {MAX_VALUE_BYTES} are allowed: publish a reference to it instead"
            )
        if self.key is not None:
            check_text("key", self.key, most=MAX_KEY_BYTES, error=InvalidPublicationError)
        if self.metadata is not NO_METADATA:
            checked = check_metadata(self.metadata, error=InvalidPublicationError, added=_ADDED_METADATA)
            object.__setattr__(self, "metadata", checked)
        if self.partition is not None and type(self.partition) is not int:
            partition = check_whole("partition", self.partition, error=PartitionOutOfRangeError)
            object.__setattr__(self, "partition", partition)


class Event:
    """An event of a topic's ordered log; it cannot be changed.

    `id` is its offset: unique and growing within the topic, over all its partitions, with gaps. `buffered_at` is the
    time of its publication, `created_at` the time when it entered the log. A time of another program may be before
    0001-01-03, after 9999-12-30 or infinite: it is the nearest time between them, which Python has in every time zone.

    `erased`: `eventsql topic erase` has removed its value and metadata. Its `value` is None then, and its metadata has
    the time of the erasure as `eventsql_erased`.

    Values of metadata that another program has written may be any JSON. Metadata that are not a JSON object, or that
    Python cannot read, are one text by the name `eventsql_unreadable`.

    The constructor takes times and metadata as the database sends them too, as microseconds since 2000 in UTC and as
    JSON text. They are decoded when they are read. Measured: 1.0 µs an event, against 4.1 µs.
    """

    __slots__ = ("_buffered_at", "_created_at", "_id", "_key", "_metadata", "_partition", "_topic", "_value")

    def __init__(  # noqa: PLR0917 - in the order of the columns, as a generated one would take them
        self,
        topic: str,
        id: int,  # noqa: A002 - the field's name
        partition: int,
        key: str | None,
        value: bytes | None,
        buffered_at: datetime | int,
        created_at: datetime | int,
        metadata: Mapping[str, Any] | str,
    ) -> None:
        self._topic = topic
        self._id = id
        self._partition = partition
        self._key = key
        self._value = value
        self._buffered_at = buffered_at
        self._created_at = created_at
        self._metadata = metadata

    # Descriptors in C are three times as fast as properties in Python, at millions of events.
    topic: str = property(attrgetter("_topic"))  # type: ignore[assignment]
    id: int = property(attrgetter("_id"))  # type: ignore[assignment]
    partition: int = property(attrgetter("_partition"))  # type: ignore[assignment]
    key: str | None = property(attrgetter("_key"))  # type: ignore[assignment]
    # None only where `erased`. `Any` spares handlers of topics without erasures a check, as in `re.Match.group`.
    value: bytes | Any = property(attrgetter("_value"))

    @property
    def erased(self) -> bool:
        return self._value is None

    @property
    def buffered_at(self) -> datetime:
        return decoded_time(self._buffered_at)

    @property
    def created_at(self) -> datetime:
        return decoded_time(self._created_at)

    @property
    def metadata(self) -> Mapping[str, Any]:
        # A new mapping each time: a handler's changes must not show in the event, which may be retried.
        metadata = self._metadata
        return decode_metadata(metadata) if isinstance(metadata, str) else metadata

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, Event) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._topic, self._id))

    def __repr__(self) -> str:
        return (
            f"Event(topic={self._topic!r}, id={self._id}, partition={self._partition}, key={self._key!r}, "
            f"value={self._value!r}, buffered_at={self.buffered_at!r}, created_at={self.created_at!r}, "
            f"metadata={self.metadata!r})"
        )

    def _values(self) -> tuple[object, ...]:
        return (
            self._topic, self._id, self._partition, self._key, self._value,
            self.buffered_at, self.created_at, self.metadata,
        )  # fmt: skip

    def as_publication(self, topic: str | None = None, **metadata: str) -> Publication:
        """A publication of the same key, value and metadata for another topic, with further metadata.

        Metadata values of other publishers that are not strings become their JSON text. The publication of an erased
        event is read as an erased event, too.
        """
        return Publication(
            self.topic if topic is None else topic, b"" if self._value is None else self._value, key=self.key,
            metadata={**storable_metadata(self.metadata), **metadata},
        )  # fmt: skip


FIRST_TIME: Final = datetime(1, 1, 3, tzinfo=UTC)
LAST_TIME: Final = datetime(9999, 12, 30, 23, 59, 59, 999_999, tzinfo=UTC)
"""An event has a time from the first to the last. `datetime.astimezone` and `datetime.fromtimestamp`, which PySpark
calls, have each of them in every time zone: `fromtimestamp` looks at the time of the day before, too."""

_POSTGRESQL_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)

_FIRST, _LAST = ((time - _POSTGRESQL_EPOCH) // timedelta(microseconds=1) for time in (FIRST_TIME, LAST_TIME))


def how_often(times: int | str) -> str:
    """How often something happened, in words."""
    return "once" if str(times) == "1" else f"{times} times"


def decoded_time(time: datetime | int) -> datetime:
    """A time as `Event` takes it; the nearest time from `FIRST_TIME` to `LAST_TIME`."""
    if not isinstance(time, int):
        return time
    if not _FIRST < time < _LAST:
        return LAST_TIME if time > 0 else FIRST_TIME
    return _POSTGRESQL_EPOCH + timedelta(microseconds=time)


class Placement(NamedTuple):
    """Where a published event is: its partition, and its offset where that is known.

    Over several shards, both belong to the topic on the shard of the event's key.
    """

    partition: int
    """-1 in a topic without partitions."""

    offset: int | None
    """The `id` that consumers see. None for an event that went to the buffer, because the transfer gives it its offset,
    and in a log of rows, because the server gives it."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The events of a topic with `after < id <= upto`, of one partition or, with -1, of all of them."""

    topic: str
    partition: int
    after: int
    upto: int

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        check_whole("partition", self.partition, least=NOT_PARTITIONED, most=MAX_PARTITIONS)
        after, upto = check_whole("after", self.after), check_whole("upto", self.upto)
        if not 0 <= after <= upto:
            raise ValidationError(f"after {after} up to {upto} is not a range of offsets: 0 <= after <= upto is needed")

    @property
    def empty(self) -> bool:
        return self.after == self.upto

    def __str__(self) -> str:
        partition = "" if self.partition == NOT_PARTITIONED else f"[{self.partition}]"
        return f"{self.topic}{partition}({self.after}, {self.upto}]"
